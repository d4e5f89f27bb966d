"""One life: the reducer, the gateway's fold and the scheduler's cluster agree on it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.model import ModelPromoted
from contracts.events.node import NodeDraining, NodeJoined, NodeLeft, NodeLost, NodeNotice, NodeUndrained
from contracts.events.run import (
    TERMINAL,
    CheckpointRef,
    Member,
    RunAccepted,
    RunCancelled,
    RunCancelling,
    RunCompleted,
    RunExited,
    RunFailed,
    RunPlaced,
    RunPrepared,
    RunPrepareFailed,
    RunQueued,
    RunReleased,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.run_states import HOLDING_STATES, STATES, TERMINAL_STATES
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunSpec
from contracts.state.model import champion_of, rollback_target
from contracts.state.node import NodeDrain, is_drained, next_drain, next_node_state
from contracts.state.run import RunState, RunStates, change_run, placement_problem, reduce_run
from services.gateway.core.fold import At, Rows
from services.gateway.core.fold import apply as project
from services.scheduler.core.fold import apply as schedule
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Phase

START = datetime(2026, 1, 2, tzinfo=UTC)
RUN, SHA = "r1", "ab" * 32
PLAIN = RunSpec(name="a", command=["true"])
WITH_DATA = RunSpec(name="a", command=["true"], data=DatasetRef(dataset_id=SHA))
REF = CheckpointRef(uri="s3://models/x.json", step=1, epoch=0, samples_consumed=1)


def accepted(spec: RunSpec = PLAIN) -> RunAccepted:
    return RunAccepted(run_id=RUN, spec=spec, request_id="q", request_source="s")


def placed(generation: int, world_size: int = 1) -> RunPlaced:
    member = Member(node_id="n1", slots=(0,), ranks=(0,))
    return RunPlaced(
        run_id=RUN, generation=generation, members=(member,), world_size=world_size, spec=PLAIN, decided_at_sequence=0,
        decided_at=START,
    )  # fmt: skip


class History:
    """Draws a history that scheduler, agents and operators could have written."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.facts = data, [NodeJoined(node_id="n1", incarnation="i1", address="", slots=4, lease_ttl_s=30)]
        self.generation, self.failures, self.cancelling = 0, 0, False

    def choose(self, *options: str) -> str:
        return self.data.draw(st.sampled_from(options))

    def add(self, *facts: Fact) -> None:
        self.facts += facts

    def write(self) -> list[Fact]:
        with_data = self.choose("with data", "without") == "with data"
        self.add(accepted(WITH_DATA if with_data else PLAIN))
        if with_data:
            if self.choose("prepared", "not") == "not":
                self.add(RunPrepareFailed(run_id=RUN, reason="bad data"), RunFailed(run_id=RUN, reason="bad data"))
                return self.facts
            self.add(RunPrepared(run_id=RUN, dataset_id=SHA, manifest_uri="s3://datasets/x", train_samples=1))
        self.queue("new")
        while self.wait_and_place():
            pass
        return self.facts

    def queue(self, reason: Any) -> None:
        queued = RunQueued(run_id=RUN, next_generation=self.generation + 1, reason=reason, failures=self.failures)
        self.add(queued)

    def cancel(self) -> None:
        self.add(RunCancelling(run_id=RUN, reason="asked"))
        self.cancelling = True

    def wait_and_place(self) -> bool:
        """One generation; whether another one follows."""
        match self.choose("place", "waiting", "cancel", "stop here"):
            case "stop here":
                return False
            case "waiting":
                waiting = RunWaiting(run_id=RUN, next_generation=self.generation + 1, code="slots", message="full")
                self.add(waiting)
            case "cancel":
                self.cancel()
                self.add(RunCancelled(run_id=RUN, reason="asked"))
                return False
        self.lie()
        self.generation += 1
        self.add(placed(self.generation))
        generation = {"run_id": RUN, "generation": self.generation}
        self.lie()
        if self.choose("stays placed", "starts", "starts") == "stays placed":
            return False
        self.add(RunStarted(**generation, node_id="n1"))
        if self.choose("commits", "does not") == "commits":
            self.add(CheckpointCommitted(**generation, checkpoint=REF, size_bytes=1))
        if self.choose("is cancelled", "goes on", "goes on") == "is cancelled":
            self.cancel()
        if self.cancelling or self.choose("is preempted", "ends") == "is preempted":
            self.add(RunStopping(**generation, reason="preempted", message="yields", grace_s=1))
            self.stale()
            if self.choose("releases", "stop here") == "stop here":
                return False
            self.add(RunReleased(**generation, node_id="n1"))
            if self.cancelling:
                self.add(RunCancelled(run_id=RUN, reason="asked"))
                return False
            self.queue("preempted")
            return True
        return self.end(generation)

    def end(self, generation: dict[str, Any]) -> bool:
        if self.choose("succeeds", "fails") == "succeeds":
            self.add(RunExited(**generation, node_id="n1", outcome="succeeded"))
            self.add(RunCompleted(**generation))
            return False
        self.add(RunExited(**generation, node_id="n1", outcome="failed", reason="crash"))
        self.failures += 1
        if self.failures == 3:
            self.add(RunFailed(**generation, reason="crashed too often"))
            return False
        self.queue("crashed")
        return True

    def lie(self) -> None:
        """Add a fact that the scheduler cannot have published now: it does not count."""
        lies: dict[str, Fact] = {
            "completed": RunCompleted(run_id=RUN, generation=self.generation),
            "completed later": RunCompleted(run_id=RUN, generation=self.generation + 1),
            "placed later": placed(self.generation + 2),
            "ranks missing": placed(self.generation + 1, world_size=2),
            "queued later": RunQueued(run_id=RUN, next_generation=self.generation + 3),
        }
        if (lie := self.choose("none", *lies)) != "none":
            self.add(lies[lie])

    def stale(self) -> None:
        """Add late facts of the generation before: they do not count."""
        if self.generation > 1:
            old = {"run_id": RUN, "generation": self.generation - 1}
            self.add(RunStarted(**old, node_id="n1"), RunStopping(**old, reason="preempted", message="old", grace_s=1))
            self.add(RunExited(**old, node_id="n1", outcome="failed", reason="old"), placed(self.generation - 1))
            self.add(RunCompleted(**old))


