"""What another policy would change is what it changes once it is adopted."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events.run import RunPlaced, RunStopping
from contracts.scheduling import Policy
from services.scheduler import policies
from services.scheduler.policy_diff import diff_policy, diff_settings, simulate_cycles
from tests.scheduler.world import Chaos, World, spec

PRESETS = [policies.load(name) for name in policies.names()]
TEAMS = """
name = "teams"
[[admit.quotas]]
team = "ops"
accelerator = "H100"
ceiling = 2
[[admit.quotas]]
team = "research"
slots = 3
[fair_share.weights]
"research/vision" = 2
"""


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(PRESETS))
def test_what_is_simulated_is_what_is_decided(seed: int, policy: Policy) -> None:
    world = World()
    world.adopt(Policy())
    chaos = Chaos(world, random.Random(seed))
    for _ in range(60):
        chaos.act()
    before = copy.deepcopy(world.cluster)
    found = diff_policy(copy.deepcopy(world.cluster), world.now, world.policy, policy)
    assert world.cluster == before
    for chosen, what in ((world.policy, "in_force"), (policy, "candidate")):
        fork = copy.deepcopy(world)
        fork.adopt(chosen)
        known = len(fork.log)
        fork.settle()
        decided = [fact for fact, _, _ in fork.log[known:]]
        expected = simulate_cycles(copy.deepcopy(before), world.now, chosen)
        assert {fact.run_id for fact in decided if isinstance(fact, RunPlaced)} == {
            run_id for run_id, outcomes in expected.items() if any(each.what == "placed" for each in outcomes)
        }
        assert {fact.run_id for fact in decided if isinstance(fact, RunStopping)} == {
            run_id
            for run_id, outcomes in expected.items()
            if any(each.what in ("preempted", "resized") for each in outcomes)
        }
        for row in found["runs"]:
            assert row[what] == [each._asdict() for each in expected[row["run_id"]]]


def test_what_a_first_cycle_starts_a_second_one_preempts() -> None:
    world = World(policies.load("fifo"))
    world.adopt(world.policy)
    world.join("n1", 2)
    for run_id, slots, priority in (("holder", 1, 0), ("wide", 2, 0), ("high", 2, 3), ("small", 1, 0)):
        world.accept(run_id, spec(slots, priority, command=True))
        world.settle()
    candidate = policies.change(world.policy, ["name=p", 'order.by=["priority"]', "order.skip=true"])
    candidate = policies.change(candidate, ['preemption.by=["priority"]'])
    found = diff_policy(copy.deepcopy(world.cluster), world.now, world.policy, candidate)
    assert {row["run_id"]: [each["what"] for each in row["candidate"]] for row in found["runs"]} == {
        "small": ["placed", "preempted"],
        "holder": ["preempted"],
        "high": ["waits"],
    }
    assert [row["run_id"] for row in found["runs"]][-1] == "high"
    assert found["outcomes"] == {"in_force": {"waits": 3, "goes on": 1}, "candidate": {"waits": 2, "preempted": 2}}
    assert found["failures"] == {"runs": {}, "nodes": {}}


def test_settings_are_named_as_an_operator_writes_them() -> None:
    old, new = Policy(name="old"), policies.parse(TEAMS, "file")
    assert {each["setting"]: each["candidate"] for each in diff_settings(old, new)} == {
        "name": "teams",
        "admit.quotas[ops,H100].ceiling": 2,
        "admit.quotas[ops,H100].period_h": 168.0,
        "admit.quotas[research].slots": 3,
        "admit.quotas[research].period_h": 168.0,
        'fair_share.weights."research/vision"': 2.0,
    }
    fewer = new.model_copy(update={"admit": new.admit.model_copy(update={"quotas": new.admit.quotas[1:]})})
    assert [each["setting"] for each in diff_settings(new, fewer)] == [
        "admit.quotas[ops,H100].ceiling",
        "admit.quotas[ops,H100].period_h",
    ]
    assert diff_settings(new, new) == []


def test_a_run_on_which_the_cycle_fails_by_the_candidate_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.join("n1", 1)
    world.accept("r1", spec(1))
    original = policies.load("fifo")

    def fail(run: object, policy: Policy) -> str:
        if policy.name == original.name:
            raise ArithmeticError("no key")
        return ""

    monkeypatch.setattr("services.scheduler.core.order.queue.group_of", fail)
    found = diff_policy(copy.deepcopy(world.cluster), world.now, world.policy, original)
    assert "no key" in found["failures"]["runs"]["r1"]
