"""The autoscaler's metrics. Labels are bounded: pools are the policy's."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

STARTED = Counter("trainbus_autoscaler_started_total", "Machines started, by pool.", ["pool"])
STOPPED = Counter("trainbus_autoscaler_stopped_total", "Machines stopped, by pool.", ["pool"])
DRAINED = Counter("trainbus_autoscaler_drained_total", "Nodes that were asked to be drained.")
FAILURES = Counter(
    "trainbus_autoscaler_failures_total", "Calls of the adapter that did not work out, by pool.", ["pool"]
)
MACHINES = Gauge("trainbus_autoscaler_machines", "Machines that there are, by pool.", ["pool"])