@given(st.data())
def test_reducer_gateway_and_scheduler_agree(data: st.DataObject) -> None:
    run, cluster, rows = RunState(), Cluster(), Rows()
    for number, fact in enumerate(History(data).write(), start=1):
        time = START + timedelta(seconds=number)
        schedule(cluster, fact, number, time)
        project(rows, fact, At(number, time.timestamp()))
        run = reduce_run(run, fact)
        if RUN in rows.runs:
            row, scheduled = rows.runs[RUN], cluster.runs[RUN]
            life = (run.state, run.generation, run.failures)
            assert (row.state, row.generation, row.failures) == life, fact
            assert (state_of(scheduled), scheduled.generation, scheduled.failures) == life, fact
            assert (row.reason or "", row.next_generation) == (run.reason or "", run.next_generation)


def state_of(run: Any) -> str:
    """The state that the scheduler's run is in, as everybody else calls it."""
    if run.cancel_reason is not None and not run.terminal:
        return "cancelling"
    return "accepted" if run.phase is Phase.READY else str(run.phase)


LIVING = [accepted(), RunQueued(run_id=RUN, next_generation=1), placed(1)]
SUCCEEDED = RunExited(run_id=RUN, generation=1, node_id="n1", outcome="succeeded")
COMPLETED = RunCompleted(run_id=RUN, generation=1)


def life_of(*facts: Fact) -> RunState:
    run = RunState()
    for fact in facts:
        run = reduce_run(run, fact)
    return run


def test_a_run_that_is_being_cancelled_stays_so_until_its_end() -> None:
    asked = RunCancelling(run_id=RUN, reason="asked")
    stopping = RunStopping(run_id=RUN, generation=1, reason="cancelled", message="cancelled", grace_s=1, then="cancel")
    crashed = RunExited(run_id=RUN, generation=1, node_id="n1", outcome="failed", reason="crash")
    started = RunStarted(run_id=RUN, generation=1, node_id="n1")
    run = life_of(*LIVING, asked, started, stopping, crashed)
    assert (run.state, run.reason, run.generation) == ("cancelling", "asked", 1)
    assert reduce_run(run, RunCancelled(run_id=RUN, reason="asked")).state == "cancelled"
    assert reduce_run(life_of(*LIVING, asked, SUCCEEDED), COMPLETED).state == "completed"


@pytest.mark.parametrize(
    "facts",
    [LIVING[:2], LIVING, [*LIVING, SUCCEEDED, RunQueued(run_id=RUN, next_generation=2), placed(2)]],
    ids=["never placed", "its ranks run", "those of its next generation do"],
)
def test_a_run_is_not_completed_before_its_ranks_have_ended_well(facts: list[Fact]) -> None:
    run = life_of(*facts)
    assert change_run(run, RunCompleted(run_id=RUN, generation=run.generation)) is None


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        (placed(1), ""),
        (placed(2), "waits for generation 1"),
        (placed(1, world_size=2), "the ranks 0 to 1, each once"),
        (placed(1, world_size=10**30), "each once"),
        (placed(1).model_copy(update={"members": placed(1).members * 2}), "each once"),
    ],
)
def test_a_placement_that_the_scheduler_cannot_have_made_says_why(placement: RunPlaced, problem: str) -> None:
    assert problem in placement_problem(placement, queued_generation=1)
    assert bool(placement_problem(placement, queued_generation=1)) == bool(problem)
    assert "was not queued" in placement_problem(placement, queued_generation=None)


