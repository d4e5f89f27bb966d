"""Serving's metrics. Labels are bounded: models are those that have a champion, versions those that answer."""

from __future__ import annotations

import functools

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

REQUESTS = Counter(
    "trainbus_serving_requests_total",
    "Requests for predictions, by model and outcome: answered, refused (bad input), error, overloaded.",
    ["model", "outcome"],
)
REQUEST_SECONDS = Histogram(
    "trainbus_serving_request_seconds", "Seconds of an answered request, by model.", ["model"], buckets=SECONDS
)
RETRIES = Counter(
    "trainbus_serving_retries_total", "Requests that another process answered, after one had failed.", ["model"]
)
DEPLOYED = Counter("trainbus_serving_deployed_total", "Versions that took over, by model.", ["model"])
DEPLOY_FAILURES = Counter(
    "trainbus_serving_deploy_failures_total", "Versions that did not take over, by model and stage.", ["model", "stage"]
)
DEPLOY_DELAYS = Counter(
    "trainbus_serving_deploy_delays_total",
    "Attempts to deploy that failed for a reason of the host's, by model and stage.",
    ["model", "stage"],
)
DEPLOY_SECONDS = Histogram(
    "trainbus_serving_deploy_seconds",
    "Seconds from a promotion to the first answer of the new version.",
    buckets=(0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
VERSION = Gauge("trainbus_serving_version", "The version that answers, by model; 0: none.", ["model"])
IS_CHAMPION = Gauge(
    "trainbus_serving_is_champion", "1 where the version that answers is the champion, 0 where it is not.", ["model"]
)
PROCESS_RESTARTS = Counter(
    "trainbus_serving_process_restarts_total", "Model processes started again after they had ended.", ["model"]
)
PROCESS_BYTES = Gauge(
    "trainbus_serving_process_bytes", "Resident bytes of the process that answers, by model.", ["model"]
)
SHADOW_DIFFERENCES = Counter(
    "trainbus_serving_shadow_differences_total", "Shadow answers that differ from the one given, by model.", ["model"]
)


@functools.cache
def count_requests(model: str, outcome: str) -> Counter:
    """Return the counter of a model's requests with this outcome; looking it up costs as much as a refusal may."""
    return REQUESTS.labels(model, outcome)
