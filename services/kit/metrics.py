"""The metrics that every service has. A service's own are in its ``metrics.py``, one list each.

Labels are bounded: event types, consumers and outcomes, never a run, a subject or a node. Series whose labels are known
in advance start at 0 (``counter``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

M = TypeVar("M", Counter, Histogram)


def initialize_series(metric: M, *values: Iterable[str]) -> M:
    """Set each combination of the labels' values to 0: ``rate`` does not see the first increase of a new series."""
    for combination in product(*values):
        metric.labels(*combination)
    return metric


def counter(name: str, documentation: str, **labels: Iterable[str]) -> Counter:
    """Make a counter whose series, one for each combination of the labels' values, start at 0."""
    return initialize_series(Counter(name, documentation, list(labels)), *labels.values())


#: Seconds; from a millisecond to the minutes a slow handler may take.
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

HANDLED = Counter(
    "trainbus_messages_handled_total",
    "Messages delivered, by outcome: ok, retried, dead (stored in DEAD_LETTERS), failed (neither handled nor "
    "stored), refused (the dead-letter limit was reached), invalid (a request that its sender must change).",
    ["consumer", "type", "outcome"],
)
HANDLING_SECONDS = Histogram(
    "trainbus_message_handling_seconds", "Time a handler took.", ["consumer", "type"], buckets=LATENCY_BUCKETS
)
CONSUMER_STOPPED = Gauge(
    "trainbus_consumer_stopped", "1 while a consumer is stopped by its dead-letter limit.", ["consumer"]
)
DELIVERY_LAG_SECONDS = Histogram(
    "trainbus_message_delivery_lag_seconds",
    "From the server storing a message to its handler starting.",
    ["consumer"],
    buckets=LATENCY_BUCKETS,
)
PUBLISHED = Counter("trainbus_messages_published_total", "Messages the server has acknowledged.", ["type"])
PUBLISH_RETRIES = Counter("trainbus_publish_retries_total", "Publishes tried again because no answer came.", ["type"])
CONNECTED = Gauge("trainbus_bus_connected", "1 while connected to NATS.")
RECONNECTS = Counter("trainbus_bus_reconnects_total", "Times the connection to NATS came back.")
FOLLOW_SEQUENCE = Gauge("trainbus_follow_sequence", "Last stream sequence a follower has read.", ["stream"])
READERS_CUT_OFF = Counter(
    "trainbus_http_readers_cut_off_total", "Connections ended since their reader took nothing of its answer."
)
LEADER = Gauge("trainbus_leader", "1 while this instance holds its service's lease.", ["lease"])
LOOP_LAG_SECONDS = Histogram(
    "trainbus_loop_lag_seconds",
    "Delay of the event loop: it was blocked, or the machine is overloaded.",
    buckets=LATENCY_BUCKETS,
)
JOBS_RUNNING = Gauge("trainbus_jobs_running", "Long jobs running here.", ["queue"])
JOBS_FINISHED = Counter("trainbus_jobs_finished_total", "Long jobs ended here.", ["queue", "outcome"])
OBJECT_STORE_UP = Gauge("trainbus_object_store_up", "1 while the object store answers this service.")
CONDITIONAL_DELETES = Gauge(
    "trainbus_object_store_conditional_deletes",
    "1 if the object store deletes only the version that is named (If-Match); 0 if it ignores that, or was not asked.",
)
OBJECT_BYTES = counter(
    "trainbus_object_bytes_total", "Bytes moved to and from the object store.", direction=("up", "down")
)
