"""Quotas: what is owed, lent and taken back; ceilings that nobody gets over; in a world, whatever happens in it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events.capacity import PolicyAdopted
from contracts.events.node import NodeJoined
from contracts.events.run import RunStopping, RunWaiting
from contracts.scheduling import Admit, FairShare, Order, Policy, Preemption, Quota
from services.scheduler.core.decide import run_steps
from services.scheduler.core.explain.why import answer
from services.scheduler.core.fold import fold
from services.scheduler.core.quota.quotas import Quotas
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.usage import TeamUsage, lineage
from tests.scheduler.world import START, World, spec

HOUR_S = 3600.0


def run_of(team: str | None, slots: int = 1, **more: Any) -> Run:
    return Run("r", spec(slots, team=team, **more), 1, START)


def quotas_of(admit: Admit, uses: dict[tuple[str, str], float], **policy: Any) -> Quotas:
    """``uses``: (team, kind of accelerator) -> slots that it has now."""
    ledger = TeamUsage()
    for (team, kind), slots in uses.items():
        ledger.change(team, f"user of {team}", kind, slots, START.timestamp())
    return Quotas(Policy(admit=admit, **policy), ledger, START.timestamp())


NESTED = Admit(
    quotas=(
        Quota(team="research", slots=100, ceiling=120),
        Quota(team="research/vision", slots=60),
        Quota(team="research/nlp", slots=40, ceiling=50),
        Quota(team="sales", accelerator="h100", slots=10),
        Quota(team="sales", slots=20, ceiling=30),
    )
)


@pytest.mark.parametrize(
    ("team", "slots", "kind", "uses", "room"),
    [
        pytest.param("research/vision", 60, "h100", {}, 120, id="no ceiling of its own: its parent's binds it"),
        pytest.param("research/nlp", 50, "h100", {}, 50, id="its own ceiling"),
        pytest.param("research/nlp", 20, "h100", {("research/vision", "a100"): 100}, 20, id="what siblings leave"),
        pytest.param("sales", 30, "h100", {("research", "h100"): 120}, 30, id="others do not count"),
        pytest.param("sales", 30, "h100", {("sales", "a100"): 25}, 5, id="all kinds together"),
        pytest.param("other", 10**6, "h100", {}, float("inf"), id="nothing is said: whatever is idle"),
    ],
)
def test_room(team: str, slots: int, kind: str, uses: dict[tuple[str, str], float], room: float) -> None:
    quotas = quotas_of(NESTED, uses)
    assert quotas.room(run_of(team), kind) == room
    refusal = quotas.allows(run_of(team), slots, kind)
    assert (refusal is None) == (slots <= room)
    if refusal is not None:
        assert (refusal.code, refusal.bound, refusal.room, refusal.needs) == ("ceiling", "team", room, slots)


def test_ceilings_of_users_and_runs() -> None:
    admit = Admit(max_slots_per_user=8, max_slots_per_run=6)
    quotas = quotas_of(admit, {})
    ann, nobody = run_of("a", user="ann"), run_of("a")
    assert quotas.room(ann, "h100") == 6
    assert quotas.room(ann, "h100", held=4) == 2
    quotas.charge(ann, 5, "h100")
    assert quotas.room(ann, "a100") == 3
    refusal = quotas.allows(ann, 4, "a100")
    assert refusal is not None
    assert (refusal.bound, refusal.name, refusal.used, refusal.limit) == ("user", "ann", 5, 8)
    quotas.charge(nobody, 6, "h100")
    assert quotas.room(run_of("b"), "h100") == 2
    quotas.charge(nobody, -6, "h100")
    assert quotas.room(run_of("b"), "h100") == 6


@pytest.mark.parametrize(
    ("team", "kind", "uses", "owed", "borrowed"),
    [
        pytest.param("research/vision", "h100", {}, 60, 0, id="all of its quota"),
        pytest.param("research/vision", "h100", {("research/vision", "h100"): 70}, 0, 10, id="more than it"),
        pytest.param(
            "research/vision", "h100", {("research/nlp", "h100"): 50}, 50, 0, id="what is left of its parent's"
        ),
        pytest.param("sales", "h100", {("sales", "h100"): 4, ("sales", "a100"): 9}, 6, 0, id="its quota of the kind"),
        pytest.param("sales", "a100", {("sales", "h100"): 4, ("sales", "a100"): 9}, 7, 0, id="or of all kinds"),
        pytest.param("other", "h100", {("other", "h100"): 3}, 0, 3, id="nothing is owed to it"),
        pytest.param("research/audio", "h100", {("research/audio", "h100"): 3}, 97, 0, id="its parent's"),
    ],
)
def test_owed_and_borrowed(
    team: str, kind: str, uses: dict[tuple[str, str], float], owed: float, borrowed: float
) -> None:
    quotas = quotas_of(NESTED, uses)
    assert quotas.owed(team, kind) == owed
    assert quotas.borrowed(team, kind) == borrowed


def test_no_team_borrows_where_nothing_is_owed() -> None:
    quotas = quotas_of(Admit(quotas=(Quota(team="a", accelerator="h100", slots=4),)), {("b", "a100"): 3})
    assert quotas.borrowed("b", "a100") == 0
    assert quotas.within(run_of("b"), 9, "a100")
    assert not quotas.within(run_of("b"), 9, "h100")


@pytest.mark.parametrize(
    ("waiter", "slots", "holder", "uses", "verdict"),
    [
        pytest.param("sales", 10, "other", {"other": 5}, True, id="from one who is owed nothing"),
        pytest.param("sales", 11, "other", {"other": 5}, None, id="no gang that is more than the quota"),
        pytest.param("sales", 5, "research/nlp", {"sales": 6, "research/nlp": 101}, None, id="nor with what it has"),
        pytest.param(
            "sales", 5, "research/nlp", {"research/nlp": 45, "research/vision": 50}, None, id="its parent lends"
        ),
        pytest.param(
            "sales", 5, "research/nlp", {"research/nlp": 45, "research/vision": 60}, True, id="both have more"
        ),
        pytest.param("sales", 5, "research/vision", {"research/nlp": 50, "research/vision": 55}, None, id="it has not"),
        pytest.param("research/vision", 5, "research/nlp", {"research/nlp": 45}, True, id="within a team, parts"),
        pytest.param(
            "research/audio", 5, "research/nlp", {"research/nlp": 35}, False, id="but not a part owed nothing"
        ),
        pytest.param("research", 5, "research/nlp", {"research/nlp": 35}, False, id="nor the whole from a part"),
        pytest.param("research/nlp", 5, "research", {"research": 35}, True, id="though the part from the whole"),
        pytest.param("other", 5, "sales", {"sales": 8}, False, id="who would borrow takes nothing that is owed"),
        pytest.param("other", 5, "sales", {"sales": 18}, None, id="but may take what is borrowed, by standing"),
        pytest.param("sales", 5, "sales", {"sales": 8}, None, id="within a team it is no matter of quotas"),
    ],
)
def test_who_takes_back_from_whom(
    waiter: str, slots: float, holder: str, uses: dict[str, float], verdict: bool | None
) -> None:
    quotas = quotas_of(NESTED, {(team, "h100"): used for team, used in uses.items()})
    assert quotas.verdict(run_of(waiter), slots, run_of(holder), "h100") is verdict


def test_what_cannot_be_taken_back_is_not_lent() -> None:
    fixed = {"scheduling": {"preemptible": False}}
    quotas = quotas_of(NESTED, {("research/vision", "h100"): 58})
    assert quotas.room(run_of("research/vision", **fixed), "h100") == 2
    assert quotas.room(run_of("research/vision"), "h100") == 62
    assert quotas.room(run_of("other", **fixed), "h100") == 0
    refusal = quotas.allows(run_of("other", **fixed), 1, "h100")
    assert refusal is not None
    assert (refusal.code, refusal.bound) == ("quota", "borrowed")
    assert Quotas(Policy(), TeamUsage(), 0.0).room(run_of("other", **fixed), "h100") == float("inf")


def test_slot_hours_are_refused_when_too_little_is_left_to_get_going() -> None:
    admit = Admit(quotas=(Quota(team="a", slot_hours=10, period_h=24),))
    ledger = TeamUsage()
    at = START.timestamp()
    ledger.change("a", None, "h100", 9, at)
    quotas = Quotas(Policy(admit=admit), ledger, at + HOUR_S)
    # One slot-hour is left; each slot needs 90 s of it, to restart and to release it.
    assert quotas.room(run_of("a"), "h100") == pytest.approx(40)
    assert quotas.allows(run_of("a"), 40, "h100") is None
    refusal = quotas.allows(run_of("a"), 41, "h100")
    assert refusal is not None
    assert (refusal.code, refusal.bound, refusal.until) == ("quota", "hours", at + 24 * HOUR_S)
    assert quotas.wake_at == at + 24 * HOUR_S


def test_slot_hours_that_do_not_last_are_noticed_before_they_are_used_up() -> None:
    quota = Quota(team="a", slot_hours=10, period_h=24)
    policy = Policy(admit=Admit(quotas=(quota,)))
    ledger, at = TeamUsage(), START.timestamp()
    ledger.change("a/b", None, "h100", 4, at)
    run = Run("r", spec(4, team="a/b", grace_s=30), 1, START)
    quotas = Quotas(policy, ledger, at)
    assert quotas.spent_out() == []
    quotas.count([(run, 4, "h100")])
    (out,) = quotas.spent_out()
    assert (out.run_ids, out.at, out.period_ends_at) == (("r",), at + 2.5 * HOUR_S - 30, at + 24 * HOUR_S)
    enough = Policy(admit=Admit(quotas=(quota.model_copy(update={"slot_hours": 97.0}),)))
    quotas = Quotas(enough, ledger, at)
    quotas.count([(run, 4, "h100")])
    assert quotas.spent_out() == []


# -- in a world -------------------------------------------------------------------------------------------


class Teams(World):
    """A world with teams and accelerators, under an adopted policy."""

    def __init__(self, policy: Policy, nodes: int = 1, slots: int = 8, accelerator: str = "h100") -> None:
        super().__init__(policy)
        self.publish(PolicyAdopted(digest=policy.digest, policy=policy))
        for index in range(nodes):
            self.add(f"{accelerator}-{index}", slots, accelerator)

    def add(self, node_id: str, slots: int, accelerator: str) -> None:
        fact = {"address": "h", "slots": slots, "lease_ttl_s": 3, "accelerator": accelerator}
        self.publish(NodeJoined.model_validate({"node_id": node_id, "incarnation": node_id, **fact}))

    def submit(self, run_id: str, team: str | None, slots: Any = 1, **more: Any) -> None:
        self.accept(run_id, spec(slots, team=team, **more))
        self.settle()

    def placed(self) -> set[str]:
        return {run_id for run_id, run in self.cluster.runs.items() if run.live and run.stopping is None}

    def stopping(self) -> set[str]:
        return {run_id for run_id, run in self.cluster.runs.items() if run.live and run.stopping is not None}

    def let_go(self) -> None:
        """Release the slots of all runs that were asked to."""
        for run_id in sorted(self.stopping()):
            self.release(run_id)
        self.settle()

    def pass_time(self, until: datetime) -> None:
        """Advance the clock; cycles run when they are due, and agents release slots within the grace period."""
        for _ in range(200):
            self.settle()
            wake_at = run_steps(self.cluster, self.now, self.policy).wake_at
            due = {run_id: self.run(run_id).stopping_at + timedelta(seconds=20) for run_id in self.stopping()}
            next_at = min([until, *due.values(), *([wake_at] if wake_at is not None else [])])
            self.now = max(self.now, next_at)
            check_limits(self)
            gone = [run_id for run_id, at in due.items() if at <= self.now]
            for run_id in gone:
                self.release(run_id)
            self.settle()
            check_limits(self)
            if self.now >= until:
                return
        raise AssertionError(f"time stands still at {self.now}: {self.log[-6:]}")

    def why(self, run_id: str) -> tuple[str, str]:
        said = answer(self.cluster, run_id, self.now, self.policy)
        return said["code"], said["message"]


LENT = Policy(admit=Admit(quotas=(Quota(team="a", slots=6), Quota(team="b", slots=2))), order=Order(skip=True))


def test_idle_slots_are_lent_and_come_back_within_one_grace_time() -> None:
    world = Teams(LENT)
    for index in range(8):
        world.submit(f"b{index}", "b")
    assert len(world.placed()) == 8
    world.submit("a0", "a", 6)
    assert len(world.stopping()) == 6
    stop = world.facts(RunStopping)[0]
    assert (stop.preemptor, stop.grace_s) == ("a0", 30)
    assert "gets back slots that it is owed" in stop.message
    world.let_go()
    assert world.placed() >= {"a0"}
    assert len(world.placed()) == 3
    # They do not get them back by waiting.
    assert len(world.cluster.queued) == 6
    assert not world.stopping()


def test_idle_slots_are_not_lent_while_their_owner_gets_the_rest_back() -> None:
    world = Teams(LENT)
    world.submit("c0", "c", 3)
    world.submit("c1", "c", 3)
    world.submit("a0", "a", 6)
    assert len(world.stopping()) == 2
    # Two slots are idle; who would borrow them could not keep them.
    world.submit("b0", "b", 3)
    world.submit("c2", "c", 1)
    assert "c2" not in world.placed()
    world.release("c0")
    world.settle()
    assert "c2" not in world.placed()
    world.let_go()
    # What is left over is lent again.
    assert world.placed() == {"a0", "c2"}


def test_only_as_much_is_taken_as_was_borrowed() -> None:
    world = Teams(LENT)
    for index in range(8):
        world.submit(f"b{index}", "b")
    for index in range(8):
        world.submit(f"a{index}", "a")
    assert len(world.stopping()) == 6
    world.let_go()
    assert sum(run_id.startswith("a") for run_id in world.placed()) == 6
    assert sum(run_id.startswith("b") for run_id in world.placed()) == 2
    assert not world.settle()


def test_priority_does_not_keep_what_is_borrowed_nor_take_what_is_owed() -> None:
    world = Teams(LENT)
    for index in range(8):
        world.submit(f"b{index}", "b", priority=9)
    world.submit("a0", "a", 6)
    world.let_go()
    assert "a0" in world.placed()
    world.submit("b9", "b", priority=10)
    assert not world.stopping() & {"a0"}
    # Within its team priority counts, and nothing else happens.
    assert len(world.stopping()) == 1


def test_entitled_runs_precede_borrowers() -> None:
    world = Teams(LENT, slots=8)
    world.submit("a0", "a", 8)
    assert world.placed() == {"a0"}
    world.accept("c0", spec(2, team="c", priority=9))
    world.accept("b0", spec(2, team="b"))
    world.accept("b1", spec(6, team="b"))
    world.settle()
    world.exit("a0")
    world.commit("a0", 1, final=True)
    world.settle()
    assert world.placed() >= {"b0"}


def test_a_ceiling_is_kept_and_explained() -> None:
    world = Teams(Policy(admit=Admit(quotas=(Quota(team="vision", accelerator="h100", ceiling=4),))))
    world.submit("v0", "vision", 3)
    world.submit("v1", "vision/faces", 3)
    world.submit("v2", "vision", 6)
    world.submit("o0", "other", 5)
    assert world.placed() == {"v0", "o0"}
    code, text = world.why("v1")
    assert code == "ceiling"
    assert text == (
        "needs at least 3 slots, but team vision has 3 of the 4 slots of h100 that it may have at once; run v0 has "
        "them; it may start when 2 slots of them are given back, or with slots.min of at most 1 it may start now"
    )
    code, text = world.why("v2")
    assert code == "ceiling"
    assert "it never runs as it is" in text
    assert [fact.code for fact in world.facts(RunWaiting, "v1")] == ["ceiling"]


def test_another_kind_of_accelerator_will_do() -> None:
    world = Teams(Policy(admit=Admit(quotas=(Quota(team="a", accelerator="h100", ceiling=4),))))
    world.add("old", 8, "a100")
    world.submit("r0", "a", 4)
    world.submit("r1", "a", 6)
    world.submit("r2", "a", 4)
    kinds = {run_id: next(iter(world.run(run_id).parts)) for run_id in world.placed()}
    assert kinds["r1"] == "old"
    assert len(kinds) == 2
    assert world.why("r2")[0] == "slots"


def test_elastic_runs_take_no_more_than_they_may_have() -> None:
    world = Teams(Policy(admit=Admit(max_slots_per_run=5, max_slots_per_user=6)))
    world.submit("r0", "a", {"min": 1, "max": 8}, user="ann")
    world.submit("r1", "a", {"min": 1, "max": 8}, user="ann")
    world.submit("r2", "a", {"min": 1, "max": 8}, user="bob")
    assert [world.run(f"r{index}").slot_count for index in range(3)] == [5, 1, 2]
    world.commit("r0", 1, final=True)
    for run_id in ("r0", "r1", "r2"):
        world.start(run_id)
    world.exit("r0")
    world.settle()
    world.wait(100)
    world.settle()
    world.let_go()
    assert world.run("r1").slot_count + world.run("r2").slot_count == 8
    assert world.run("r1").slot_count <= 5 >= world.run("r2").slot_count


def test_slot_hours_stop_runs_in_time_and_the_next_period_starts_them() -> None:
    quota = Quota(team="a", slot_hours=8, period_h=24)
    world = Teams(Policy(admit=Admit(quotas=(quota,))))
    world.now = datetime(2026, 1, 1, 1, tzinfo=UTC)
    world.submit("r0", "a", 8, grace_s=60)
    world.start("r0")
    world.wait(31 * 60)
    world.settle()
    wake_at = run_steps(world.cluster, world.now, world.policy).wake_at
    assert wake_at == datetime(2026, 1, 1, 1, 59, tzinfo=UTC)
    world.now = wake_at
    world.settle()
    assert world.stopping() == {"r0"}
    assert world.facts(RunStopping)[0].message == (
        "team a has used its 8 slot-hours of this period; the next one begins at 2026-01-02T00:00:00+00:00"
    )
    world.wait(60)
    world.let_go()
    assert world.cluster.usage.spent_slot_h("a", None, 24, world.now.timestamp()) == pytest.approx(8)
    code, text = world.why("r0")
    assert code == "quota"
    assert text == (
        "needs at least 8 slots, but team a has used 8 of its 8 slot-hours in this period, which ends at "
        "2026-01-02T00:00:00+00:00; the next period begins at 2026-01-02T00:00:00+00:00"
    )
    wake_at = run_steps(world.cluster, world.now, world.policy).wake_at
    assert wake_at == datetime(2026, 1, 2, tzinfo=UTC)
    world.now = wake_at
    world.settle()
    assert world.placed() == {"r0"}


TEAMS = ["a", "a/x", "a/y", "b", "c", None]


def some_policy(rng: random.Random) -> Policy:
    """Any quotas whose guarantees there are slots for."""
    quotas = []
    left = 12
    for team in rng.sample(["a", "a/x", "b", ""], rng.randint(0, 4)):
        slots = rng.choice([None, rng.randint(0, min(left, 6))]) if team else None
        left -= slots or 0
        ceiling = rng.choice([None, rng.randint(slots or 0, 10)])
        kind, hours = rng.choice([None, "h100"]), rng.choice([None, rng.uniform(0.5, 5.0)])
        quotas.append(Quota(team=team, accelerator=kind, slots=slots, ceiling=ceiling, slot_hours=hours, period_h=2))
    by: Any = rng.choice([("priority",), ("fair-share",), ("priority", "fair-share"), ("submitted",)])
    return Policy(
        admit=Admit(
            quotas=tuple(quotas),
            max_slots_per_user=rng.choice([None, rng.randint(1, 8)]),
            max_slots_per_run=rng.choice([None, rng.randint(1, 8)]),
        ),
        order=Order(by=by, skip=rng.random() < 0.5),
        fair_share=FairShare(weights={"a": 2}, half_life_s=600),
        preemption=Preemption(by=rng.choice([by, ("priority",)]), time_slice_s=rng.choice([None, 60.0])),
    )


def check_limits(world: Teams) -> None:
    """Recomputed from the runs, not from the ledger."""
    teams: dict[tuple[str, str | None], float] = {}
    users: dict[str, float] = {}
    for run in world.cluster.runs.values():
        for part in run.live:
            kind = world.cluster.nodes[part.node_id].accelerator
            users[run.spec.user or ""] = users.get(run.spec.user or "", 0) + len(part.slots)
            for name in lineage(run.spec.team):
                for key in ((name, kind), (name, None)):
                    teams[key] = teams.get(key, 0) + len(part.slots)
        if world.policy.admit.max_slots_per_run is not None:
            assert run.slot_count <= world.policy.admit.max_slots_per_run
    for quota in world.policy.admit.quotas:
        if quota.ceiling is not None:
            assert teams.get((quota.team, quota.accelerator), 0) <= quota.ceiling
        if quota.slot_hours is not None:
            spent = world.cluster.usage.spent_slot_h(quota.team, quota.accelerator, 2, world.now.timestamp())
            assert spent <= quota.slot_hours + 1e-6
    for used in users.values():
        assert used <= (world.policy.admit.max_slots_per_user or 10**6)
    for (name, kind), used in teams.items():
        assert world.cluster.usage.using(name, kind) == used


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_no_limit_is_ever_exceeded(seed: int) -> None:
    any_history(random.Random(seed))


def any_history(rng: random.Random) -> None:
    """Runs of all teams come and go under any quotas; all limits are kept at any time."""
    world = Teams(some_policy(rng))
    world.add("old", 4, "a100")
    for index in range(30):
        deed = rng.random()
        if deed < 0.5:
            least = rng.randint(1, 5)
            slots = {"min": least, "max": least + rng.choice([0, 0, 3])}
            more = {"user": rng.choice(["ann", "bob", None]), "priority": rng.randint(0, 2), "grace_s": 20}
            where = {"accelerators": rng.choice([[], [], ["h100"], ["a100"]])}
            how = {"preemptible": rng.random() < 0.8, "time_slice": rng.random() < 0.5}
            wanted = spec(slots, team=rng.choice(TEAMS), resources=where, scheduling=how, **more)
            world.accept(f"r{index}", wanted)
        elif live := sorted(world.placed()):
            run_id = rng.choice(live)
            world.start(run_id)
            if deed > 0.8:
                world.commit(run_id, 1, final=True)
                world.exit(run_id)
        world.settle()
        check_limits(world)
        # Whoever is asked lets go within the grace; the clock is looked at when the plan says so, and in between.
        for _ in range(rng.randint(0, 3)):
            at = world.now + timedelta(seconds=rng.choice([1, 20, 300]))
            world.pass_time(at)
    assert world.cluster.usage == fold(world.log).usage
