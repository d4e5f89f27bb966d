"""The gateway's metrics. Labels are bounded: routes are templates, never paths."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from services.kit.metrics import LATENCY_BUCKETS

HTTP_REQUESTS = Counter(
    "trainbus_gateway_http_requests_total", "HTTP requests answered.", ["method", "route", "status"]
)
HTTP_SECONDS = Histogram(
    "trainbus_gateway_http_request_seconds",
    "From a request's arrival to the first byte of its answer.",
    ["route"],
    buckets=LATENCY_BUCKETS,
)
SSE_CLIENTS = Gauge("trainbus_gateway_sse_clients", "Open server-sent event streams.", ["route"])
PROJECTED = Counter("trainbus_gateway_projected_events_total", "Events folded into the read model.", ["stream"])
PROJECTION_BEHIND = Gauge(
    "trainbus_gateway_projection_behind_events", "Events stored but not yet in the read model.", ["stream"]
)
PROJECTION_LAG_SECONDS = Gauge(
    "trainbus_gateway_projection_lag_seconds",
    "Age of the oldest event not yet in the read model; 0 when it has caught up.",
    ["stream"],
)
RUNS = Gauge("trainbus_gateway_runs", "Runs in the read model by state.", ["state"])
OLDEST_QUEUED_SECONDS = Gauge(
    "trainbus_gateway_oldest_queued_seconds", "How long the run that has waited longest for slots has waited."
)
NODES = Gauge("trainbus_gateway_nodes", "Nodes in the read model by state.", ["state"])
SLOTS = Gauge("trainbus_gateway_slots", "Slots of nodes that are not gone, by use: used, free.", ["use"])
STREAM_MESSAGES = Gauge("trainbus_stream_messages", "Messages in a stream, as the server counts them.", ["stream"])
STREAM_BYTES = Gauge("trainbus_stream_bytes", "Bytes of a stream, as the server counts them.", ["stream"])
JETSTREAM_BYTES = Gauge(
    "trainbus_jetstream_bytes", "Bytes that JetStream's files take, and may take: used, limit.", ["kind"]
)
CONSUMER_REDELIVERED = Gauge(
    "trainbus_consumer_redelivered_messages", "Messages delivered more than once that are not finished.", ["consumer"]
)
CONSUMER_PENDING = Gauge(
    "trainbus_consumer_pending_messages", "Messages a service has not finished, waiting or in work.", ["consumer"]
)
