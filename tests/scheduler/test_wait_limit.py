"""The wait limit of least attained service: strict order of submission gives it, ``why`` shows it, arrays share it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.scheduling import Elastic, Faults, LeastAttained, Order, Policy, Preemption, Reserve
from services.scheduler.core.explain.why import answer
from services.scheduler.core.fold import fold
from services.scheduler.core.order import queue
from services.scheduler.core.state.fifo_waits import PERIOD_S, FifoWaits
from services.scheduler.policies import load
from tests.scheduler.test_even_wait import give_way, go_on, submit, world_of
from tests.scheduler.world import Chaos, World, spec
from trainbus.operate.simulation import generate, report
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.traces import Job, Specs

HOUR = 3_600.0
ANY: frozenset[str] = frozenset()


def test_no_run_overtakes_another_in_the_virtual_queue() -> None:
    waits = FifoWaits()
    for at_s, (run_id, milli) in enumerate([("first", 4_000), ("wide", 8_000), ("small", 1_000)]):
        waits.add(ANY, 0, run_id, milli, float(at_s))
        waits.start_runs(ANY, 8_000, float(at_s))
    assert waits.longest_s(ANY, 0) == 1.0  # "wide" has waited since 1 s
    waits.remove(ANY, 0, "first")
    waits.start_runs(ANY, 8_000, 100.0)
    assert waits.longest_s(ANY, 0) == 99.0
    assert list(waits.pools[ANY][0].waiting) == ["small"]


def test_a_lower_priority_never_delays_a_higher_one() -> None:
    waits = FifoWaits()
    waits.add(ANY, -5, "scavenger", 8_000, 0.0)
    waits.start_runs(ANY, 8_000, 0.0)
    waits.add(ANY, 0, "own", 8_000, 100.0)
    waits.start_runs(ANY, 8_000, 480 * HOUR)
    assert not waits.pools[ANY][0].waiting
    waits.add(ANY, -5, "second", 8_000, 480 * HOUR)
    waits.start_runs(ANY, 8_000, 960 * HOUR)
    assert waits.longest_s(ANY, -5) == 480 * HOUR
    assert waits.longest_s(ANY, 0) == 480 * HOUR - 100


def test_a_run_that_never_fits_delays_no_other() -> None:
    waits = FifoWaits()
    waits.add(ANY, 0, "infeasible", 9_000, 0.0)
    waits.add(ANY, 0, "small", 1_000, 5.0)
    waits.start_runs(ANY, 8_000, 6.0)
    assert waits.longest_s(ANY, 0) == 1.0
    assert list(waits.pools[ANY][0].waiting) == ["infeasible"]


def test_a_long_wait_is_forgotten_after_two_periods() -> None:
    waits = FifoWaits()
    waits.add(ANY, 0, "first", 1_000, 0.0)
    waits.start_runs(ANY, 1_000, 1_000.0)
    for period in (1, 2):
        waits.add(ANY, 0, f"run-{period}", 9, period * PERIOD_S)
        waits.remove(ANY, 0, "first" if period == 1 else "run-1")
        waits.start_runs(ANY, 1_000, period * PERIOD_S)
        assert waits.longest_s(ANY, 0) == (1_000.0 if period == 1 else 0.0)


def test_the_virtual_queues_are_restored_from_a_snapshot() -> None:
    waits = FifoWaits()
    waits.add(frozenset({"H100"}), 3, "a", 1_000, 1.5)
    waits.add(ANY, 0, "b", 9_000, 2.5)
    waits.start_runs(frozenset({"H100"}), 8_000, 3.0)
    assert FifoWaits.from_state(json.loads(json.dumps(waits.to_state()))) == waits


def test_why_shows_the_wait_limit() -> None:
    world = world_of(1, load("default"))
    submit(world, "first")
    submit(world, "second")
    world.wait(60)
    assert (
        "it has waited 1 m, and after 2 h only short runs go before it"
        in (answer(world.cluster, "second", world.now, world.policy)["message"])
    )


def test_a_run_at_its_limit_goes_before_longer_ones_and_gets_a_reservation() -> None:
    world = world_of(8, load("default"))
    submit(world, "wide", 8)
    world.wait(4 * HOUR)
    submit(world, "short", 8)
    give_way(world, "wide")
    run, policy = world.run("wide"), world.policy
    assert queue.key_of(world.cluster, run, world.now, policy)[1] == 3
    world.wait(3 * HOUR)
    world.settle()
    assert queue.key_of(world.cluster, run, world.now, policy)[1] == 0.5
    assert world.cluster.index.overdue == {"wide"}


def test_runs_of_an_array_count_what_the_others_have_had() -> None:
    world = world_of(1, load("default"))
    submit(world, "part-1", name="sweep")
    submit(world, "part-2", name="sweep")
    world.wait(10)
    submit(world, "later", name="sweep")
    world.wait(9 * HOUR)
    world.exit("part-1")
    go_on(world)
    keys = {
        each: queue.key_of(world.cluster, world.run(each), world.now, world.policy)[1] for each in ("part-2", "later")
    }
    assert keys["part-2"] > keys["later"] == 0
    assert world.run("later").live


def test_splitting_a_run_does_not_pay() -> None:
    """Eight runs of an eighth, submitted in one go, are not done sooner than one."""

    def completed_s(seed: int, parts: int) -> float:
        trace = generate.jobs(200, 16, seed)
        submit_s, spec = trace.jobs[60].submit_s, Specs().get(16, user="splitter")
        split = [Job(f"split-{part}", submit_s, 8 * 4_000.0 / parts, spec) for part in range(parts)]
        jobs = tuple(sorted((*trace.jobs, *split), key=lambda job: job.submit_s))
        recorder = report.Recorder(replace(trace, jobs=jobs))
        simulate(recorder.trace, load("default"), listeners=(recorder.record_fact,))
        return max(recorder.records[job.run_id].completed_s for job in split) - submit_s

    ratios = [completed_s(seed, 8) / completed_s(seed, 1) for seed in range(1, 5)]
    assert sum(ratios) / len(ratios) > 1.0
    assert min(ratios) > 0.85


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), acts=st.integers(10, 120), above=st.integers(0, 2))
def test_any_history_keeps_the_invariants(seed: int, acts: int, above: int) -> None:
    """``World.step`` compares what is remembered from cycle to cycle with what is made anew."""
    attained = LeastAttained(levels_slot_s=(1, 4, 16, 64), lift_after_s=10, above_lifted=above)
    policy = Policy(
        order=Order(by=("priority", "least-attained"), skip=True, attained=attained),
        preemption=Preemption(by=("priority", "least-attained"), quantum_s=1),
        reserve=Reserve(backfill="easy"),
        elastic=Elastic(resize_interval_s=0.5, grow_anyway_s=5),
        faults=Faults(start_deadline_s=30),
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


def test_a_run_that_gets_slots_just_before_its_wait_limit_is_not_looked_at_again_in_ages() -> None:
    """Hardly any of what it attains counts: it would go down a level later than a clock can tell."""
    order = Order(by=("least-attained",), skip=True, attained=LeastAttained(lift_after_s=1_000))
    world = World(Policy(order=order, preemption=Preemption(by=("least-attained",))))
    world.join("n1", 1)
    world.accept("long", spec(1))
    world.settle()
    world.start("long")
    world.wait(4_000)
    world.drain("n1")
    world.settle()
    world.release("long")
    world.settle()
    world.wait(999.999999)
    world.undrain("n1")
    world.settle()
    world.start("long")
    world.accept("short", spec(1))
    world.settle()
    world.wait(1_000)
    world.settle()
    assert world.phase("short") == "queued"
