"""The reference of the Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

import services
from docs.site.markdown import code, prose, table

#: What every service has comes first, and is not repeated where a service imports it.
SHARED = "kit"


def metrics() -> str:
    """Return the page of every metric of every service."""
    sections = ["# Metrics\n\nEach service answers `/metrics` at its HTTP port.\n"]
    known: set[str] = set()
    for service in _services():
        rows = [row for row in _rows(service) if row[0] not in known]
        known.update(row[0] for row in rows)
        title = "All services" if service == SHARED else service
        sections.append(f"## {title}\n\n{table(('metric', 'type', 'labels', ''), rows)}")
    return "\n".join(sections)


def _services() -> list[str]:
    """Return the services that have metrics, what all have first."""
    found = {path.parent.name for path in Path(services.__path__[0]).glob("*/metrics.py")}
    return [SHARED, *sorted(found - {SHARED})]


def _rows(service: str) -> Iterator[tuple[str, str, str, str]]:
    for metric in vars(import_module(f"services.{service}.metrics")).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        for family in metric.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(code(label) for label in metric._labelnames)
            yield code(name), family.type, labels, prose(family.documentation)
