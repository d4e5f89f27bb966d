"""What the autoscaler does, as tables, and over any history: bounded, idempotent, and never at a run's expense."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from contracts.base import Fact
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.node import NodeDraining, NodeJoined, NodeLeft, NodeLost, NodeNotice
from contracts.events.run import Member, RunExited, RunPlaced, RunReleased
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.autoscaler.core.decide import Decision, DrainNode, Machine, StartMachines, StopMachine, decide
from services.autoscaler.core.state import State, apply

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = RunSpec.model_validate({"name": "x", "command": ["true"]})


def adopted(most: int = 4) -> PolicyAdopted:
    policy = Policy.model_validate({"pools": {"pools": [{"name": "a", "max_nodes": most}]}})
    return PolicyAdopted(digest=policy.digest, policy=policy)


def wanted(nodes: int, *spare: str) -> CapacityWanted:
    return CapacityWanted(pool="a", nodes=nodes, spare=spare, decided_at=NOW)


def joined(node_id: str, life: str = "1", pool: str = "a", running: tuple[tuple[str, int], ...] = ()) -> NodeJoined:
    labels = {"pool": pool} if pool else {}
    return NodeJoined(
        node_id=node_id, incarnation=life, address="h", slots=1, lease_ttl_s=5, labels=labels, running=running
    )


def placed(*node_ids: str, run_id: str = "r", generation: int = 1) -> RunPlaced:
    members = tuple(Member(node_id=each, slots=(0,), ranks=(number,)) for number, each in enumerate(node_ids))
    return RunPlaced(
        run_id=run_id, generation=generation, members=members, world_size=len(members), spec=SPEC,
        decided_at_sequence=0, decided_at=NOW,
    )  # fmt: skip


def folded(*facts: Fact) -> State:
    state = State()
    for sequence, fact in enumerate(facts, 1):
        apply(state, fact, sequence, NOW)
    return state


def said(state: State, *machines: str, age_s: float = 10.0) -> list[str]:
    there = [Machine(each, NOW - timedelta(seconds=age_s)) for each in machines]
    return [text(each) for each in decide(state, {"a": there}, NOW, silence_s=60)]


def text(decision: Decision) -> str:
    match decision:
        case StartMachines():
            return f"start {decision.count}"
        case DrainNode():
            return f"drain {decision.node_id}"
        case StopMachine():
            return f"stop {decision.node_id}"


EXITED = RunExited(run_id="r", generation=1, node_id="n0", outcome="succeeded")
RELEASED = RunReleased(run_id="r", generation=1, node_id="n0")
DRAINING = NodeDraining(node_id="n0", incarnation="1")
KEPT = NodeDraining(node_id="n0", incarnation="1", scope="node", user="ada")
CASES: list[tuple[str, list[Fact], list[str], list[str]]] = [
    ("nothing was said", [adopted(), joined("n0")], ["n0"], []),
    ("more are wanted", [adopted(), wanted(3)], ["n0"], ["start 2"]),
    ("as many as there are", [adopted(), wanted(1)], ["n0"], []),
    ("never above the most", [adopted(2), wanted(9)], ["n0"], ["start 1"]),
    ("not wanted before it came", [adopted(), wanted(0)], ["n0"], ["stop n0"]),
    ("an empty one goes", [adopted(), joined("n0"), joined("n1"), wanted(1)], ["n0", "n1"], ["drain n0"]),
    ("the spare one goes first", [adopted(), joined("n0"), joined("n1"), wanted(1, "n1")], ["n0", "n1"], ["drain n1"]),
    ("a busy one stays", [adopted(), joined("n0"), placed("n0"), wanted(0)], ["n0"], []),
    ("a busy one is done", [adopted(), joined("n0"), placed("n0"), EXITED, wanted(0)], ["n0"], ["drain n0"]),
    ("drained, not empty", [adopted(), joined("n0"), placed("n0"), DRAINING, wanted(0)], ["n0"], []),
    (
        "drained and empty",
        [adopted(), joined("n0"), placed("n0"), DRAINING, RELEASED, wanted(0)],
        ["n0"],
        ["stop n0"],
    ),
    ("what an operator drained is kept", [adopted(), joined("n0"), KEPT, wanted(0)], ["n0"], []),
    ("and stays drained when it joins again", [adopted(2), joined("n0"), KEPT, joined("n0", "2"), wanted(2)], ["n0"],
     ["start 1"]),
    ("what is drained is no more", [adopted(), joined("n0"), placed("n0"), DRAINING, wanted(1)], ["n0"], ["start 1"]),
    ("but takes room until it is gone", [adopted(1), joined("n0"), placed("n0"), DRAINING, wanted(1)], ["n0"], []),
    (
        "taken away by whoever runs it",
        [adopted(), joined("n0"), NodeNotice(node_id="n0", incarnation="1", source="s", kind="k"), wanted(1)],
        ["n0"],
        ["stop n0", "start 1"],
    ),
    ("old news of an earlier life", [adopted(), joined("n0", "2"), DRAINING, wanted(1)], ["n0"], []),
    (
        "taken up again by a new life",
        [adopted(), joined("n0"), placed("n0"), joined("n0", "2", running=(("r", 1),)), wanted(0)],
        ["n0"],
        [],
    ),
    ("lost a moment ago", [adopted(), joined("n0"), NodeLost(node_id="n0", incarnation="1"), wanted(1)], ["n0"], []),
    ("a pool that is no more", [adopted(), joined("n0"), wanted(1), PolicyAdopted(digest="x", policy=Policy())], ["n0"],
     ["drain n0"]),
    ("nodes of no pool are not ours", [adopted(), joined("own", pool=""), placed("own"), wanted(1)], [], ["start 1"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "machines", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_what_is_done(facts: list[Fact], machines: list[str], expected: list[str]) -> None:
    assert said(folded(*facts), *machines) == expected


def test_a_machine_without_a_node_is_given_up_and_another_one_started() -> None:
    state = folded(adopted(), wanted(1))
    assert said(state, "n0", age_s=59) == []
    assert said(state, "n0", age_s=61) == ["stop n0", "start 1"]
    lost = folded(adopted(), joined("n0"), NodeLost(node_id="n0", incarnation="1"), wanted(1))
    lost.nodes["n0"].gone_at = NOW - timedelta(seconds=61)
    assert said(lost, "n0", age_s=1000) == ["stop n0", "start 1"]


def test_facts_about_old_runs_need_not_be_read() -> None:
    facts: list[Fact] = [placed("n0", run_id="old"), adopted(), joined("n0"), joined("n1"), placed("n0")]
    state = folded(*facts)
    assert state.first_relevant_sequence() == 3
    for sequence, fact in enumerate(facts[2:], 3):
        apply(state, fact, sequence, NOW)
    assert {node.node_id: node.holders for node in state.nodes.values()} == {"n0": {("r", 1)}, "n1": set()}
    assert folded().first_relevant_sequence() == 1


@pytest.mark.parametrize("seed", range(30))
def test_any_history(seed: int) -> None:
    """Machines never exceed the most; none with a run on it is stopped; and it comes to rest at what is wanted."""
    chance, now, sequence = random.Random(seed), NOW, 0
    state, machines, held, number = State(), {}, {}, 0
    most = chance.randint(1, 4)

    def say(fact: Fact) -> None:
        nonlocal sequence
        sequence += 1
        apply(state, fact, sequence, now)

    def act() -> int:
        nonlocal number
        decisions = decide(state, {"a": list(machines.values())}, now, silence_s=300)
        for decision in decisions:
            match decision:
                case StartMachines():
                    for _ in range(decision.count):
                        machines[f"m{number}"] = Machine(f"m{number}", now)
                        number += 1
                case DrainNode():
                    assert not held.get(decision.node_id)
                    say(NodeDraining(node_id=decision.node_id, incarnation="1"))
                case StopMachine():
                    assert not held.get(decision.node_id)
                    if machines.pop(decision.node_id).node_id in state.nodes:
                        say(NodeLeft(node_id=decision.node_id, incarnation="1"))
        assert len(machines) <= most
        return len(decisions)

    say(adopted(most))
    for step in range(120):
        now += timedelta(seconds=5)
        open_nodes = [each.node_id for each in state.nodes.values() if each.gone_at is None and not each.is_closing]
        match chance.randint(0, 4):
            case 0:
                say(wanted(chance.randint(0, 5)))
            case 1 if new := [each for each in machines if each not in state.nodes]:
                say(joined(chance.choice(new)))
            case 2 if free := [each for each in open_nodes if not held.get(each)]:
                node_id = chance.choice(free)
                held[node_id] = f"r{step}"
                say(placed(node_id, run_id=f"r{step}"))
            case 3 if busy := [each for each, run_id in held.items() if run_id]:
                node_id = chance.choice(busy)
                say(RunReleased(run_id=held.pop(node_id), generation=1, node_id=node_id))
            case _:
                act()
    for node_id, run_id in list(held.items()):
        say(RunReleased(run_id=run_id, generation=1, node_id=node_id))
        del held[node_id]
    goal = chance.randint(0, most)
    say(wanted(goal))
    for _ in range(10):
        for each in [each for each in machines if each not in state.nodes]:
            say(joined(each))
        if not act():
            break
    assert len(machines) == goal
    assert act() == 0
