"""Logs, traces and metrics, set up once a process.

Logs are JSON lines with service, instance and the ids that the handler bound. Traces are W3C trace
context carried in message headers, exported by OTLP when an endpoint is set; without one the API's
no-op tracer is used, which costs next to nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import structlog
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind

from contracts.envelope import same_trace
from services.kit.settings import Settings

_tracer = trace.get_tracer("trainbus")


def set_up(service: str, settings: Settings) -> None:
    """Configure logging and tracing for this process."""
    level = logging.getLevelName(settings.log_level.upper())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(
            # The rich formatter prints local variables, and with them secrets.
            exception_formatter=structlog.dev.plain_traceback
        )
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if settings.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # What libraries say through the standard logging comes out in the same form.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    structlog.contextvars.bind_contextvars(service=service, instance=settings.instance)
    if settings.otlp_endpoint:
        _export_traces(service, settings)


def _export_traces(service: str, settings: Settings) -> None:
    # Imported here: without an endpoint the exporter's memory is not spent.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": f"trainbus-{service}", "service.instance.id": settings.instance})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{settings.otlp_endpoint}/v1/traces")))
    trace.set_tracer_provider(provider)


@contextmanager
def start_span(
    name: str, kind: SpanKind = SpanKind.INTERNAL, traceparent: str = "", **attributes: str
) -> Iterator[Span]:
    """Open a span, as a child of ``traceparent`` when one is given, else of the current one."""
    context = propagate.extract({"traceparent": traceparent}) if traceparent else None
    with _tracer.start_as_current_span(name, context=context, kind=kind, attributes=attributes) as current:
        yield current


def select_parent(traceparent: str) -> str:
    """Return a span's parent: the open span if it belongs to that trace, else ``traceparent``."""
    current = current_traceparent()
    return current if same_trace(current, traceparent) else traceparent


def current_traceparent(fallback: str = "") -> str:
    """Return the open span's W3C header, or ``fallback`` when nothing is traced here."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", fallback)


def bind_log_context(ids: Mapping[str, str]) -> AbstractContextManager[None]:
    """Add ids (run_id and such) to every log line written inside."""
    return cast(AbstractContextManager[None], structlog.contextvars.bound_contextvars(**ids))
