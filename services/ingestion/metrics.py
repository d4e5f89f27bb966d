"""Ingestion's metrics."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

RECORDS = Counter(
    "trainbus_ingestion_records_total",
    "Records judged, by the source's format and outcome: accepted, quarantined.",
    ["format", "outcome"],
)
READ_BYTES = Counter("trainbus_ingestion_read_bytes_total", "Bytes of source objects read.", ["format"])
JOB_SECONDS = Histogram(
    "trainbus_ingestion_job_seconds",
    "Time one ingestion took, by outcome: ingested, reused (the same input was there), failed.",
    ["outcome"],
    buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 36000),
)
