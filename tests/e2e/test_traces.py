"""One run is one trace, through every service, over an OTLP collector; without a collector there is no tracing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.kit.bus import Bus
from tests.e2e.support import connected
from tests.kit.support import until
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

pytestmark = [pytest.mark.e2e]

SERVICES = {"scheduler", "serving", "ingestion", "sharding", "worker", "checkpoint", "evaluation", "tracking"}
CALLER_TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"


@dataclass(frozen=True, slots=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


@dataclass
class Collector:
    """Takes spans as an OpenTelemetry collector does."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
            service = attributes["service.name"].removeprefix("trainbus-")
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                self.spans.append(Span(service, span.name, *ids))
        return web.Response(body=b"", content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_a_run_is_one_trace_through_every_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("TRAINBUS_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        options = StackOptions(folder, nodes=1, slots=2, without=("gateway",))
        process = StackProcess(options, output=folder.with_suffix(".log"))
        try:
            await asyncio.to_thread(process.start)
            await asyncio.to_thread(process.wait_ready)
            run_id = await _train(folder)
        finally:
            # The collector lives in this loop: the services hand in their last spans while they stop.
            await asyncio.to_thread(process.stop)
    spans = collector.spans
    accepted = [span for span in spans if span.name == "publish trainbus.run.accepted.v1"]
    assert len(accepted) == 2, "a run and its evaluation"
    assert {span.trace_id for span in accepted} == {CALLER_TRACE}, "the caller's trace goes on"
    trace = [span for span in spans if span.trace_id == CALLER_TRACE]
    assert {span.service for span in trace} == SERVICES
    # One tree: every span hangs on another of the trace, and the first on the caller's.
    known = {span.span_id for span in trace} | {CALLER_SPAN}
    assert [span for span in trace if span.parent_id not in known] == []
    # Nothing that was done for the run is outside of it.
    outside = {span.name for span in spans if span.trace_id != CALLER_TRACE}
    assert {name for name in outside if ".run." in name or ".dataset." in name or name.startswith("job")} == set()
    assert {"job ingestion", "job sharding", "placement", "prepare", "ranks"} <= {span.name for span in trace}
    assert run_id


async def _train(folder: Path) -> str:
    """One run with data and evaluation, published with the trace of whoever asks for it."""
    async with connected(folder) as stack:
        await stack.fill_lake()
        body = await stack.slow_run(epochs=1, step_s=0.0)
        run_id = await stack.publish(body, headers={"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"})
        await stack.wait_for(run_id, "completed")
        await stack.wait_for(run_id, "promoted")
        # Last come what MLflow is told, and the answer whether the model can be served.
        handled = partial(_has_handled_all, stack.bus, "tracking")
        await until(handled, "tracking to have handled all facts", timeout_s=120)
        async with asyncio.timeout(120):
            async for batch in stack.bus.follow("FACTS", ("model.*.deployed", "model.*.deploy_failed")):
                if batch:
                    break
    return run_id


async def _has_handled_all(bus: Bus, consumer: str) -> bool:
    info = await bus.js.consumer_info("FACTS", consumer)
    return not info.num_pending and not info.num_ack_pending


def test_without_a_collector_nothing_is_traced() -> None:
    script = """if True:
        import sys
        from services.kit import telemetry
        from services.kit.settings import Settings

        telemetry.set_up("test", Settings())
        with telemetry.start_span("quiet"):
            print(repr(telemetry.current_traceparent()), "opentelemetry.sdk.trace.export" in sys.modules)
        with telemetry.start_span("passed on", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
            print(telemetry.current_traceparent())
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["'' False", f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"]
