"""One bad fact stops nothing: whatever a fact or a cycle fails on is put aside, and the rest goes on."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted
from contracts.events.node import NodeDraining, NodeJoined, NodeLeft, NodeLost, NodeNotice, NodeStaged, NodeUnfit
from contracts.events.run import (
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
    RunQueued,
    RunReleased,
    RunReserved,
    RunStaging,
    RunStalled,
    RunStarted,
    RunStopping,
    RunWaiting,
)
from contracts.scheduling import Policy
from services.scheduler import policies
from services.scheduler.core import fold
from services.scheduler.core.decisions import PlaceRun, fact_of
from services.scheduler.core.explain.why import answer
from services.scheduler.core.place.fragmentation import FragmentationScores
from services.scheduler.core.place.snapshot import NodeCapacity
from services.scheduler.core.quarantine import describe_quarantine, explain_quarantine, run_cycle
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.workload import Shape
from tests.scheduler.world import World, spec

START = datetime(2026, 1, 1, tzinfo=UTC)


def joined(**changes: Any) -> NodeJoined:
    fields = {"node_id": "bad", "incarnation": "1", "address": "x", "slots": 2, "lease_ttl_s": 3.0, **changes}
    return NodeJoined.model_validate(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_profiles": ("1g.10gb",)},
        {"slots": 10**9},
        {"memory_bytes": -1},
        {"lease_ttl_s": math.inf},
        {"cpus": math.nan},
    ],
)
def test_a_node_that_contradicts_itself_is_no_valid_fact(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        joined(**changes)


def test_a_node_that_a_cycle_fails_on_is_quarantined_and_others_are_used() -> None:
    # Such a fact cannot be published any more; an older log may hold one.
    bad = joined().model_copy(update={"slot_profiles": ("1g.10gb",)})
    world = World()
    world.publish(bad)
    world.join("good", 2)
    sound = _submit(world, "run-1", 2)
    profiled = _submit(world, "run-2", 1, resources={"mig_profile": "2g.20gb"})
    decisions = _decide_until_rest(world)
    assert sound in {decision.run_id for decision in decisions if isinstance(decision, PlaceRun)}
    assert world.run(profiled).generation == 0


def test_a_run_that_a_cycle_fails_on_is_quarantined_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.join("n1", 4)
    bad, sound = _submit(world, "run-3", 1), _submit(world, "run-4", 1)
    honest = fold.Run.ran_s

    def ran_s(self: Any, now: datetime) -> float:
        if self.run_id == bad:
            raise ZeroDivisionError("a defect")
        return honest(self, now)

    monkeypatch.setattr(fold.Run, "waited_s", ran_s)
    monkeypatch.setattr(fold.Run, "attained_slot_s", ran_s)
    world.policy = policies.load("least-attained")
    decisions = _decide_until_rest(world)
    assert sound in {decision.run_id for decision in decisions if isinstance(decision, PlaceRun)}
    assert bad in world.cluster.quarantined_runs
    said = explain_quarantine(world.cluster, bad)
    assert said is not None
    assert said["code"] == "quarantined"
    assert "ZeroDivisionError" in said["message"]
    # What is said about the run next gives it another chance.
    monkeypatch.undo()
    world.publish(RunWaiting(run_id=bad, next_generation=1, code="slots", message="x"))
    assert bad not in world.cluster.quarantined_runs
    assert bad in {decision.run_id for decision in _decide_until_rest(world) if isinstance(decision, PlaceRun)}


def test_a_fact_that_the_fold_fails_on_quarantines_its_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.join("n1", 2)
    bad, sound = _submit(world, "run-5", 1), _submit(world, "run-6", 1)

    def fails(*_: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setitem(fold._RUN_FACTS, RunWaiting, fails)
    world.publish(RunWaiting(run_id=bad, next_generation=1, code="slots", message="x"))
    assert bad in world.cluster.quarantined_runs
    assert world.cluster.sequence == len(world.log)
    decisions = _decide_until_rest(world)
    assert {decision.run_id for decision in decisions if isinstance(decision, PlaceRun)} == {sound}
    # An operator ends it.
    world.publish(RunCancelling(run_id=bad, reason="enough"))
    _decide_until_rest(world)
    assert world.run(bad).terminal
    assert bad not in world.cluster.quarantined_runs


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_run_that_a_cycle_fails_on_leaves_the_only_node_to_others(
    monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    world = World(policies.load("fgd"))
    world.join("n1", 4)
    bad = _submit(world, "run-7", 2)
    honest = FragmentationScores.best

    def best(self: Any, capacities: list[NodeCapacity], shape: Shape) -> Any:
        for capacity in capacities:  # the frame of the error knows a node and no run
            if shape.accelerators == 2:
                raise ValueError(f"a defect on {capacity.node.node_id}")
        return honest(self, capacities, shape)

    monkeypatch.setattr(FragmentationScores, "best", best)
    if is_alone:
        assert _decide_until_rest(world) == []
    sound = _submit(world, "run-8", 1)
    _decide_until_rest(world)
    assert world.run(sound).generation == 1
    assert describe_quarantine(world.cluster)["nodes"] == {}
    assert list(describe_quarantine(world.cluster)["runs"]) == [bad]


def test_a_node_that_a_cycle_fails_on_for_the_only_run_is_quarantined() -> None:
    world = World()
    world.publish(joined().model_copy(update={"slot_profiles": ("1g.10gb",)}))
    world.join("good", 2)
    only = _submit(world, "run-9", 1, resources={"mig_profile": "2g.20gb"})
    _decide_until_rest(world)
    whole = _submit(world, "run-10", 1)
    _decide_until_rest(world)
    assert world.run(whole).generation == 1
    assert world.run(only).generation == 0


def test_a_run_may_request_more_than_any_node_counts() -> None:
    world = World(policies.load("fgd"))
    world.join("n1", 2)
    huge, sound = _submit(world, "run-11", 2, resources={"memory_bytes": 10**30}), _submit(world, "run-12", 1)
    _decide_until_rest(world)
    assert world.run(huge).generation + world.run(sound).generation == 1
    assert describe_quarantine(world.cluster) == {"runs": {}, "nodes": {}}


def _submit(world: World, run_id: str, slots: int = 1, **more: Any) -> str:
    request = spec(slots, **more)
    world.publish(RunAccepted(run_id=run_id, spec=request, request_id=run_id, request_source="test"))
    return run_id


def _decide_until_rest(world: World) -> list[Any]:
    made: list[Any] = []
    for _ in range(20):
        decisions = run_cycle(world.cluster, world.now, world.policy).decisions
        if not decisions:
            return made
        facts = [fact_of(decision, world.cluster, world.now) for decision in decisions]
        for fact in facts:
            world.log.append((fact, len(world.log) + 1, world.now))
            fold.apply(world.cluster, *world.log[-1])
        made += decisions
    raise AssertionError(f"never at rest: {made[-3:]}")


# -- anything that looks like a fact -----------------------------------------------------------------

RUN_IDS = st.sampled_from(["r1", "r2", "r3", "forged", "x" * 128])
NODE_IDS = st.sampled_from(["n1", "n2", "n3", "forged"])
LIVES = st.sampled_from(["1", "2", ""])
GENERATIONS = st.sampled_from([1, 1, 1, 2, 3, 2**63, 10**30])
NUMBERS = st.sampled_from([0, 1, 2, 7, 1000, 2**63, 10**30])
SIGNED = st.sampled_from([-(10**30), -1, 0, 1, 2, 2**63])
SECONDS = st.sampled_from([0.0, 1e-9, 1.0, 60.0, 1e6, 1e300, math.inf])
ANY_SECONDS = st.sampled_from([-1e300, -1.0, 0.0, 5.0, 1e300, math.inf, -math.inf, math.nan])
TEXTS = st.sampled_from(["", "x", "\0", "é" * 500])
MOMENTS = st.sampled_from([START, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
SLOTS = st.lists(st.sampled_from([-(2**40), -3, -1, 0, 0, 1, 2, 3, 9, 2**40]), max_size=4).map(tuple)
REFS = st.builds(
    CheckpointRef,
    uri=st.sampled_from(["s3://models/e/r/1.json", "s3://models/e/r/2.json"]),
    step=SIGNED,
    epoch=SIGNED,
    samples_consumed=SIGNED,
)
SPECS = st.builds(
    lambda slots, priority, command, more: spec(**{"slots": slots, **more}, priority=priority, command=command),
    st.sampled_from([1, 2, {"min": 1, "max": 1_000_000}, {"min": 2, "max": 4}, 1_000_000]),
    st.sampled_from([-1000, 0, 999]),
    st.booleans(),
    st.sampled_from(
        [
            {},
            {"team": "a/b/c", "user": "u"},
            {"scheduling": {"limit_s": 1e300}},
            {"scheduling": {"limit_s": 1e-300}},
            {"scheduling": {"deadline": "0001-01-01T00:00:00Z"}},
            {"scheduling": {"deadline": "9999-12-31T23:59:59Z"}},
            {"resources": {"mig_profile": "1g.10gb"}},
            {"resources": {"share": 1e-300}},
            {"resources": {"share": 0.0, "cpus": 100_000}},
            {"resources": {"memory_bytes": 10**30}},
            {"gang": {"bundle": 2, "apart": True}, "slots": {"min": 2, "max": 4}},
            {"resume_from": "s3://models/e/r/1.json"},
            {"data": {"dataset_id": "0" * 64}},
        ]
    ),
)
MEMBERS = st.lists(st.builds(Member.model_construct, node_id=NODE_IDS, slots=SLOTS, ranks=SLOTS), max_size=3).map(tuple)


def _made(kind: type[Fact], /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Fact]:
    """Facts as an older, or a forged, publisher may have made them: the fields' types are right."""
    required = {
        name: field.get_default(call_default_factory=True)
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
    return st.builds(lambda **given: kind.model_construct(**{**required, **given}), **fields)


OF_GENERATION = {"run_id": RUN_IDS, "generation": GENERATIONS}
OF_NODE = {"node_id": NODE_IDS, "incarnation": LIVES}
FACTS = st.one_of(
    _made(RunAccepted, run_id=RUN_IDS, spec=SPECS, request_id=TEXTS, request_source=TEXTS),
    _made(RunPrepared, run_id=RUN_IDS, dataset_id=st.just("0" * 64), manifest_uri=TEXTS, train_samples=SIGNED),
    _made(
        RunStaging,
        run_id=RUN_IDS,
        node_ids=st.lists(NODE_IDS, max_size=3).map(tuple),
        dataset=st.just(RunPrepared(run_id="r1", dataset_id="0" * 64, manifest_uri="s3://datasets/m", train_samples=1)),
        limit_s=ANY_SECONDS,
    ),
    _made(
        NodeStaged,
        **OF_NODE,
        run_id=RUN_IDS,
        dataset_ids=st.sampled_from([(), ("0" * 64,), ("x",)]),
        size_bytes=SIGNED,
        seconds=ANY_SECONDS,
        error=TEXTS,
    ),
    _made(
        RunQueued,
        run_id=RUN_IDS,
        next_generation=GENERATIONS,
        reason=st.sampled_from(["new", "preempted", "crashed", "node lost"]),
        failures=SIGNED,
    ),
    _made(RunWaiting, run_id=RUN_IDS, next_generation=GENERATIONS, code=TEXTS, message=TEXTS),
    _made(RunPlaced, **OF_GENERATION, members=MEMBERS, world_size=NUMBERS, spec=SPECS),
    _made(RunReserved, run_id=RUN_IDS, next_generation=GENERATIONS, start_by=MOMENTS),
    _made(RunStarted, **OF_GENERATION, node_id=NODE_IDS),
    _made(
        RunStalled,
        **OF_GENERATION,
        node_id=NODE_IDS,
        rank=SIGNED,
        step=SIGNED,
        silent_s=ANY_SECONDS,
        median_step_s=ANY_SECONDS,
        on_stall=st.sampled_from(["restart", "exclude"]),
    ),
    _made(
        RunStopping,
        **OF_GENERATION,
        reason=st.sampled_from(["preempted", "resized", "node_lost"]),
        message=TEXTS,
        grace_s=SECONDS,
        then=st.sampled_from(["queue", "cancel", "fail"]),
    ),
    _made(RunReleased, **OF_GENERATION, node_id=NODE_IDS),
    _made(
        RunExited,
        **OF_GENERATION,
        node_id=NODE_IDS,
        outcome=st.sampled_from(["succeeded", "failed"]),
        reason=TEXTS,
        metrics=st.sampled_from([{}, {"a": math.nan}]),
    ),
    _made(CheckpointCommitted, **OF_GENERATION, checkpoint=REFS, size_bytes=SIGNED, final=st.booleans()),
    _made(CheckpointDeleted, run_id=RUN_IDS, uri=st.just("s3://models/e/r/1.json")),
    _made(RunCompleted, run_id=RUN_IDS, generation=SIGNED),
    _made(RunFailed, run_id=RUN_IDS, generation=SIGNED, reason=TEXTS),
    _made(RunCancelling, run_id=RUN_IDS, reason=TEXTS),
    _made(RunCancelled, run_id=RUN_IDS, reason=TEXTS),
    _made(
        NodeJoined,
        **OF_NODE,
        address=TEXTS,
        slots=st.sampled_from([0, 1, 2, 4, 64]),
        memory_bytes=SIGNED,
        cpus=SECONDS,
        slot_profiles=st.sampled_from([(), ("1g.10gb",), ("1g.10gb", ""), ("",) * 9]),
        labels=st.sampled_from([{}, {"cluster": "a", "pool": "p"}]),
        lease_ttl_s=SECONDS,
        running=st.lists(st.tuples(RUN_IDS, GENERATIONS), max_size=2).map(tuple),
    ),
    _made(NodeLeft, **OF_NODE),
    _made(NodeLost, **OF_NODE),
    _made(NodeDraining, **OF_NODE),
    _made(NodeNotice, **OF_NODE, source=TEXTS, kind=TEXTS, grace_s=st.one_of(st.none(), ANY_SECONDS)),
    _made(NodeUnfit, **OF_NODE, reason=TEXTS, slots=SLOTS),
    _made(CapacityWanted, pool=st.just("p"), nodes=SIGNED, slots=SIGNED, reason=TEXTS),
)
TIMES = st.sampled_from([-1e9, -3600.0, -1.0, 0.0, 1.0, 60.0, 3600.0, 1e8])
POLICIES = st.sampled_from(["easy-backfill", "even-wait", "fair-share", "fgd", policies.DEFAULT])


@settings(
    max_examples=250,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(st.lists(st.tuples(FACTS, TIMES), min_size=40, max_size=40), POLICIES)
def test_ten_thousand_facts_that_look_valid_stop_no_cycle(facts: list[tuple[Fact, float]], name: str) -> None:
    policy = policies.load(name)
    cluster, now = Cluster(adopted=PolicyAdopted(digest=policy.digest, policy=policy)), START
    for place, (fact, at_s) in enumerate(facts):
        sequence = cluster.sequence + 1
        fold.apply(cluster, fact, sequence, START + timedelta(seconds=at_s))
        assert cluster.sequence == sequence
        if place % 8 == 7:
            now += timedelta(seconds=7)
            _fold_decisions(cluster, now, policy)
    # A sound run of the highest priority is still placed on a sound node, which is large enough for all others too.
    label = {"accelerator": "sound"}
    fold.apply(cluster, joined(node_id="sound", slots=64, **label), cluster.sequence + 1, now)
    request = spec(1, 1000, user="sound", resources={"accelerators": ["sound"]})
    accepted = RunAccepted(run_id="sound", spec=request, request_id="s", request_source="s")
    fold.apply(cluster, accepted, cluster.sequence + 1, now)
    for _ in range(10):
        now += timedelta(seconds=1)
        _fold_decisions(cluster, now, policy)
    assert cluster.runs["sound"].generation >= 1, (describe_quarantine(cluster), explain(cluster, now, policy))
    assert isinstance(cluster.nodes["sound"], Node)


def _fold_decisions(cluster: Cluster, now: datetime, policy: Policy) -> None:
    for decision in run_cycle(cluster, now, policy).decisions:
        try:
            fact = fact_of(decision, cluster, now)
        except ValidationError:
            continue
        fold.apply(cluster, fact, cluster.sequence + 1, now)


def explain(cluster: Cluster, now: datetime, policy: Policy) -> Any:
    """Why the sound run waits, for the message of the test."""
    return answer(cluster, "sound", now, policy), {
        i: (str(cluster.runs[i].phase), cluster.runs[i].slot_count) for i in cluster.runs.ids()
    }
