"""Wherever a cycle fails on a run or a node, that one is quarantined, and all others are decided on without it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.scheduling import Elastic, Policy
from services.scheduler import policies
from services.scheduler.core.quarantine import run_cycle
from services.scheduler.core.state import codec
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.quarantine import quarantine_node, quarantine_run
from services.scheduler.core.state.run import Run
from tests.scheduler.world import Chaos, World, spec

#: What quarantine itself reads, and what is read of nodes in quarantine, too.
KNOWN_OF_RUNS = frozenset({"run_id", "phase", "parts", "cancel_reason", "last_sequence"})
KNOWN_OF_NODES = frozenset({"node_id", "quarantined", "state", "last_drain", "incarnation", "notice", "unfit"})
KNOWN_OF_NODES |= {"version", "allocations"}
#: (How a cluster is saved, the time, the policy.)
Scene = tuple[dict[str, bytes], datetime, Policy]


class Fuse:
    """Counts the reads of a run or a node; after so many of them each one fails."""

    left = 0


class FailingRun(Run):
    """A run whose fields cannot be read any more once the fuse has blown."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return read_field(self, name)


class FailingNode(Node):
    """The same of a node."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return read_field(self, name)


READ_OF = {FailingRun: frozenset(each.name for each in fields(Run)) - KNOWN_OF_RUNS}
READ_OF[FailingNode] = frozenset(each.name for each in fields(Node)) - KNOWN_OF_NODES


def read_field(subject: Any, name: str) -> Any:
    if name in READ_OF[type(subject)]:
        Fuse.left -= 1
        if Fuse.left < 0:
            raise ZeroDivisionError(f"a defect at {name}")
    return object.__getattribute__(subject, name)


def crowded(policy: Policy) -> Scene:
    """Runs of each kind: with slots, asked to stop, waiting for more than is free, new; of two priorities."""
    world = World(policy)
    for number in range(4):
        world.join(f"n{number}", 4)
    for number in range(6):
        world.accept(f"low{number}", spec({"min": 2, "max": 3}, user=f"u{number}", team="a"))
    world.settle()
    for number in range(5):
        world.start(f"low{number}")
        world.commit(f"low{number}", 3)
    world.wait(700)
    world.drain("n3")
    world.accept("mid", spec(3, 1, team="b"))
    world.step()
    for number in range(3):
        world.accept(f"high{number}", spec(4, 5, team="b", scheduling={"limit_s": 900.0}))
    world.step()
    world.accept("new0", spec(2, 7))
    world.accept("new1", spec(1, 7))
    world.cancel("low4")
    return codec.save(world.cluster), world.now, policy


def idle(policy: Policy) -> Scene:
    """Runs that could grow."""
    world = World(policy.model_copy(update={"elastic": Elastic(resize_interval_s=2.0)}))
    world.join("n0", 2)
    for run_id in ("r0", "r1"):
        world.accept(run_id, spec({"min": 1, "max": 4}, scheduling={"limit_s": 9000.0}))
    world.settle()
    for run_id in ("r0", "r1"):
        world.start(run_id)
        world.commit(run_id, 5)
    world.join("n1", 4)
    world.join("n2", 4)
    world.wait(100)
    return codec.save(world.cluster), world.now, world.policy


def chaotic(policy: Policy, seed: int) -> Scene:
    world = World(policy)
    chaos = Chaos(world, random.Random(seed))
    for _ in range(4):
        chaos.submit()
    for _ in range(60):
        chaos.act()
    return codec.save(world.cluster), world.now, policy


POLICIES = [policies.DEFAULT, "even-wait", "fair-share", "fgd", "easy-backfill", "conservative-backfill", "never-idle"]
SCENES: dict[str, Callable[[Policy], Scene]] = {
    "crowded": crowded,
    "idle": idle,
    **{f"chaotic {seed}": lambda policy, seed=seed: chaotic(policy, seed) for seed in range(6)},
}


@cache
def scene(name: str, policy: str) -> Scene:
    return SCENES[name](policies.load(policy))


def reads(made: Scene, kind: str, subject_id: str) -> int:
    """Return how often a cycle reads the run or node."""
    cluster = codec.restore(made[0])
    arm(cluster, kind, subject_id, 10**9)
    run_cycle(cluster, *made[1:])
    return 10**9 - Fuse.left


def arm(cluster: Cluster, kind: str, subject_id: str, after: int) -> None:
    Fuse.left = after
    if kind == "run":
        cluster.runs[subject_id].__class__ = FailingRun
    else:
        cluster.nodes[subject_id].__class__ = FailingNode


def decisions_of(cluster: Cluster, made: Scene) -> list[str]:
    return sorted(map(repr, run_cycle(cluster, *made[1:]).decisions))


def check(made: Scene, kind: str, subject_id: str, after: int) -> None:
    without, failing = codec.restore(made[0]), codec.restore(made[0])
    if kind == "run":
        quarantine_run(without, subject_id, "cycle", "")
    else:
        quarantine_node(without, subject_id, "cycle", "")
    expected = decisions_of(without, made)
    arm(failing, kind, subject_id, after)
    decided = decisions_of(failing, made)
    Fuse.left = 10**9
    if kind == "node" and list(failing.quarantined_nodes) != list(without.quarantined_nodes):
        # A run that waits without the node as well is suspected in its place, until a second run fails there.
        (run_id,) = failing.quarantined
        assert run_id in failing.queued or run_id in without.queued or run_id in without.unqueued
        assert not any(decision.startswith(f"PlaceRun(run_id='{run_id}'") for decision in expected)
        return
    assert failing.quarantined == without.quarantined
    assert decided == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SCENES)),
    policy=st.sampled_from(POLICIES),
    kind=st.sampled_from(["run", "run", "node"]),
    which=st.integers(0, 20),
    share=st.floats(0, 1, exclude_max=True),
)
def test_what_a_cycle_fails_on_is_quarantined_and_nothing_else(
    name: str, policy: str, kind: str, which: int, share: float
) -> None:
    made = scene(name, policy)
    cluster = codec.restore(made[0])
    there = list(cluster.runs) if kind == "run" else [node.node_id for node in cluster.nodes.values() if node.alive]
    if there and (count := reads(made, kind, there[which % len(there)])):
        check(made, kind, there[which % len(there)], int(share * count))


@pytest.mark.parametrize("subject", ["run low0", "run mid", "run high1", "run new1", "node n0", "node n3"])
def test_a_failure_at_each_read_of_a_run_or_node_finds_it(subject: str) -> None:
    made = scene("crowded", policies.DEFAULT)
    kind, subject_id = subject.split()
    for after in range(reads(made, kind, subject_id)):
        check(made, kind, subject_id, after)
