"""The past of small worlds: decided again, asked about, played on other nodes, and followed by a candidate policy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunPlaced, RunPreempting, RunQueued, RunWaiting
from contracts.scheduling import Order, Policy, Reclaim
from services.scheduler.past.log import Entry, LogError, line_of, parse
from services.scheduler.past.remake import Difference, remake
from tests.scheduler.world import START, Chaos, World, spec


def entries(world: World) -> list[Entry]:
    """The world's log with the policy in force in front, through a file and back."""
    adopted = PolicyAdopted(digest=world.policy.digest, policy=world.policy)
    lines = [line_of(adopted, 1, START)]
    lines += [line_of(fact, sequence, time) for fact, sequence, time in world.log]
    return list(parse(lines))


def adopting(policy: Policy | None = None) -> World:
    """A world whose log begins with its policy."""
    world = World(policy)
    world.say(PolicyAdopted(digest=world.policy.digest, policy=world.policy))
    return world


def log_of(world: World) -> list[Entry]:
    return list(parse(line_of(*each) for each in world.log))


def lively(seed: int, steps: int = 120, policy: Policy | None = None) -> World:
    world = adopting(policy)
    chaos = Chaos(world, random.Random(seed))
    for _ in range(steps):
        chaos.act()
    chaos.calm()
    return world


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_a_lively_history_is_decided_again_without_a_difference(seed: int) -> None:
    counts, found = remake(log_of(lively(seed)))
    assert found == []
    assert counts.decisions == counts.same
    assert counts.unchecked <= counts.facts
    assert counts.passes > 0
