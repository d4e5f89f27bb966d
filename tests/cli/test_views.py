"""What the command line shows of a run's life, from accepted to champion, and of who holds which slot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointStaged
from contracts.events.model import ModelPromoted
from contracts.events.node import NodeJoined, NodeLost, NodeNotice
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunAccepted,
    RunCancelling,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunFailed,
    RunPlaced,
    RunPromoted,
    RunQueued,
    RunReleased,
    RunStalled,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.spec.run import RunSpec
from tests.answers import START, read_answers
from trainbus.commands.run_tables import render_nodes, render_run, render_timeline

SPEC = RunSpec(name="digits", command=["true"], slots={"min": 1, "max": 4})


def accepted(run_id: str = "r1", name: str = "digits") -> RunAccepted:
    spec = SPEC.model_copy(update={"name": name})
    return RunAccepted(run_id=run_id, spec=spec, request_id="q", request_source="test")


def placed(generation: int, slots: Sequence[tuple[str, tuple[int, ...]]], run_id: str = "r1") -> RunPlaced:
    members, rank = [], 0
    for node_id, held in slots:
        members.append(Member(node_id=node_id, slots=held, ranks=tuple(range(rank, rank + len(held)))))
        rank += len(held)
    return RunPlaced(
        run_id=run_id,
        generation=generation,
        members=tuple(members),
        world_size=rank,
        spec=SPEC,
        decided_at_sequence=0,
        decided_at=START,
    )


def joined(node_id: str, incarnation: str = "i1", running: tuple[tuple[str, int], ...] = ()) -> NodeJoined:
    return NodeJoined(node_id=node_id, incarnation=incarnation, address="a", slots=2, lease_ttl_s=3, running=running)


def committed(generation: int, step: int) -> CheckpointCommitted:
    ref = CheckpointRef(uri=f"s3://models/{step}", step=step, epoch=1, samples_consumed=step * 64)
    return CheckpointCommitted(run_id="r1", generation=generation, checkpoint=ref, size_bytes=1)


QUEUED = RunQueued(run_id="r1", next_generation=1)
FULL = placed(1, [("n0", (0, 1)), ("n1", (0, 1))])
SMALL = placed(2, [("n1", (0, 1))])
LET_GO = [RunReleased(run_id="r1", generation=1, node_id=node, step=10) for node in ("n0", "n1")]
LIFE = [
    joined("n0"),
    joined("n1"),
    accepted(),
    QUEUED,
    FULL,
    RunStarted(run_id="r1", generation=1, node_id="n0"),
    committed(1, 5),
    RunStopping(run_id="r1", generation=1, reason="resized", message="shrinks", grace_s=30),
    committed(1, 10),
    *LET_GO,
    RunQueued(run_id="r1", next_generation=2, reason="resized"),
    SMALL,
    RunStarted(run_id="r1", generation=2, node_id="n1", step=10),
    RunExited(run_id="r1", generation=2, node_id="n1", outcome="succeeded", step=20, metrics={"loss": 0.1}),
    RunCompleted(run_id="r1", generation=2, metrics={"loss": 0.1}),
    RunEvaluated(run_id="r1", evaluation_run_id="e1", metrics={"test/accuracy": 0.9}),
    ModelPromoted(model="digits", version=1, run_id="r1", checkpoint_uri="s3://models/10", reason="first"),
    RunPromoted(run_id="r1", model="digits", version=1, reason="first"),
]
#: Facts of the life so far -> (state, slots, busy slots of n0 and n1)
STAGES = {
    "accepted": (3, "accepted", 0, (0, 0)),
    "queued": (4, "queued", 0, (0, 0)),
    "placed": (5, "placed", 4, (2, 2)),
    "running": (7, "running", 4, (2, 2)),
    "stopping": (8, "stopping", 4, (2, 2)),
    "one node released": (10, "stopping", 4, (0, 2)),
    "queued again": (12, "queued", 0, (0, 0)),
    "placed smaller": (13, "placed", 2, (0, 2)),
    "completed": (16, "completed", 0, (0, 0)),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_life(name: str) -> None:
    count, state, slots, busy = STAGES[name]
    now = read_answers(*LIFE[:count])
    view = now.runs["r1"]
    assert (view.state, view.slots_got) == (state, slots)
    assert (len(now.nodes["n0"].busy), len(now.nodes["n1"].busy)) == busy


def test_the_end_of_a_life() -> None:
    view = read_answers(*LIFE).runs["r1"]
    assert (view.resizes, view.restarts, view.step) == ((4, 2), 1, 20)
    assert view.last_checkpoint is not None
    assert view.last_checkpoint.step == 10
    assert (view.evaluation, view.verdict) == ({"test/accuracy": 0.9}, "champion v1")


def test_the_champion_is_the_run_that_holds_the_model_now() -> None:
    other = accepted().model_copy(update={"run_id": "r2"})
    second = [
        ModelPromoted(model="digits", version=2, run_id="r2", checkpoint_uri="s3://models/x"),
        RunPromoted(run_id="r2", model="digits", version=2, reason="better"),
    ]
    back = ModelPromoted(model="digits", version=3, run_id="r1", checkpoint_uri="s3://models/10", rollback=True)
    runs = read_answers(*LIFE, other, *second).runs
    assert (runs["r1"].verdict, runs["r2"].verdict) == ("was champion v1", "champion v2")
    runs = read_answers(*LIFE, other, *second, back).runs
    assert (runs["r1"].verdict, runs["r2"].verdict) == ("champion v3", "was champion v2")


def test_what_a_run_began_with_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    uri = "s3://models/digits/r1/checkpoints/epoch_8/step_00000471.g2.json"
    task = {"task": "t:T", "code": {"uri": "s3://code/c", "sha256": "0" * 64}, "training": {"epochs": 1}}
    spec = RunSpec.model_validate({"name": "tuned", **task, "init_from": uri, "init_exclude": ["head.*"]})
    init = CheckpointRef(uri=uri, step=471, epoch=8, samples_consumed=9)
    began = placed(1, [("n0", (0,))]).model_copy(update={"init": init, "spec": spec})
    first = RunAccepted(run_id="r1", spec=spec, request_id="q", request_source="test")
    view = read_answers(first, began).runs["r1"]
    Console(width=200).print(render_run(view), render_timeline(view.timeline))
    shown = capsys.readouterr().out
    assert f"weights from  {uri} (without head.*)" in shown
    assert f"placed on 1 slot of n0, with the weights of {uri}" in shown


def test_facts_twice_change_nothing() -> None:
    twice = [fact for fact in LIFE for _ in range(2)]
    one, two = read_answers(*LIFE).runs["r1"], read_answers(*twice).runs["r1"]
    assert (one.state, one.step, one.last_checkpoint, one.verdict) == (
        two.state,
        two.step,
        two.last_checkpoint,
        two.verdict,
    )


def test_a_waiting_run_says_why_and_a_failed_one_too() -> None:
    waiting = RunWaiting(run_id="r1", next_generation=1, code="slots", message="needs 4 slots, 2 are free")
    assert (
        read_answers(accepted(), RunQueued(run_id="r1", next_generation=1), waiting).runs["r1"].reason
        == waiting.message
    )
    failed = read_answers(*LIFE[:6], RunFailed(run_id="r1", generation=1, reason="exit code 1", log_tail=("boom",)))
    assert (failed.runs["r1"].reason, failed.runs["r1"].log_tail) == ("exit code 1", ("boom",))
    assert failed.nodes["n0"].busy == {}


def test_a_lost_node_holds_nothing_and_news_of_an_old_life_are_ignored() -> None:
    now = read_answers(joined("n0"), QUEUED, FULL, NodeLost(node_id="n0", incarnation="i1"))
    assert (now.nodes["n0"].state, now.nodes["n0"].busy) == ("lost", {})
    now = read_answers(joined("n0"), joined("n0", "i2"), NodeLost(node_id="n0", incarnation="i1"))
    assert now.nodes["n0"].state == "up"
    again = read_answers(joined("n0"), QUEUED, FULL, joined("n0", "i2", running=(("r1", 1),)))
    assert len(again.nodes["n0"].busy) == 2


def test_a_timeline_has_the_commit_of_a_checkpoint_and_not_what_each_node_stored_for_it() -> None:
    staged = CheckpointStaged(
        run_id="r1", generation=1, node_id="n0", ranks=(0,), world_size=1, step=5, epoch=1, samples_consumed=1
    )
    shown = read_answers(*LIFE[:6], staged, committed(1, 5))
    assert [entry.fact for entry in shown.runs["r1"].timeline][-1] == CheckpointCommitted.fact
    assert CheckpointStaged.fact not in [entry.fact for entry in shown.runs["r1"].timeline]


def test_the_timeline_sums_checkpoints_up() -> None:
    deleted = CheckpointDeleted(run_id="r1", uri="s3://models/1", step=1, reason="old")
    now = read_answers(accepted(), committed(1, 1), deleted, committed(1, 2), committed(1, 3), LET_GO[0])
    assert render_timeline(now.runs["r1"].timeline).row_count == 3


def test_a_cancelled_run_that_still_lets_go_is_cancelling() -> None:
    shown = read_answers(
        accepted(),
        placed(1, [("a", (0,))]),
        RunCancelling(run_id="r1", reason="enough"),
        RunStopping(run_id="r1", generation=1, reason="cancelled", message="enough", grace_s=30, then="cancel"),
    )
    assert shown.runs["r1"].state == "cancelling"


def test_exactness_stalls_and_notices_are_shown() -> None:
    task = {"name": "r", "task": "m:T", "code": {"uri": "s3://code/c.tar.gz", "sha256": "0" * 64}}
    spec = RunSpec.model_validate({**task, "training": {"epochs": 1, "logical_ranks": 4}})
    start = {"run_id": "r1", "node_id": "n1", "environment_digest": "e" * 64}
    stalled = {"node_id": "n1", "rank": 1, "step": 7, "silent_s": 61, "median_step_s": 0.25, "on_stall": "restart"}
    ref = CheckpointRef(uri="s3://models/c.json", step=5, epoch=1, samples_consumed=5)
    node = {"node_id": "n1", "incarnation": "1"}
    shown = read_answers(
        NodeJoined(**node, address="h", slots=2, lease_ttl_s=3),
        accepted().model_copy(update={"spec": spec}),
        QUEUED,
        placed(1, [("n1", (0, 1))]),
        RunStarted(**start, generation=1, exactness="exact", environment={"cpu": "AVX512"}),
        CheckpointCommitted(
            run_id="r1", generation=1, checkpoint=ref, size_bytes=1, exactness="exact", state_digest="d" * 64
        ),
        RunStalled(run_id="r1", generation=1, **stalled),
        NodeNotice(**node, source="spot", kind="terminate", grace_s=120),
    )
    view = shown.runs["r1"]
    plain = Console(width=200, no_color=True)
    with plain.capture() as captured:
        plain.print(render_run(view), render_timeline(view.timeline), render_nodes(shown.nodes.values(), {}, START))
    text = captured.get()
    assert "exact (4 logical ranks, environment eeeeeeeeeeee)" in text
    assert "d" * 64 in text
    assert "rank 1 on n1 has made no step for 61 s after step 7 (median 0.25 s a step); the run restarts" in text
    assert "n1 spot: terminate within 120 s" in text
    again = read_answers(
        accepted().model_copy(update={"spec": spec}),
        QUEUED,
        placed(1, [("n1", (0,))]),
        RunStarted(**start, generation=1, exactness="exact", environment={"cpu": "AVX512"}),
        RunQueued(run_id="r1", next_generation=2, reason="crashed"),
        placed(2, [("n2", (0,))]),
        RunStarted(
            **{**start, "node_id": "n2", "environment_digest": "f" * 64}, generation=2, environment={"cpu": "AVX2"}
        ),
    ).runs["r1"]
    assert again.exactness == "samples-exact"
    assert again.exactness_reason == "since generation 2: cpu: AVX2 instead of AVX512 (n2, n1)"
