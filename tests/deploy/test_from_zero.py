"""Counters stand at 0 before anything has happened: Prometheus sees no increase of a series that was not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY

from contracts import topology
from contracts.events.train import RollbackRequested

ROOT = Path(__file__).parents[2]

#: In a process where nothing has been counted yet: the counters that have no value for any labels.
LOOK = """
import importlib, json, sys
from prometheus_client import Counter
modules = [importlib.import_module(name) for name in sys.argv[1:]]
found = {value for module in modules for value in vars(module).values() if isinstance(value, Counter)}
print(json.dumps(sorted(c._name for c in found if c._labelnames and not list(c.collect())[0].samples)))
"""
#: Label values that are not known at the start: event types, consumers, queues, pools, routes, streams, models.
OPEN = {
    "trainbus_messages_handled",
    "trainbus_messages_published",
    "trainbus_publish_retries",
    "trainbus_jobs_finished",
    "trainbus_autoscaler_started",
    "trainbus_autoscaler_stopped",
    "trainbus_autoscaler_failures",
    "trainbus_gateway_http_requests",
    "trainbus_gateway_projected_events",
    "trainbus_serving_requests",
    "trainbus_serving_retries",
    "trainbus_serving_deployed",
    "trainbus_serving_deploy_delays",
    "trainbus_serving_deploy_failures",
    "trainbus_serving_process_restarts",
    "trainbus_serving_shadow_differences",
}


def test_counters_whose_labels_are_known_are_there_from_the_start() -> None:
    modules = [f"services.{path.parent.name}.metrics" for path in sorted((ROOT / "services").glob("*/metrics.py"))]
    looked = subprocess.run(
        [sys.executable, "-c", LOOK, *modules], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert set(json.loads(looked.stdout)) == OPEN


async def test_handlers_count_from_zero(make_bus: Any) -> None:
    bus = await make_bus("test")

    async def on_rollback_requested(_: Any) -> None: ...

    bus.subscriber(topology.EVALUATION_REQUESTS, RollbackRequested)(on_rollback_requested)
    await bus.start()
    for outcome in ("ok", "retried", "dead"):
        labels = {"consumer": topology.EVALUATION_REQUESTS.name, "type": RollbackRequested.type, "outcome": outcome}
        assert REGISTRY.get_sample_value("trainbus_messages_handled_total", labels) is not None
