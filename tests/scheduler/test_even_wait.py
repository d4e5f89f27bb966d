"""Short runs first, and the long ones share the wait: what a run counts, when that changes, and that nobody is left."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.events.run import RunPrepared
from contracts.scheduling import Elastic, EvenWait, Faults, Order, Policy, Preemption
from services.scheduler.core.decide import run_steps
from services.scheduler.core.fold import fold
from services.scheduler.core.order import even_wait, queue
from services.scheduler.policies import load
from tests.scheduler.world import Chaos, World, spec
from trainbus.operate.simulation import generate, report
from trainbus.operate.simulation.engine import simulate

HOUR = 3_600.0
CONFIG = EvenWait(foresee=False, margin_s=10_000)
POLICY = Policy(
    order=Order(by=("priority", "even-wait"), skip=True, even_wait=CONFIG),
    preemption=Preemption(by=("priority", "even-wait"), quantum_s=300),
)


def world_of(slots: int, policy: Policy = POLICY) -> World:
    world = World(policy)
    world.join("n1", slots)
    return world


def submit(world: World, run_id: str, slots: int = 1, priority: int = 0, **more: Any) -> None:
    world.accept(run_id, spec(slots, priority, **more))
    go_on(world)


def go_on(world: World) -> None:
    """Decide; what was placed begins to run."""
    world.settle()
    for run in list(world.cluster.runs.values()):
        if run.live and str(run.phase) == "placed":
            world.start(run.run_id)


def give_way(world: World, run_id: str) -> None:
    """The run lets go of its slots, and what follows is decided."""
    world.release(run_id)
    go_on(world)


@pytest.mark.parametrize(
    ("waited_s", "left"),
    [(0, 1.0), (50, 1.0), (60, 0.8), (75, 0.5), (100, 0.0), (1_000, 0.0)],
)
def test_length_counts_less_from_a_part_of_the_longest_wait_on(waited_s: float, left: float) -> None:
    assert even_wait.part_left(waited_s, 100, EvenWait(from_part=0.5)) == pytest.approx(left)


def test_a_short_run_takes_slots_of_a_long_one_but_not_of_one_that_is_hardly_longer() -> None:
    world = world_of(1)
    submit(world, "long")
    world.wait(4 * HOUR)
    submit(world, "short")
    # Four short units are not more than four times as much.
    assert world.run("long").stopping is None
    world.wait(4 * HOUR)
    world.settle()
    assert world.run("long").stopping is not None
    give_way(world, "long")
    assert world.run("short").live


def test_a_wide_run_counts_for_all_its_slots() -> None:
    world = world_of(8)
    submit(world, "wide", 8)
    world.wait(HOUR + 1)
    submit(world, "short")
    assert world.run("wide").stopping is not None


def test_no_run_is_stopped_before_the_end_of_its_quantum() -> None:
    world = world_of(128)
    submit(world, "wide", 128)
    world.wait(299)
    submit(world, "short")
    assert world.run("wide").stopping is None
    wake = run_steps(world.cluster, world.now, POLICY).wake_at
    assert wake is not None
    assert wake <= world.now + timedelta(seconds=1)
    world.wait(1)
    world.settle()
    assert world.run("wide").stopping is not None


def test_of_two_long_runs_the_one_that_has_waited_takes_its_turn() -> None:
    """Both count the same by length; the wait brings the other one in, and then it goes on."""
    world = world_of(1)
    submit(world, "first")
    world.wait(20 * HOUR)
    submit(world, "second")
    give_way(world, "first")
    world.wait(20 * HOUR)
    world.settle()
    # The first has waited for longer than anybody who has slots had to, and the margin.
    assert world.run("second").stopping is not None
    give_way(world, "second")
    assert world.run("first").live


def test_a_run_is_examined_when_its_wait_raises_it() -> None:
    world = world_of(1)
    submit(world, "first")
    world.wait(20 * HOUR)
    submit(world, "second")
    give_way(world, "first")
    run = world.run("first")
    before = queue.key_of(world.cluster, run, world.now, POLICY)
    at_s = queue.promoted_at_s(world.cluster, run, world.now, POLICY)
    left_s = at_s - world.now.timestamp()
    assert 0 < left_s < math.inf
    world.wait(left_s - 0.1)
    assert queue.key_of(world.cluster, run, world.now, POLICY) == before
    world.wait(0.11)
    assert queue.key_of(world.cluster, run, world.now, POLICY) < before


def test_the_longest_wait_is_that_of_those_that_have_slots() -> None:
    world = world_of(1)
    submit(world, "first")
    assert even_wait.limit_s(world.cluster, world.run("first"), CONFIG) == CONFIG.margin_s
    submit(world, "second")
    world.wait(5_000)
    assert even_wait.limit_s(world.cluster, world.run("first"), CONFIG) == CONFIG.margin_s
    world.exit("first")
    go_on(world)
    # Rounded up to a quarter of the margin.
    assert even_wait.limit_s(world.cluster, world.run("first"), CONFIG) == 5_000 + CONFIG.margin_s


def test_the_longest_wait_is_rounded_up_to_a_quarter_of_the_margin() -> None:
    config = EvenWait(margin_s=600)
    world = world_of(1)
    submit(world, "first")
    submit(world, "second")
    world.wait(100 * HOUR)
    world.exit("first")
    go_on(world)
    least_s = 100 * HOUR + 600
    assert least_s <= even_wait.limit_s(world.cluster, world.run("second"), config) <= least_s + 150


@pytest.mark.parametrize("other", [{"priority": -5}, {"team": "scavengers"}, {"resources": {"accelerators": ["cpu"]}}])
def test_a_long_wait_elsewhere_sets_no_limit_here(other: dict[str, Any]) -> None:
    """A scavenger that waited for days does not make everybody wait for days."""
    world = world_of(1)
    submit(world, "first")
    submit(world, "scavenger", **other)
    world.wait(480 * HOUR)
    world.exit("first")
    go_on(world)
    submit(world, "own")
    assert world.run("scavenger").live
    assert even_wait.limit_s(world.cluster, world.run("own"), CONFIG) == CONFIG.margin_s
    assert even_wait.limit_s(world.cluster, world.run("scavenger"), CONFIG) > 480 * HOUR


def test_preparing_data_is_no_wait() -> None:
    world = world_of(1)
    data = {"dataset_id": "0" * 64}
    submit(world, "slow", data=data)
    world.wait(50 * HOUR)
    dataset_id = "0" * 64
    world.publish(
        RunPrepared(run_id="slow", dataset_id=dataset_id, manifest_uri="s3://datasets/m.json", train_samples=1)
    )
    world.settle()
    assert world.run("slow").waited_s(world.now) == 0


def test_priority_precedes_even_wait() -> None:
    world = world_of(1)
    submit(world, "urgent", priority=5)
    world.wait(100 * HOUR)
    submit(world, "short")
    assert world.run("urgent").stopping is None


def test_what_a_run_is_expected_to_take_counts_where_it_is_foreseen() -> None:
    world = world_of(1, load("even-wait"))
    submit(world, "any")
    # Nothing is known yet: the prior.
    run = world.run("any")
    run.predicted_s = 50 * HOUR
    key = queue.key_of(world.cluster, run, world.now, world.policy)
    assert key[1] == math.floor(math.log2(50))


def test_short_runs_pass_and_no_long_one_is_left_behind() -> None:
    """The average is well below first-come's, the longest wait well below that of least attained service."""
    found: dict[str, dict[str, float]] = {}
    for name in ("fifo", "least-attained", "even-wait"):
        found[name] = {"avg_wait_s": 0.0, "max_wait_s": 0.0, "preemptions": 0.0}
        for seed in (2, 3):
            trace = generate.jobs(250, 32, seed=seed, load=1.3)
            recorder = report.Recorder(trace)
            figures = report.figures(recorder, simulate(trace, load(name), listeners=(recorder.record_fact,)))
            assert figures["completed"] == 250
            found[name] = {what: sofar + figures[what] for what, sofar in found[name].items()}
    fifo, attained, even = found.values()
    assert even["avg_wait_s"] < fifo["avg_wait_s"] / 2
    assert even["max_wait_s"] < attained["max_wait_s"] * 0.7
    assert even["preemptions"] < attained["preemptions"] / 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.integers(10, 120), foresee=st.booleans())
@example(seed=731, acts=34, foresee=False)
def test_any_history_keeps_the_invariants(seed: int, acts: int, foresee: bool) -> None:
    """``World.step`` compares what is remembered from cycle to cycle with what is made anew."""
    policy = POLICY.model_copy(
        update={
            # Everything is short in this world: a second counts.
            "order": Order(
                by=("priority", "even-wait"),
                skip=True,
                even_wait=EvenWait(short_slot_s=1, margin_s=20, foresee=foresee, advantage=2),
            ),
            "preemption": Preemption(by=("priority", "even-wait"), quantum_s=1),
            "elastic": Elastic(resize_interval_s=0.5, grow_anyway_s=5),
            "faults": Faults(start_deadline_s=30),
        }
    )
    chaos = Chaos(World(policy), random.Random(seed))
    for _ in range(3):
        chaos.submit()
    for _ in range(acts):
        chaos.act()
    chaos.calm()
    refolded = fold(chaos.world.log)
    assert refolded == chaos.world.cluster
    assert refolded.slots_used == 0
