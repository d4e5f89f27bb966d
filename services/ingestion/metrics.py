"""Ingestion's metrics."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Histogram

from contracts.spec.data import DataSource
from services.kit.metrics import counter, initialize_series

#: ``data.format``.
FORMATS = get_args(DataSource.model_fields["format"].annotation)

RECORDS = counter(
    "trainbus_ingestion_records_total",
    "Records validated, by the source's format and outcome: accepted, quarantined.",
    format=FORMATS,
    outcome=("accepted", "quarantined"),
)
READ_BYTES = counter("trainbus_ingestion_read_bytes_total", "Bytes of source objects read.", format=FORMATS)
JOB_SECONDS = initialize_series(
    Histogram(
        "trainbus_ingestion_job_seconds",
        "Time one ingestion took, by outcome: ingested, reused (the same input was there), failed.",
        ["outcome"],
        buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 36000),
    ),
    ("ingested", "reused", "failed"),
)
