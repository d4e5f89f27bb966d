"""The fold: named cases, and what must hold in any order and number of deliveries."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest

from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted
from contracts.events.node import NodeDraining, NodeJoined, NodeLost, NodeNotice, NodeUndrained, NodeUnfit
from contracts.events.run import (
    RunCancelled,
    RunCancelling,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunFailed,
    RunNotPromoted,
    RunPrepared,
    RunProgress,
    RunQueued,
    RunRejected,
    RunReleased,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.events.train import RestoreRequested
from contracts.problems import FieldProblem
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunSpec
from contracts.state.node import drain_in_force
from services.gateway.core.fold import At, Rows, apply, apply_progress, plain, survives
from tests.gateway.conftest import REQUEST, RUN, SPEC, life, placed, progress, ref

SHA = "a" * 64


def fold(events: list[Event]) -> Rows:
    rows = Rows()
    for sequence, event in enumerate(events, 1):
        apply(rows, event, At(sequence, float(sequence), RUN))
    return rows


def state(*events: Event) -> str:
    return fold(list(events)).runs[RUN].state


FACTS = [event for event in life() if not isinstance(event, RunProgress)]
ACCEPTED, QUEUED, PLACED, STARTED = FACTS[2], FACTS[3], FACTS[4], FACTS[5]
#: What is decided about a run, as against the times of its facts.
DECIDED = ("state", "generation", "members", "placements", "verdict", "checkpoint", "started_at", "ended_at")
WITH_DATA = ACCEPTED.model_copy(update={"spec": SPEC.model_copy(update={"data": DatasetRef(dataset_id=SHA)})})
PREPARED = RunPrepared(run_id=RUN, dataset_id=SHA, manifest_uri="s3://datasets/m.json", train_samples=1)
STOPPING = RunStopping(run_id=RUN, generation=1, reason="preempted", message="r", grace_s=1)
CANCELLING = RunCancelling(run_id=RUN, reason="asked")
QUEUED_AGAIN = RunQueued(run_id=RUN, next_generation=2, reason="crashed")
COMPLETED = RunCompleted(run_id=RUN, generation=1)
REJECTED = RunRejected(run_id=RUN, reason="no", problems=(FieldProblem(field="slots", message="too many"),))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([REQUEST], "requested", id="requested"),
        pytest.param([RestoreRequested(run_id="rother", epoch=1)], "requested", id="restore requested"),
        pytest.param([REQUEST, REJECTED], "rejected", id="rejected"),
        pytest.param([REJECTED], "rejected", id="rejected, the request unreadable"),
        pytest.param([ACCEPTED], "accepted", id="accepted without data"),
        pytest.param([WITH_DATA], "preparing", id="accepted with data"),
        pytest.param([WITH_DATA, PREPARED], "accepted", id="prepared"),
        pytest.param([ACCEPTED, REQUEST], "accepted", id="the request read after the fact"),
        pytest.param([ACCEPTED, QUEUED], "queued", id="queued"),
        pytest.param([ACCEPTED, QUEUED, PLACED], "placed", id="placed"),
        pytest.param([ACCEPTED, QUEUED, PLACED, STARTED], "running", id="running"),
        pytest.param([ACCEPTED, QUEUED, PLACED, STARTED, STOPPING], "stopping", id="stopping"),
        pytest.param([ACCEPTED, QUEUED, PLACED, STOPPING, STARTED], "stopping", id="started while stopping"),
        pytest.param([ACCEPTED, QUEUED, PLACED, STARTED, CANCELLING], "cancelling", id="cancelling"),
        pytest.param(
            [ACCEPTED, QUEUED, PLACED, CANCELLING, STARTED, STOPPING], "cancelling", id="cancelling until its end"
        ),
        pytest.param(
            [ACCEPTED, QUEUED, PLACED, QUEUED_AGAIN, placed(2, "n1"), STARTED],
            "placed",
            id="started of a stale generation",
        ),
        pytest.param([ACCEPTED, QUEUED, PLACED, QUEUED], "placed", id="queued of a stale generation"),
        pytest.param([ACCEPTED, PLACED], "accepted", id="placed and not queued"),
        pytest.param([ACCEPTED, QUEUED, PLACED, COMPLETED], "placed", id="completed while its ranks run"),
        pytest.param(
            [ACCEPTED, QUEUED, PLACED, QUEUED_AGAIN, placed(2, "n1"), COMPLETED], "placed", id="completed, stale"
        ),
        pytest.param([ACCEPTED, QUEUED, PLACED, RunFailed(run_id=RUN, reason="crash")], "failed", id="failed"),
        pytest.param([ACCEPTED, RunCancelled(run_id=RUN, reason="r"), PLACED], "cancelled", id="the end is the end"),
    ],
)
def test_states(events: list[Any], expected: str) -> None:
    assert state(*events) == expected


def test_a_life_adds_up() -> None:
    run = fold(FACTS).runs[RUN]
    assert (run.generation, run.slots_got, run.slots_wanted, run.verdict) == (2, 2, 4, "promoted")
    assert run.placements == [
        {"generation": 1, "resume_step": 0, "started_step": 0},
        {"generation": 2, "resume_step": 20, "started_step": 20},
    ]
    assert run.sizes == [4, 2]
    assert [(m["node_id"], m["released"]) for m in run.members] == [("n1", True)]
    assert run.checkpoint is not None
    assert run.checkpoint["step"] == 40


def test_what_ranks_left_in_memory_is_gone_on_from() -> None:
    """A generation may start beyond its checkpoint; what the first rank reports counts."""
    again = placed(2, "n1", "n2", resume=ref(20))
    starts = [
        RunStarted(run_id=RUN, generation=2, node_id="n1", step=33, resumed_from="memory"),
        RunStarted(run_id=RUN, generation=2, node_id="n2", step=0, resumed_from="memory"),
    ]
    run = fold([ACCEPTED, QUEUED, PLACED, STARTED, QUEUED_AGAIN, again, *starts, *starts]).runs[RUN]
    assert run.placements[-1] == {"generation": 2, "resume_step": 20, "started_step": 33}
    assert [(start["generation"], start["node_id"]) for start in run.starts] == [(1, "n1"), (2, "n1"), (2, "n2")]
    assert survives(1, 33, run.placements)
    assert not survives(1, 34, run.placements)


EXACT = {"epochs": 1, "logical_ranks": 4}
TASK = {"name": "r", "task": "m:T", "code": {"uri": "s3://code/c.tar.gz", "sha256": SHA}, "training": EXACT}


def started(generation: int, exact: bool, environment: dict[str, str]) -> RunStarted:
    digest = hashlib.sha256(json.dumps(environment).encode()).hexdigest()
    return RunStarted(
        run_id=RUN,
        generation=generation,
        node_id="n1",
        exactness="exact" if exact else "samples-exact",
        environment=environment,
        environment_digest=digest,
    )


AVX512, AVX2 = {"cpu": "AVX512", "torch": "2.13.0"}, {"cpu": "AVX2", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("training", "starts", "expected"),
    [
        pytest.param(EXACT, [], (None, None, None), id="not started"),
        pytest.param(EXACT, [started(1, True, AVX512), started(2, True, AVX512)], ("exact", None, None), id="exact"),
        pytest.param(
            EXACT,
            [started(1, True, AVX512), started(2, False, AVX2), started(3, False, AVX512)],
            ("samples-exact", "since generation 2: cpu: AVX2 instead of AVX512 (on n1)", 2),
            id="another environment",
        ),
        pytest.param(
            EXACT,
            [started(1, False, AVX2)],
            (
                "samples-exact",
                "since generation 1: it started from a checkpoint of another environment, or one that is not exact",
                1,
            ),
            id="from a checkpoint that was not exact",
        ),
        pytest.param(
            EXACT, [started(1, False, AVX2), started(2, True, AVX2)], ("exact", None, None), id="started again since"
        ),
        pytest.param(
            {"epochs": 1},
            [started(1, False, AVX2)],
            ("samples-exact", "fast mode: training.logical_ranks is not set", 1),
            id="fast mode",
        ),
    ],
)
def test_how_exact_a_run_is_and_why(training: Any, starts: list[RunStarted], expected: tuple[Any, ...]) -> None:
    spec = RunSpec.model_validate({**TASK, "training": training})
    events: list[Event] = [ACCEPTED.model_copy(update={"spec": spec})]
    for start in starts:
        queued = RunQueued(run_id=RUN, next_generation=start.generation)
        events += [queued, placed(start.generation, "n1"), start]
    run = fold(events).runs[RUN]
    assert (run.exactness, run.exactness_reason, run.inexact_since) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (["draining", "notice"], "notice"),
        (["notice", "draining"], "notice"),
        (["unfit", "notice"], "unfit"),
        (["notice", "lost"], "lost"),
        (["unfit", "joined"], "up"),
    ],
)
def test_a_node_takes_the_worst_state_of_its_facts(facts: list[str], expected: str) -> None:
    life = {"node_id": "n1", "incarnation": "1"}
    made: dict[str, Event] = {
        "draining": NodeDraining(**life),
        "notice": NodeNotice(**life, source="spot", kind="terminate", grace_s=120),
        "unfit": NodeUnfit(**life, reason="ECC"),
        "lost": NodeLost(**life),
        "joined": NodeJoined(node_id="n1", incarnation="2", address="h", slots=1, lease_ttl_s=3),
    }
    first = NodeJoined(**life, address="h", slots=1, lease_ttl_s=3, machine_digest="m")
    node = fold([first, *(made[name] for name in facts)]).nodes["n1"]
    assert node.state == expected
    assert node.reason == {"notice": "spot: terminate within 120 s", "unfit": "ECC"}.get(expected)


def test_a_node_stays_drained_when_it_joins_again() -> None:
    def joined(incarnation: str) -> NodeJoined:
        return NodeJoined(node_id="n1", incarnation=incarnation, address="h", slots=1, lease_ttl_s=3)

    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    asked: dict[str, Any] = {"node_id": "n1", "incarnation": "1", "user": "ada"}
    drained = NodeDraining(**asked, reason="a loud fan", scope="node", requested_at=at, request_id="d")
    node = fold([joined("1"), NodeLost(node_id="n1", incarnation="1"), drained, joined("2")]).nodes["n1"]
    assert (node.state, node.reason) == ("draining", "a loud fan")
    drain = drain_in_force(node)
    assert drain is not None
    assert (drain.user, drain.requested_at) == ("ada", at)
    undrained = NodeUndrained(**asked, requested_at=at + timedelta(seconds=1), request_id="u")
    node = fold([joined("1"), drained, joined("2"), undrained]).nodes["n1"]
    assert (node.state, node.reason, drain_in_force(node)) == ("up", None, None)


def test_verdicts_come_after_the_end() -> None:
    evaluated = RunEvaluated(run_id=RUN, evaluation_run_id="reval", metrics={"acc": 0.9})
    rows = fold([*FACTS[:-1], evaluated, RunNotPromoted(run_id=RUN, model="digits", reason="not better")])
    assert (rows.runs[RUN].state, rows.runs[RUN].verdict) == ("completed", "not_promoted")
    assert rows.runs[RUN].verdict_reason == "not better"


def test_a_zombie_changes_nothing() -> None:
    before = fold([ACCEPTED, QUEUED, PLACED, STARTED, QUEUED_AGAIN, placed(2, "n1")])
    run = before.runs[RUN]
    for stale in (
        RunReleased(run_id=RUN, generation=1, node_id="n1"),
        RunExited(run_id=RUN, generation=1, node_id="n1", outcome="failed", reason="killed"),
        CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref(30), size_bytes=1),
        RunWaiting(run_id=RUN, next_generation=2, code="slots", message="old"),
    ):
        apply(before, stale, At(99, 99.0))
        assert before.runs[RUN] is run, stale
    assert before.checkpoints == {}


def test_waiting_is_forgotten_when_placed() -> None:
    waiting = RunWaiting(run_id=RUN, next_generation=1, code="slots", message="needs 4")
    assert fold([ACCEPTED, QUEUED, waiting]).runs[RUN].waiting_message == "needs 4"
    assert fold([ACCEPTED, QUEUED, waiting, PLACED]).runs[RUN].waiting_message is None


def test_nodes_and_checkpoints() -> None:
    joined = NodeJoined(node_id="n1", incarnation="b", address="x", slots=2, lease_ttl_s=3)
    old = NodeLost(node_id="n1", incarnation="a", reason="silent")
    drained = NodeDraining(node_id="n1", incarnation="b", reason="repair")
    assert fold([joined, old]).nodes["n1"].state == "up", "news of an old life cannot end a new one"
    assert fold([joined, drained]).nodes["n1"].state == "draining"
    assert fold([joined, drained, replaced(old, "b")]).nodes["n1"].state == "lost"
    committed = CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref(20), size_bytes=1)
    deleted = CheckpointDeleted(run_id=RUN, uri=ref(20).uri, step=20, reason="retention")
    rows = fold([ACCEPTED, PLACED, committed, deleted])
    assert rows.checkpoints[ref(20).uri].deleted_reason == "retention"


def replaced(fact: NodeLost, incarnation: str) -> NodeLost:
    return fact.model_copy(update={"incarnation": incarnation})


def test_folding_twice_changes_nothing() -> None:
    """After any part of a life, any earlier fact that comes again changes no decision."""
    rows = Rows()
    for end, fact in enumerate(FACTS, 1):
        apply(rows, fact, At(end, float(end), RUN))
        run, checkpoints = rows.runs.get(RUN), rows.checkpoints.keys()
        for again in range(end):
            twice = copy.deepcopy(rows)
            apply(twice, FACTS[again], At(again + 1, again + 1.0, RUN))
            repeated = twice.runs.get(RUN)
            if run is not None and repeated is not None:
                assert [getattr(repeated, name) for name in DECIDED] == [getattr(run, name) for name in DECIDED], again
            assert twice.checkpoints.keys() == checkpoints


class TestProgress:
    placements: ClassVar = [{"generation": 2, "resume_step": 12, "started_step": 20}]

    @pytest.mark.parametrize(
        ("generation", "step", "kept"),
        [(1, 20, True), (1, 21, False), (2, 21, True), (3, 5, True)],
        ids=["before the resume", "abandoned", "its own", "newer than known"],
    )
    def test_survives(self, generation: int, step: int, kept: bool) -> None:
        assert survives(generation, step, self.placements) is kept

    def test_every_later_resume_counts(self) -> None:
        placements = [
            {"generation": 2, "resume_step": 10, "started_step": 10},
            {"generation": 3, "resume_step": 50, "started_step": 50},
            {"generation": 4, "resume_step": 0},  # has not started: what it will go on from is not known yet
        ]
        assert not survives(1, 30, placements)
        assert survives(2, 30, placements)

    def test_figures_are_the_newest_generations(self) -> None:
        first, points = apply_progress(None, self.placements, progress(2, range(21, 25)), At(1, 1.0))
        assert first is not None
        assert (first.step, first.total_steps, first.samples_consumed, len(points)) == (24, 100, 24 * 64, 4)
        assert first.latest == {"train/loss": pytest.approx(1 / 25)}
        late, points = apply_progress(first, self.placements, progress(1, range(15, 31)), At(2, 2.0))
        assert late is first
        assert [p.step for p in points] == list(range(15, 21))

    def test_what_no_json_can_hold_is_text(self) -> None:
        assert plain({"a": 1.0, "b": math.nan, "c": -math.inf}) == {"a": 1.0, "b": "NaN", "c": "-Infinity"}