@pytest.mark.parametrize(
    "fact",
    [
        RunStarted(run_id=RUN, generation=1, node_id="n1"),
        RunStopping(run_id=RUN, generation=1, reason="preempted", message="x", grace_s=1),
        RunReleased(run_id=RUN, generation=1, node_id="n1"),
        RunExited(run_id=RUN, generation=1, node_id="n1", outcome="failed", reason="x"),
        RunCompleted(run_id=RUN, generation=1),
        RunFailed(run_id=RUN, generation=1, reason="x"),
        RunQueued(run_id=RUN, next_generation=2),
        RunWaiting(run_id=RUN, next_generation=2, code="slots", message="x"),
        CheckpointCommitted(run_id=RUN, generation=1, checkpoint=REF, size_bytes=1),
        placed(1),
        placed(2),
    ],
    ids=lambda fact: fact.fact,
)
def test_a_fact_of_an_old_generation_does_not_count(fact: Fact) -> None:
    run = life_of(*LIVING, RunQueued(run_id=RUN, next_generation=2), placed(2))
    assert change_run(run, fact) is None
    assert reduce_run(run, fact) is run


def test_the_states_after_which_a_run_is_over_are_those_of_its_terminal_facts() -> None:
    assert {fact.fact for fact in TERMINAL} == TERMINAL_STATES
    assert set(STATES) > TERMINAL_STATES | HOLDING_STATES


def test_runs_are_folded_by_their_ids() -> None:
    runs = RunStates()
    assert [runs.apply(fact) for fact in [*LIVING, accepted(), placed(1)]] == [True, True, True, False, False]
    assert runs == {RUN: life_of(*LIVING)}


@pytest.mark.parametrize("end", [COMPLETED, RunFailed(run_id=RUN, reason="x")])
def test_a_run_that_is_over_stays_over(end: Fact) -> None:
    run = life_of(*LIVING, SUCCEEDED, end)
    for fact in [*LIVING, placed(2), RunCancelled(run_id=RUN, reason="late")]:
        assert reduce_run(run, fact) is run


def test_a_node_goes_further_from_use_and_comes_back_with_a_new_incarnation() -> None:
    class View:
        state, incarnation, past_incarnations, last_drain = "notice", "i2", ("i1",), None

    def joined(incarnation: str) -> NodeJoined:
        return NodeJoined(node_id="n1", incarnation=incarnation, address="", slots=1, lease_ttl_s=30)

    now: dict[str, Any] = {"node_id": "n1", "incarnation": "i2"}
    assert next_node_state(View(), NodeDraining(**now)) is None
    assert next_node_state(View(), NodeLeft(**now)) == "left"
    assert next_node_state(View(), NodeNotice(**now, source="s", kind="k")) == "notice"
    assert next_node_state(View(), NodeLost(node_id="n1", incarnation="i1")) is None
    assert [next_node_state(View(), joined(each)) for each in ("i1", "i2", "i3")] == [None, None, "up"]


def test_a_drained_node_comes_back_drained() -> None:
    class View:
        state, incarnation, past_incarnations = "lost", "i2", ("i1",)
        last_drain: NodeDrain | None = None

    def asked(second: int, incarnation: str = "i2") -> dict[str, Any]:
        at = datetime(2026, 1, 31, 12, 0, second, tzinfo=UTC)
        return {"node_id": "n1", "incarnation": incarnation, "requested_at": at, "request_id": f"r{second}"}

    view = View()
    joined = NodeJoined(node_id="n1", incarnation="i3", address="", slots=1, lease_ttl_s=30)
    drained = NodeDraining(**asked(1), scope="node", user="ada")
    assert next_node_state(view, drained) is None
    view.last_drain = next_drain(view, drained)
    assert next_node_state(view, joined) == "draining"
    view.state, view.incarnation = "draining", "i3"
    # Answered in an incarnation that is over by now, it holds all the same.
    undrained = NodeUndrained(**asked(2))
    assert next_node_state(view, undrained) == "up"
    view.state, view.last_drain = "up", next_drain(view, undrained)
    assert next_node_state(view, drained) is None
    assert next_drain(view, drained) is view.last_drain
    for late in (NodeDraining(node_id="n1", incarnation="i2"), NodeDraining(**asked(3))):
        assert next_node_state(view, late) is None
    of_now = NodeDraining(node_id="n1", incarnation="i3")
    assert next_node_state(view, of_now) == "draining"
    view.last_drain = next_drain(view, of_now)
    assert [is_drained(view), is_drained(view, "i4")] == [True, False]


def test_each_rollback_takes_one_promotion_off() -> None:
    def promotion(version: int, *, rollback: bool = False) -> ModelPromoted:
        uri = f"s3://models/{version}.json"
        return ModelPromoted(model="m", version=version, run_id=f"r{version}", checkpoint_uri=uri, rollback=rollback)

    history = [promotion(1), promotion(2), promotion(3)]
    assert champion_of(history) == history[2]
    assert rollback_target(history) == history[1]
    assert rollback_target([*history, promotion(4, rollback=True)]) == history[0]
    assert rollback_target([*history, promotion(4, rollback=True), promotion(5, rollback=True)]) is None
    assert (champion_of([]), rollback_target([])) == (None, None)
