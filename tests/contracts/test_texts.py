"""The sentences about facts: every fact has one, on one line, and it reads as what happened."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contracts import formats, texts
from contracts.earlier_events import EARLIER_EVENTS, read_data
from contracts.events import FACTS
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.dataset import DatasetIngested, DatasetSharded
from contracts.events.node import NodeJoined
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunAccepted,
    RunCancelled,
    RunCancelling,
    RunCompleted,
    RunExited,
    RunPlaced,
    RunPrepared,
    RunRejected,
    RunReleased,
    RunStarted,
    RunStopping,
)
from contracts.problems import FieldProblem
from contracts.spec.data import DataSource
from contracts.spec.run import RunSpec

EXAMPLES = sorted(Path(__file__).parents[2].glob("contracts/examples/valid/*/*.json"))
FACT_TYPES = {fact.type for fact in FACTS} | EARLIER_EVENTS.keys()
SPEC = RunSpec(name="digits", command=["true"], slots={"min": 1, "max": 1})
NOW = datetime(2026, 11, 22, tzinfo=UTC)


def test_every_fact_has_a_sentence() -> None:
    assert set(texts.SENTENCES) == set(FACTS)


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if f"{path.parent.name}" in FACT_TYPES], ids=lambda path: path.parent.name
)
def test_a_recorded_fact_is_described_on_one_line(path: Path) -> None:
    text = texts.describe(read_data(path.parent.name, json.loads(path.read_text())))
    assert text
    assert "\n" not in text
    assert text == text.strip(" :,;")


def placed(slots: int, generation: int = 1, **fields: Any) -> RunPlaced:
    member = Member(node_id="node-0", slots=tuple(range(slots)), ranks=tuple(range(slots)))
    return RunPlaced(
        run_id="r1", generation=generation, members=(member,), world_size=slots, spec=SPEC, decided_at_sequence=1,
        decided_at=NOW, **fields,
    )  # fmt: skip


def ingested(**fields: Any) -> DatasetIngested:
    return DatasetIngested(
        ingestion_id="i1", data=DataSource(source="s3://lake/x", format="images"), fingerprint="0" * 64,
        index_uri="s3://datasets/i/index.jsonl", accepted=80, split_counts={}, **fields,
    )  # fmt: skip


CHECKPOINT = CheckpointRef(uri="s3://lake/c.json", step=57, epoch=1, samples_consumed=100)
SHARDED: dict[str, Any] = {"dataset_id": "0" * 64, "manifest_uri": "s3://lake/m.json"}


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (placed(1), "placed on 1 slot of node-0"),
        (
            placed(2, 3, resume=CHECKPOINT),
            "placed again (generation 3) on 2 slots of node-0, from its checkpoint of step 57",
        ),
        (RunStarted(run_id="r1", generation=1, node_id="node-0"), "started on node-0"),
        (
            RunStarted(run_id="r1", generation=2, node_id="node-0", step=57, resumed_from="memory"),
            "started on node-0 from step 57 with the state that was kept in memory",
        ),
        (RunCancelling(run_id="r1", reason="cancelled by request"), "cancellation requested"),
        (RunCancelling(run_id="r1", reason="wrong data"), "cancellation requested: wrong data"),
        (RunCancelled(run_id="r1", reason="cancelled by request"), "cancelled"),
        (
            RunStopping(run_id="r1", generation=1, reason="cancelled", message="cancelled by request", grace_s=30),
            "asked to stop within 30 s",
        ),
        (
            RunStopping(run_id="r1", generation=1, reason="node_lost", message="node n1 is lost", grace_s=0),
            "stopped at once: node n1 is lost",
        ),
        (
            RunReleased(run_id="r1", generation=1, node_id="node-0", step=60, clean=False),
            "stopped on node-0 at step 60, the steps after its last checkpoint are not saved",
        ),
        (
            RunReleased(run_id="r1", generation=1, node_id="node-0", clean=False),
            "stopped on node-0, nothing saved",
        ),
        (
            RunExited(run_id="r1", generation=1, node_id="node-0", outcome="failed", rank=1, exit_code=3),
            "failed on node-0 (rank 1): exit code 3",
        ),
        (
            RunExited(run_id="r1", generation=1, node_id="node-0", outcome="succeeded", step=9),
            "finished on node-0 at step 9",
        ),
        (RunCompleted(run_id="r1", generation=1, metrics={"loss": 0.08321}), "completed: loss 0.08321"),
        (
            RunRejected(run_id="r1", reason="invalid", problems=(FieldProblem(field="slots", message="too many"),)),
            "rejected: slots: too many",
        ),
        (RunAccepted(run_id="r1", spec=SPEC, request_id="q", request_source="s"), "accepted as 'digits': 1 slot"),
        (
            RunPrepared(run_id="r1", train_samples=1, **SHARDED),
            "data ready: 1 sample to train (dataset 000000000000)",
        ),
        (
            DatasetSharded(
                feature_store_version="v", split_config_hash="0" * 64, row_count=1438, split_counts={}, shard_count=1,
                size_bytes=1, created_at=NOW, **SHARDED,
            ),
            "written as 1,438 samples in 1 shard",
        ),
        (ingested(skipped_files=1, skipped_example="notes.txt"), "read 80 records; 1 file is no image: notes.txt"),
        (
            ingested(skipped_files=2, skipped_example="README"),
            "read 80 records; 2 files are no images, such as README",
        ),
        (
            NodeJoined(node_id="n", incarnation="i", address="a", slots=1, lease_ttl_s=1.0),
            "joined with 1 CPU slot",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fact_reads_as_what_happened(fact: Any, text: str) -> None:
    assert texts.describe(fact) == text


def test_a_text_from_outside_stays_on_its_line() -> None:
    assert texts.describe(RunCancelled(run_id="r1", reason="one\n12:00 run r2 completed")).count("\n") == 0


def test_counts_have_their_nouns() -> None:
    assert [formats.plural(count, "slot") for count in (0, 1, 2, 1024)] == [
        "0 slots",
        "1 slot",
        "2 slots",
        "1,024 slots",
    ]
    assert formats.plural(2, "batch", "batches") == "2 batches"


def test_metrics_are_cut_where_a_sentence_ends() -> None:
    values = {"a": 1.0, "b": 0.123456, "c": 3.0}
    assert formats.format_metrics(values) == "a 1, b 0.1235, c 3"
    assert formats.format_metrics(values, 2) == "a 1, b 0.1235 ..."


UNREPORTED = CheckpointRef(uri="s3://models/r1/step_3.json", step=3, epoch=0, samples_consumed=0, step_is_count=True)


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (
            CheckpointCommitted(run_id="r1", generation=1, checkpoint=UNREPORTED, size_bytes=38),
            "checkpoint of version 3 saved: 38 B",
        ),
        (
            placed(1, 2, resume=UNREPORTED),
            "placed again (generation 2) on 1 slot of node-0, from its checkpoint of version 3",
        ),
        (
            RunReleased(run_id="r1", generation=1, node_id="node-0", clean=True),
            "stopped on node-0, everything saved",
        ),
    ],
)
def test_a_script_that_reports_nothing_has_no_steps(fact: Any, text: str) -> None:
    assert texts.describe(fact) == text
