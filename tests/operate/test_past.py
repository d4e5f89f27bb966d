"""The past of small worlds: decided again, asked about, played on other nodes, and followed by a candidate policy."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import subjects
from contracts.base import Fact, run_id_for
from contracts.envelope import RawMessage
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.run import RunAccepted, RunPlaced, RunQueued, RunRejected, RunStaging, RunStopping, RunWaiting
from contracts.scheduling import Order, Policy, Pool, Pools, Preemption
from services.scheduler import policies
from services.scheduler.core.capacity.demand import capacity_fact, compute_demand
from services.scheduler.core.decisions import decision_record
from services.scheduler.core.explain.why import answer
from services.scheduler.core.state import codec
from tests.contracts.earlier_facts import as_version_1
from tests.scheduler.test_stage import BIRDS, PETS, staged, submit
from tests.scheduler.world import START, Chaos, World, spec
from trainbus.operate.history.history import History, NodeKind, offered
from trainbus.operate.history.log import Entry, LogError, line_of, parse
from trainbus.operate.history.past_state import PastState
from trainbus.operate.history.requests import RequestIndex
from trainbus.operate.history.shadow import Shadow
from trainbus.operate.history.verification import verify_log
from trainbus.operate.history.what_if import (
    Prices,
    Scenario,
    WhatIfError,
    like,
    parse_nodes,
    play,
    prices_of,
    recorded,
    submissions,
)
from trainbus.operate.simulation import generate
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.traces import at


def adopting(policy: Policy | None = None) -> World:
    """A world whose log begins with its policy."""
    world = World(policy)
    world.publish(PolicyAdopted(digest=world.policy.digest, policy=world.policy))
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
    counts, found = verify_log(log_of(lively(seed)))
    assert found == []
    assert counts.decisions == counts.same
    assert counts.unchecked <= counts.facts
    assert counts.cycles > 0


def test_a_log_of_version_1_is_decided_again_without_a_difference() -> None:
    for seed in range(5):
        log = lively(seed).log
        lines = [line_of(as_version_1(fact), sequence, time) for fact, sequence, time in log]
        for kind in ("trainbus.run.preempting.v1", "trainbus.policy.adopted.v1"):
            assert any(kind in line for line in lines)
        entries = list(parse(lines))
        assert [entry.fact for entry in entries] == [entry.fact for entry in parse(line_of(*each) for each in log)]
        assert verify_log(entries)[1] == []


@pytest.mark.parametrize("name", policies.names())
def test_schedulers_that_began_with_a_snapshot_decide_as_those_that_folded_everything(name: str) -> None:
    for seed in (1, 2):
        world, rng = adopting(policies.load(name)), random.Random(seed)
        chaos = Chaos(world, rng)
        for _ in range(100):
            chaos.act()
            if rng.random() < 0.1:
                world.cluster = codec.restore(codec.save(world.cluster))
        chaos.calm()
        assert verify_log(log_of(world))[1] == []


@pytest.mark.parametrize("name", policies.names())
def test_no_policy_decides_by_anything_that_is_not_in_the_log(name: str) -> None:
    policy = policies.load(name)
    for seed in (1, 2):
        world = lively(seed, 100, policy)
        counts, found = verify_log(log_of(world))
        assert found == []
        assert counts.decisions == counts.same > 10


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_policies_that_change_at_any_time_are_in_force_in_the_next_cycle(seed: int) -> None:
    """What a cycle has cached under the policy before changes no decision (``World.step``), nor does a replay."""
    changes = ["faults.start_deadline_s=2", "preemption.min_run_s=40", "preemption.time_slice_s=3", "place.by=spread"]
    presets = [policies.load(name) for name in policies.names()]
    world, rng = adopting(), random.Random(seed)
    chaos = Chaos(world, rng, policies=[*presets, *(policies.change(rng.choice(presets), [c]) for c in changes)])
    for _ in range(120):
        chaos.act()
    chaos.calm()
    assert verify_log(log_of(world))[1] == []


def test_a_policy_adopted_again_puts_runs_where_they_then_belong() -> None:
    """What is foreseen of those that wait is foreseen anew; what deciding keeps from before must follow it."""
    world = adopting(policies.load("shortest-predicted"))
    world.join("n1", 3)
    world.accept("other", spec(1, user="other"))
    world.accept("first", spec(1, user="slow"))
    world.accept("second", spec(1, user="quick"))
    world.accept("a", spec(3, user="slow"))
    world.accept("b", spec(3, user="quick"))
    world.settle()
    for name, lasts_s in (("second", 5), ("first", 50_000)):
        world.wait(lasts_s)
        world.start(name)
        world.commit(name, 1, final=True)
        world.exit(name)
        world.settle()
    assert world.run("a").predicted_s == world.run("b").predicted_s
    world.publish(PolicyAdopted(digest=world.policy.digest, policy=world.policy, after_sequence=1))
    assert world.run("a").predicted_s > world.run("b").predicted_s
    world.exit("other")
    world.settle()
    assert world.run("b").live
    assert verify_log(log_of(world))[1] == []


def test_runs_that_were_staged_are_staged_again_by_a_replay() -> None:
    world = adopting()
    for node_id in ("n1", "n2"):
        world.join(node_id, 2)
    for number, dataset_id in enumerate((PETS, BIRDS, PETS, BIRDS, PETS)):
        submit(world, f"r{number}", 1 + number % 2, dataset_id=dataset_id)
        world.step(number % 3)
    for number in (0, 3):
        world.settle()
        for node_id in world.facts(RunStaging, f"r{number}")[0].node_ids:
            staged(world, f"r{number}", node_id)
    world.wait(600)
    world.settle()
    counts, found = verify_log(log_of(world))
    assert found == []
    assert counts.by_fact["staging"] == len(world.facts(RunStaging)) >= 3


def test_infeasible_runs_are_explained_where_most_of_the_queue_is_skipped() -> None:
    world = adopting(policies.load("fifo-skip"))
    world.join("n1", 2)
    world.join("n2", 8)
    world.accept("holder", spec(2))
    world.settle()
    world.accept("filler", spec(8))
    world.settle()
    world.accept("small", spec(2))
    world.accept("large", spec(9))
    world.settle()
    world.step()  # all that they want is known
    assert world.run("large").waiting_code == "slots"
    home = world.run("filler").live[0].node_id
    world.lose(home)
    world.settle()
    assert world.run("large").waiting_code == "infeasible"
    assert verify_log(log_of(world))[1] == []


def doctored(log: list[Entry], place: int, **changes: Any) -> list[Entry]:
    """The log with some fields of one fact changed."""
    fact: Any = log[place].fact
    changed = log[place]._replace(fact=fact.model_copy(update=changes))
    return [*log[:place], changed, *log[place + 1 :]]


def first(log: list[Entry], kind: type[Fact], nth: int = 0) -> int:
    return [place for place, entry in enumerate(log) if isinstance(entry.fact, kind)][nth]


#: What is changed in which fact -> what is found: (kind, fields).
DOCTORED: dict[str, tuple[type[Fact], dict[str, Any], str, list[str]]] = {
    "a reason": (RunWaiting, {"code": "other"}, "content", ["code"]),
    "a number": (RunPlaced, {"failures_seen": 7}, "content", ["failures_seen"]),
    "seconds": (RunPlaced, {"run_s": 1.5}, "content", ["run_s"]),
    "the time it was decided at": (RunPlaced, {"decided_at": START + timedelta(seconds=1)}, "content", ["decided_at"]),
    "whom it makes room for": (RunStopping, {"preemptor": "rother"}, "content", ["preemptor"]),
    "what it would like": (RunPlaced, {"wanted_slots": 3}, "content", ["wanted_slots"]),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_log_doctored_by_one_field_shows_exactly_that_difference(name: str) -> None:
    kind, changes, expected, fields = DOCTORED[name]
    log = log_of(contended())
    assert verify_log(log)[1] == []
    place = first(log, kind)
    counts, found = verify_log(doctored(log, place, **changes))
    assert [(each.kind, each.sequence) for each in found] == [(expected, log[place].sequence)], found
    assert [each.field for each in found[0].fields] == fields
    assert [each.recorded for each in found[0].fields] == [
        value if isinstance(value, str | int | float) else value.isoformat().replace("+00:00", "Z")
        for value in changes.values()
    ]
    assert counts.same == counts.decisions - 1


def contended() -> World:
    """Two nodes, a low run that gives way, one that waits, and all that follows."""
    world = adopting()
    world.join("n1", 2)
    world.join("n2", 2)
    world.accept("low", spec(4))
    world.settle()
    world.wait(5)
    world.start("low")
    world.accept("high", spec(4, 5))
    world.accept("behind", spec(1))
    world.settle()
    world.wait(2)
    world.commit("low", 1)
    world.release("low")
    world.settle()
    world.wait(1)
    world.exit("high")
    world.settle()
    world.wait(60)
    world.settle()
    return world


def test_a_slot_given_otherwise_than_decided_is_found_where_it_was_given() -> None:
    log = log_of(contended())
    place = first(log, RunPlaced)
    fact = log[place].fact
    assert isinstance(fact, RunPlaced)
    swapped = tuple(member.model_copy(update={"slots": member.slots[::-1]}) for member in fact.members)
    found = verify_log(doctored(log, place, members=swapped))[1]
    assert found[0].sequence == log[place].sequence
    assert {each.field for each in found[0].fields} == {f"members.{m}.slots.{s}" for m in (0, 1) for s in (0, 1)}


def test_wrong_decisions_and_decisions_from_the_future_are_differences() -> None:
    log = log_of(contended())
    place = first(log, RunPlaced)
    fact = log[place].fact
    assert isinstance(fact, RunPlaced)
    assert fact.decision is not None
    # Somebody stops a run that nobody else wants to stop.
    stop = RunStopping(
        run_id="low", generation=1, reason="preempted", message="because", grace_s=1, decision=fact.decision
    )
    end = Entry(stop, log[-1].sequence + 1, log[-1].time, stop.subject)
    (extra,) = verify_log([*log, end])[1]
    assert (extra.kind, extra.sequence) == ("not decided", end.sequence)
    assert "run/low/placed/1" in extra.text
    later = fact.decision.model_copy(update={"at_sequence": 10_000})
    found = verify_log(doctored(log, place, decision=later))[1]
    assert [each.kind for each in found] == ["from the future"]
    strange = fact.decision.model_copy(update={"policy": "0" * 16})
    found = verify_log(doctored(log, place, decision=strange))[1]
    assert [each.kind for each in found] == ["unknown policy"]


def test_a_pass_published_in_part_is_no_difference_but_one_out_of_order_is() -> None:
    def run_cycle(limit: int | None) -> list[Entry]:
        world = adopting()
        world.join("n1", 2)
        for name in ("a", "b", "c"):
            world.accept(name, spec(1))
        world.step(limit)
        return log_of(world)

    counts, found = verify_log(run_cycle(2))
    assert (found, counts.decisions) == ([], 2)
    assert counts.unpublished == 3
    log = run_cycle(None)
    assert verify_log(log)[1] == []
    queued, placed = first(log, RunQueued), first(log, RunPlaced)
    run_id = log[placed].fact.run_id  # type: ignore[union-attr]
    assert log[queued].fact.run_id == run_id  # type: ignore[union-attr]
    swapped = list(log)
    swapped[queued], swapped[placed] = (
        log[placed]._replace(sequence=log[queued].sequence),
        log[queued]._replace(sequence=log[placed].sequence),
    )
    (found_there,) = verify_log(sorted(swapped, key=lambda entry: entry.sequence))[1]
    assert (found_there.kind, found_there.subject) == ("order", f"run.{run_id}.queued")


def test_what_cannot_be_read_counts_and_disturbs_nothing() -> None:
    world = contended()
    log = log_of(world)
    nonsense = Entry(None, log[-1].sequence + 1, world.now, "run.low.placed")
    assert verify_log([*log, nonsense])[1] == []


def test_older_facts_without_a_decision_record_are_counted() -> None:
    log = log_of(contended())
    old = [e if e.fact is None else e._replace(fact=stripped(e.fact)) for e in log]
    counts, found = verify_log(old)
    assert found == []
    assert counts.decisions == 0
    assert counts.unchecked > 5


def stripped(fact: Any) -> Any:
    return fact.model_copy(update={"decision": None}) if "decision" in type(fact).model_fields else fact


def test_wanted_nodes_are_decided_again() -> None:
    pool = Pool(name="burst", slots_per_node=2, max_nodes=4)
    world = adopting(Policy(pools=Pools(pools=(pool,))))

    def wanting() -> None:
        made = decision_record(world.cluster, world.now, world.policy)
        for each in compute_demand(world.cluster, world.now, world.policy):
            world.publish(capacity_fact(each, world.now, made))

    world.accept("large", spec(4))
    world.settle()
    for _ in range(3):
        world.wait(40)
        wanting()
    log = log_of(world)
    place = first(log, CapacityWanted)
    counts, found = verify_log(log)
    assert (found, counts.by_fact["wanted"]) == ([], len(world.facts(CapacityWanted)))
    (difference,) = verify_log(doctored(log, place, nodes=1))[1]
    assert [each.field for each in difference.fields] == ["nodes"]


BAD_LINES = {
    "no json": ("{", "line 1"),
    "no time": ('{"type": "trainbus.run.queued.v1", "sequence": 1, "data": {}}', "there is no 'time'"),
    "a field that is wrong": (
        '{"type": "trainbus.run.queued.v1", "sequence": 1, "time": "2026-01-01T00:00:00Z", "data": {"run_id": "r"}}',
        "next_generation",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_an_invalid_log_file_is_an_error_that_names_the_line(name: str) -> None:
    line, text = BAD_LINES[name]
    with pytest.raises(LogError, match=text):
        list(parse([line]))


def test_a_log_goes_forward() -> None:
    fact = RunQueued(run_id="r", next_generation=1)
    with pytest.raises(LogError, match="does not come after 2"):
        list(parse([line_of(fact, 2, START), line_of(fact, 1, START)]))


# -- answers ----------------------------------------------------------------------------------------


def asked(verb: str, body: dict[str, Any], event_id: str) -> RawMessage:
    headers = {"ce-id": event_id, "ce-source": "test"}
    return RawMessage(subjects.request(verb), json.dumps(body).encode(), headers, "REQUESTS", 1, START)


COMMAND = {"name": "hello", "command": ["true"]}


def test_answers_are_made_again_from_their_requests() -> None:
    messages = [
        asked("train", COMMAND, "good"),
        asked("train", {**COMMAND, "slotz": 2}, "bad"),
        asked("restore", {"run_id": run_id_for("test", "good"), "step": 3}, "again"),
        asked("cancel", {"run_id": "r"}, "other"),
        RawMessage("train.requested", b"no json", {}, "REQUESTS", 2, START),
    ]
    requests = RequestIndex(messages)
    assert len(requests) == 3
    world = adopting()
    for name in ("good", "bad", "again"):
        (answer,) = requests.answers(world.cluster, run_id_for("test", name))
        world.publish(answer)
    log = log_of(world)
    assert [type(entry.fact) for entry in log[1:]] == [RunAccepted, RunRejected, RunRejected]
    counts, found = verify_log(log, requests)
    assert (found, counts.answers, counts.unasked) == ([], 3, 0)
    rejected = doctored(log, 2, reason="no")
    (difference,) = verify_log(rejected, requests)[1]
    assert (difference.kind, [each.field for each in difference.fields]) == ("answer", ["reason"])
    assert verify_log(rejected)[0].unasked == 3
    swapped = [*log[:1], log[1]._replace(fact=RunRejected(run_id=log[1].fact.run_id, reason="no"))]  # type: ignore
    (difference,) = verify_log(swapped, requests)[1]
    assert (difference.fields[0].recorded, difference.fields[0].replayed) == ("rejected", "accepted")


# -- why, then --------------------------------------------------------------------------------------


def test_why_in_the_past_is_the_answer_of_that_time() -> None:
    world = adopting()
    said: list[tuple[datetime, str, dict[str, Any]]] = []

    def ask(*run_ids: str) -> None:
        world.wait(1)
        for run_id in run_ids:
            said.append((world.now, run_id, answer(world.cluster, run_id, world.now, world.policy)))
        world.wait(1)

    world.join("n1", 2)
    world.accept("first", spec(2))
    world.accept("second", spec(2))
    world.accept("huge", spec(9))
    world.settle()
    ask("first", "second", "huge")
    world.start("first")
    world.wait(30)
    world.settle()
    ask("first", "second", "huge")
    world.cancel("second")
    world.settle()
    world.exit("first")
    world.settle()
    ask("first", "second", "huge")
    log = log_of(world)
    assert len({each["code"] for _, _, each in said}) >= 4
    for then_at, run_id, expected in said:
        then = PastState(then_at)
        for entry in log:
            if not then.feed(entry):
                break
        found = then.why(run_id)
        assert {name: found[name] for name in expected} == expected
        assert found["policy"]["digest"] == world.policy.digest


# -- other nodes, other policies ----------------------------------------------------------------------


def lived(jobs: int = 60, gpus: int = 16, policy: Policy | None = None) -> list[Entry]:
    """The log of a small simulated cluster."""
    lines: list[str] = []
    trace = generate.jobs(jobs, gpus, 7, per_node=8)
    simulate(
        trace,
        policy or Policy(name="fifo", order=Order(by=("submitted",)), preemption=Preemption(by=())),
        listeners=(lambda fact, sequence, now_s: lines.append(line_of(fact, sequence, at(now_s))),),
    )
    return list(parse(lines))


def history_of(log: list[Entry], start: datetime | None = None, end: datetime | None = None) -> History:
    history = History(start, end)
    for entry in log:
        history.feed(entry)
    history.close()
    return history


def test_the_past_played_is_the_past() -> None:
    """Where nothing is preempted, the recorded work on the same nodes by the same policy gives the same waits."""
    history = history_of(lived())
    assert history.policy is not None
    wanted = submissions(history, 60.0)
    prices = Prices({"gpu": 2.0})
    was = recorded(history, "fifo", prices)
    as_it_was = Scenario("played", history.first_nodes, history.policy, history.nodes_until_last())
    played, _ = play(as_it_was, wanted, prices, resume_cost_s=60.0)
    assert (played.jobs, played.completed, wanted.assumed) == (60, 60, 0)
    for name in ("avg_wait_s", "p50_wait_s", "p99_wait_s", "max_wait_s", "avg_jct_s", "makespan_s", "utilisation"):
        assert getattr(played, name) == pytest.approx(getattr(was, name), rel=1e-6, abs=1e-3), name
    assert played.preemptions == was.preemptions == 0
    assert was.cost == pytest.approx(2.0 * 16 * was.makespan_s / 3600, rel=1e-6)
    assert played.cost == pytest.approx(was.cost, rel=1e-6)


def test_more_nodes_wait_less_and_cost_more_by_the_hour() -> None:
    history = history_of(lived())
    assert history.policy is not None
    wanted, prices = submissions(history, 60.0), Prices({"gpu": 2.0})
    base, _ = play(Scenario("base", history.nodes, history.policy), wanted, prices, resume_cost_s=60.0)
    more = history.nodes + like(parse_nodes("6x8", "more"), history.nodes)
    wide, _ = play(Scenario("more", more, history.policy), wanted, prices, resume_cost_s=60.0)
    assert base.avg_wait_s > 0
    assert wide.avg_wait_s < base.avg_wait_s / 2
    assert wide.slots == base.slots + 48
    assert wide.cost_per_used_slot_h is not None
    assert base.cost_per_used_slot_h is not None
    assert wide.cost_per_used_slot_h > base.cost_per_used_slot_h


def test_a_stretch_in_the_middle_carries_what_was_going_on() -> None:
    log = lived()
    whole = history_of(log)
    middle = whole.start + (whole.end - whole.start) / 4
    part = history_of(log, middle)
    assert part.carried
    assert len(part.carried) + len(part.submitted) < len(part.runs)
    wanted = submissions(part, 60.0)
    assert {job.submit_s for job in wanted.jobs if job.run_id not in wanted.counted} == {0.0}
    # What a carried run has left is what it had from then on.
    everything = {run.run_id: run.work_slot_s for run in whole.runs.values()}
    assert all(run.work_slot_s <= everything[run.run_id] + 1e-6 for run in part.carried)
    used = sum(run.work_slot_s for run in part.runs.values())
    assert part.totals.used_slot_s == pytest.approx(used)


def test_nodes_that_come_and_go_are_played_as_they_came_and_went() -> None:
    world = adopting()
    world.join("n1", 2)
    world.accept("a", spec(2))
    world.settle()
    world.wait(100)
    world.join("n2", 2)
    world.accept("b", spec(2))
    world.settle()
    world.join("n1", 2, "2", running=(("a", 1),))  # its agent starts anew and takes its ranks up again
    world.wait(100)
    world.drain("n2")
    world.settle()
    world.wait(10)
    world.release("b")
    world.settle()
    world.wait(90)
    world.undrain("n2")
    world.settle()
    world.wait(50)
    world.lose("n2")
    world.settle()
    world.wait(50)
    world.accept("c", spec(1))
    world.exit("a")
    world.settle()
    history = history_of(log_of(world))
    events = [(at_s, type(fact).__name__, fact.node_id) for at_s, fact in history.nodes_until_last()]
    assert events == [
        (0.0, "NodeJoined", "n1"),
        (100.0, "NodeJoined", "n2"),
        (200.0, "NodeDraining", "n2"),
        (300.0, "NodeJoined", "n2"),
        (350.0, "NodeLost", "n2"),
    ]
    assert sum(history.totals.offered_slot_s.values()) == pytest.approx(2 * 400 + 2 * 250)
    slot_s, most = offered((), history.nodes_until_last(), 400.0)
    assert (sum(slot_s.values()), most) == (2 * 400 + 2 * 250, 4)
    policy = history.policy
    assert policy is not None
    as_it_was = Scenario("played", (), policy, history.nodes_until_last())
    played, recorder = play(as_it_was, submissions(history, 60.0), Prices({}), resume_cost_s=60.0)
    assert [span.start_s for span in recorder.records["a"].spans] == [0.0]
    assert played.never == 0
    part = history_of(log_of(world), START + timedelta(seconds=150))
    assert [node.node_id for node in part.first_nodes] == ["n1", "n2"]


def test_what_starting_again_has_cost_is_no_work() -> None:
    """Recorded with a cost of 60 s, played with as much: the same policy on the same nodes comes to nearly the same."""
    history = history_of(lived(policy=policies.load("least-attained")))
    restarted = [run for run in history.submitted if run.restart_slots]
    assert len(restarted) >= 3
    wanted = {job.run_id: job for job in submissions(history, 60.0).jobs}
    true_s = {job.run_id: job.duration_s for job in generate.jobs(60, 16, 7, per_node=8).jobs}
    for run in restarted:
        assert wanted[run.run_id].duration_s == pytest.approx(true_s[run.run_id], abs=1.0)
    assert history.resume_cost_s() == 60.0


def test_how_long_starting_again_takes_is_measured() -> None:
    world = adopting()
    world.join("n1", 1)
    world.accept("r", spec(1))
    for _ in range(6):
        world.settle()
        world.wait(7)
        world.start("r")
        world.wait(100)
        world.commit("r", len(world.log))
        world.join("n1", 1, str(len(world.log)))
    assert history_of(log_of(world)).resume_cost_s() == 7.0


def test_runs_that_go_on_are_taken_to_need_what_others_needed() -> None:
    log = lived()
    cut = log[: len(log) * 2 // 3]
    history = history_of(cut)
    going_on = [run for run in history.submitted if not run.outcome]
    wanted = submissions(history, 60.0)
    assert going_on
    assert wanted.assumed == len(going_on)
    assert all(job.duration_s > 0.001 for job in wanted.jobs)


def test_nodes_as_they_are_typed() -> None:
    nodes = parse_nodes("2x8:H100, 1x4:A100@spot")
    assert [(n.slots, n.accelerator, n.labels) for n in nodes] == [
        (8, "H100", {}), (8, "H100", {}), (4, "A100", {"pool": "spot"}),
    ]  # fmt: skip
    assert len({n.node_id for n in nodes}) == 3
    for wrong in ("", "8", "x8", "8x", "2x8:"):
        with pytest.raises(WhatIfError):
            parse_nodes(wrong)
    pool = Pool(name="spot", accelerator="A100", price_per_slot_hour=0.5)
    prices = prices_of([Policy(pools=Pools(pools=(pool,)))], ["H100=3"])
    assert (
        prices.cost({NodeKind("spot", "A100"): 7200.0, NodeKind("", "H100"): 3600.0, NodeKind("", "V100"): 3600.0})
        == 4.0
    )
    for wrong in ("H100", "H100=x", "=3", "H100=-1"):
        with pytest.raises(WhatIfError):
            prices_of([], [wrong])


# -- a candidate beside ------------------------------------------------------------------------------

STRICT = Policy(name="fifo", order=Order(by=("submitted",)), preemption=Preemption(by=()))
SKIPPING = Policy(name="fifo-skip", order=Order(by=("submitted",), skip=True), preemption=Preemption(by=()))


def crossroads() -> World:
    """A run of two slots holds up a small one that would fit; both run in the end."""
    world = adopting(STRICT)
    world.join("n1", 3)
    world.accept("a", spec(2))
    world.settle()
    world.wait(1)
    world.start("a")
    world.accept("wide", spec(2))
    world.accept("small", spec(1))
    world.settle()
    world.wait(10)
    return world


def test_a_shadow_publishes_what_it_would_have_done_and_when() -> None:
    world = crossroads()
    shadow = Shadow(SKIPPING, Policy())
    said = shadow.process(log_of(world))
    said += shadow.process_idle(world.now)
    placed = {each.fact.run_id: each for each in said if isinstance(each.fact, RunPlaced)}
    assert set(placed) == {"a", "small"}
    assert placed["small"].subject == f"shadow.{SKIPPING.digest}.run.small.placed"
    assert placed["small"].fact.decision.policy == SKIPPING.digest  # type: ignore[attr-defined]
    assert list(shadow.result.only_candidate) == [("small", 1)]
    assert shadow.result.candidate_starts_while == {"priority": 1}
    before = len(world.log)
    world.exit("a")
    world.settle()
    world.wait(1)
    more = shadow.process(log_of(world)[before:]) + shadow.process_idle(world.now)
    assert not any(isinstance(each.fact, RunPlaced) and each.fact.run_id == "small" for each in more), "said once"
    starts = {each.run_id: each for each in shadow.result.starts}
    assert starts["small"].earlier_s == pytest.approx(10.0)
    assert starts["wide"].earlier_s == pytest.approx(0.0)
    assert shadow.result.only_candidate == {}
    assert 0 < shadow.result.agreeing < shadow.result.points


def test_a_shadow_of_the_policy_in_force_agrees_at_every_point() -> None:
    for seed in range(5):
        world = lively(seed, 80)
        shadow = Shadow(world.policy, Policy())
        log = log_of(world)
        for start in range(0, len(log), 7):
            shadow.process(log[start : start + 7])
        shadow.process_idle(world.now)
        assert shadow.result.points > 5
        assert shadow.result.agreeing == shadow.result.points
        assert shadow.result.only_candidate == {}


def test_a_shadow_that_starts_again_publishes_nothing_twice() -> None:
    world = crossroads()
    log = log_of(world)
    first_one = Shadow(SKIPPING, Policy())
    said = first_one.process(log) + first_one.process_idle(world.now)
    again = Shadow(SKIPPING, Policy(), [each.message_id for each in said])
    again.catch_up(log)
    assert again.process_idle(world.now) == []
    assert list(again.result.only_candidate) == [("small", 1)]
