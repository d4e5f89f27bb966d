"""``decide``: what to queue, place, shrink, preempt and end. Same input, same output.

A pass settles what has happened to each run alone, orders what waits, places whole gangs, reserves for those that do
not fit, reclaims for those that may take from others, and grows when nobody waits. Each step has a place of its own:
``settle``, ``order``, ``place``, ``claims`` (reserve, reclaim, elastic) and ``reasons``. What a pass costs is what has
changed since the one before (``state/index.py``), and what there is to be placed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain

from contracts.scheduling import Policy
from services.scheduler.core.decisions import (
    MAX_PLACEMENTS_PER_CYCLE,
    CancelRun,
    Decision,
    ExplainRun,
    LoseNode,
    PlaceRun,
    PreemptRun,
    QueueRun,
    ReserveRun,
)
from services.scheduler.core.order import queue
from services.scheduler.core.place.placer import Placer, members_of
from services.scheduler.core.place.resource_request import ResourceRequest, avoided, resource_request_of, useful
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.quota.entitlements import Entitlements, refusal_text
from services.scheduler.core.quota.quotas import Refusal
from services.scheduler.core.reasons import Why, message, too_large
from services.scheduler.core.state.cluster import EPOCH, Cluster, Run
from services.scheduler.core.state.index import Key
from services.scheduler.core.steps.grow import grow_runs
from services.scheduler.core.steps.preempt import Preemption, is_preemption_in_vain
from services.scheduler.core.steps.reserve import Reservations, as_time
from services.scheduler.core.steps.settle import next_check_s, settle_active, settle_unqueued

#: How many runs are told in one pass why they wait, besides those that can never run. The rest is told in the next.
MAX_EXPLAINED_RUNS = 200
#: How many runs that do not fit are looked at when all of it is full; whoever asks about one is told all the same.
MAX_EXAMINED_RUNS = 200
#: More slots than anybody asks for.
NEVER = 1 << 60
#: The reason of most, made once.
FOR_SLOTS = Why("slots")


@dataclass(slots=True)
class Plan:
    """The outcome of one pass: the decisions; for each run that was looked at and waits, why; when to look again."""

    decisions: list[Decision] = field(default_factory=list)
    waits: dict[str, Why] = field(default_factory=dict)
    #: When the clock alone may change what is decided; None: only a new fact does.
    wake_at: datetime | None = None


def decide(cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime = EPOCH) -> list[Decision]:
    """Choose what to do. A run's decisions stand in the order in which they must become facts.

    ``reachable_since``: from when on agents could make themselves heard, and we hear them. Nobody is
    blamed for a silence before it.
    """
    return plan(cluster, now, policy, reachable_since).decisions


def plan(
    cluster: Cluster,
    now: datetime,
    policy: Policy,
    reachable_since: datetime = EPOCH,
    about: str | None = None,
    told: int = MAX_EXPLAINED_RUNS,
) -> Plan:
    """``decide``, with the reasons for which others wait: of the first ones, and of the run ``about``.

    ``told``: how many runs are told why they wait, at most.
    """
    return Pass(cluster, now, policy, reachable_since, about, told).made()


def lost_nodes(cluster: Cluster, expired: set[str]) -> list[LoseNode]:
    """The nodes to be taken for lost, out of those whose lease has run out."""
    return [
        LoseNode(node.node_id, node.incarnation, f"its lease was not renewed for {node.lease_ttl_s:g} s")
        for node_id in sorted(expired)
        if (node := cluster.nodes.get(node_id)) is not None and node.alive
    ]


def unresponsive_nodes(cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime) -> list[LoseNode]:
    """The nodes to be taken for lost although they renew their leases: they do not let go when told to.

    Taken for lost their slots are free, and whatever still trains there can commit nothing any more.
    """
    found: dict[str, LoseNode] = {}
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        if run.preempting is None:
            continue
        limit_s = run.preempting.grace_s + policy.faults.release_deadline_s
        if now - max(run.preempting_at, reachable_since) < timedelta(seconds=limit_s):
            continue
        for part in run.live:
            node = cluster.nodes[part.node_id]
            reason = f"it has not let go of run {run_id} for {limit_s:g} s, although it was told to"
            found.setdefault(node.node_id, LoseNode(node.node_id, node.incarnation, reason))
    return list(found.values())


class Pass:
    """One pass over a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        now: datetime,
        policy: Policy,
        reachable_since: datetime,
        about: str | None,
        told: int,
    ) -> None:
        self.cluster, self.now, self.policy, self.reachable_since = cluster, now, policy, reachable_since
        self.about, self.told = about, told
        self.now_s = now.timestamp()
        self.result = Plan()
        self._snapshot: ClusterSnapshot | None = None
        self.placer = Placer(cluster, policy, now)
        self.entitlements = Entitlements(cluster, policy, self.now_s, self.placer)
        self._wake_s = math.inf
        #: What did not fit: the needs -> the least number of slots that was too much. Room only shrinks in a pass.
        self._too_much: dict[object, int] = {}
        #: Runs queued by this very pass compete in it.
        self._fresh: dict[str, Run] = {}
        self._placed: list[tuple[Run, ResourceRequest, list[NodeSlots]]] = []
        self._blocked: list[Run] = []
        #: What is kept for runs that wait, where others may go ahead of them.
        self._kept: Reservations | None = None
        #: Idle slots that are not lent, since their owner is about to get the rest.
        self._owed: list[tuple[ResourceRequest, list[NodeSlots]]] | None = None if self.entitlements.lent else []
        self._leaving: set[str] = set()

    @property
    def snapshot(self) -> ClusterSnapshot:
        """What is free in this pass; looked at only if somebody could use it."""
        if self._snapshot is None:
            self._snapshot = ClusterSnapshot.free(self.cluster)
        return self._snapshot

    def made(self) -> Plan:
        """Go through the steps."""
        # 1. What has happened to each run alone.
        leaving = self._leaving = self._settle()
        self._stop_spent(leaving)
        for window in self.placer.windows:
            self._wake_at(window.end.timestamp())
        # 2. Order what waits; 3. whole gangs only, since half a gang deadlocks its peers.
        queue.update(self.cluster, self.now, self.policy)
        self._place()
        self._keep_owed()
        self._widen()
        for wants, taken in self._owed or ():
            self.snapshot.release(wants.demand, taken)
        # 4. Take slots for those in vain; 5. put idle ones to use if there are none.
        if self._blocked:
            self._reclaim(leaving)
        elif not leaving and not self._placed and not self._paused():
            grown, wake_s = grow_runs(
                self.cluster, lambda: self.snapshot, self.now, self.policy, self.placer, self.entitlements
            )
            self.result.decisions += grown
            self._wake_at(wake_s)
        self._wake_at(self.entitlements.wake_s)
        self._tell()
        if self.about in self.result.waits:
            run = self.cluster.runs[self.about]
            self.result.waits[self.about] = self._in_numbers(run, self.result.waits[self.about])
        if self._wake_s < math.inf:
            self.result.wake_at = as_time(self._wake_s)
        return self.result

    def _reclaim(self, leaving: set[str]) -> None:
        """Take slots for those that do not fit, from those from whom they may be taken."""
        if is_preemption_in_vain(self.cluster, self.policy, self.entitlements, self._blocked, leaving):
            return
        reclaim = Preemption(
            self.cluster, self.now, self.policy, self.placer, self.snapshot, self.entitlements, leaving, self._kept
        )
        self.result.decisions += reclaim.for_blocked(self._blocked, self.result.waits)
        self._wake_at(reclaim.wake_s)

    # -- 1 --------------------------------------------------------------------

    def _settle(self) -> set[str]:
        """Decide what follows for each run alone; return those that are asked to let go by it."""
        index, leaving = self.cluster.index, set()
        index.unsettled.update(dict.fromkeys(index.due(self.now_s)))
        for run_id in list(index.unsettled):
            run = self.cluster.runs[run_id]
            settlement = self._settled(run)
            if settlement is None:
                self._leave_alone(run)
                continue
            self.result.decisions.append(settlement)
            if isinstance(settlement, PreemptRun):
                leaving.add(run_id)
            elif isinstance(settlement, QueueRun) and not self._breaks_again(run, settlement):
                self._fresh[run_id] = run
        if index.alarms:
            self._wake_at(index.alarms[0][0])
        return leaving

    def _stop_spent(self, leaving: set[str]) -> None:
        """Stop runs whose team has used up its slot-hours."""
        stops, wake_s = self.entitlements.spent(leaving)
        self.result.decisions += stops
        leaving |= {stop.run_id for stop in stops}
        self._wake_at(wake_s)

    def _leave_alone(self, run: Run) -> None:
        """Nothing is to be decided about the run until something is said about it, or its time has come."""
        index, look_s = self.cluster.index, next_check_s(run, self.policy, self.now_s)
        index.touched[run.run_id] = None
        if run.run_id in self.cluster.queued:
            index.untold[run.run_id] = None
        if not look_s <= self.now_s:
            # (One whose time has come, and that is only not heard yet, is looked at in every pass.)
            del index.unsettled[run.run_id]
            if look_s < math.inf:
                index.alarm(look_s, run.run_id)

    def _settled(self, run: Run) -> Decision | None:
        cluster, run_id = self.cluster, run.run_id
        if run_id in cluster.unqueued:
            return settle_unqueued(run)
        if run_id in cluster.active:
            return settle_active(cluster, run, self.now, self.policy, self.reachable_since)
        if run_id in cluster.queued and run.cancel_reason is not None:
            return CancelRun(run_id, run.cancel_reason)
        return None

    def _breaks_again(self, run: Run, settlement: QueueRun) -> bool:
        """Whether a run that just broke must first wait; it is then looked at once it is queued."""
        broke = settlement.reason in ("crashed", "node lost")
        return broke and self.policy.faults.retry_delay_s(run.setbacks + 1) > 0

    # -- 2, 3 -----------------------------------------------------------------

    def in_order(self) -> Iterator[tuple[Key, Run]]:
        """Everything that waits, in order."""
        runs = self.cluster.runs
        # Whoever has a promise goes before everybody: a promise that a newcomer can break is none.
        promised = sorted((start_by, run_id) for run_id, start_by in self.cluster.promised.items())
        for _, run_id in promised:
            if (run := runs[run_id]).cancel_reason is None:
                yield (), run
        yield from self.entitlements.in_order(self._line)

    def _line(self) -> Iterator[tuple[Key, Run]]:
        """The line by the keys of the policy, with those that are queued by this very pass."""
        runs, groups = self.cluster.runs, self.cluster.index.queue.groups
        if self._fresh:
            fresh: dict[str, list[tuple[Key, str]]] = {}
            for run_id, run in self._fresh.items():
                entry = (queue.key_of(self.cluster, run, self.now, self.policy), run_id)
                fresh.setdefault(queue.group_of(run, self.policy), []).append(entry)
            groups = groups | {group: sorted([*groups.get(group, ()), *new]) for group, new in fresh.items()}
        for key, run_id in queue.iterate(groups, self.entitlements.share, self.policy):
            run = runs[run_id]
            if run.cancel_reason is None and run_id not in self.cluster.promised:
                yield key, run

    def _place(self) -> None:
        """Place in order. Where nothing may overtake, whoever does not fit closes the nodes it waits for.

        Everybody first gets what it needs; what is then left goes to the first in order, up to its
        maximum. So an elastic run does not shut out the one behind it, and fills the cluster alone.
        """
        policy, waits = self.policy, self.result.waits
        #: Node -> the first run that waits for it, where nothing may overtake.
        closed: dict[str, str] = {}
        if policy.reserve.backfill != "none":
            self._kept = Reservations(self.cluster, self.now, policy, self.placer)
        reserve, passed = self._kept, 0
        # Where whatever fits may go ahead, and no rule but room counts, most of a long line is passed over at once.
        counted = policy.order.skip and reserve is None and self.entitlements.quotas is None and not self.placer.windows
        for _, run in self.in_order():
            if len(self._placed) >= MAX_PLACEMENTS_PER_CYCLE:
                break  # no more can be said in this pass
            if self.entitlements.borrowing:
                self._keep_owed()
            if passed >= MAX_EXAMINED_RUNS and passed % MAX_EXAMINED_RUNS == 0 and self._hopeless(closed, counted):
                break
            if counted and not run.setbacks and self._is_too_much(run):
                passed += 1
                self._blocked.append(run)
                waits[run.run_id] = FOR_SLOTS
                continue
            wants, least = resource_request_of(self.cluster, run), run.least
            why, shut = self._ruled_out(run, wants)
            taken = self._fit(run, wants, least, closed, shut, reserve) if why is None else None
            if taken is not None:
                self.snapshot.allocate(wants.demand, taken)
                self.entitlements.charge(run, taken)
                self._placed.append((run, wants, taken))
                continue
            if why is None and self.placer.windows:
                why = self._in_maintenance(run, wants)
            if why is not None:
                # Slots would not help it: nobody waits behind it, nor is anything taken from anybody.
                waits[run.run_id] = why
                continue
            passed += 1
            self._blocked.append(run)
            if reserve is None:
                waits[run.run_id] = self._in_turn(run, self.placer.waits_for(run, wants) - shut, closed)
                continue
            waits[run.run_id] = self._reserve(reserve, run, wants)
            if passed >= policy.reserve.depth:
                break

    def _ruled_out(self, run: Run, wants: ResourceRequest) -> tuple[Why | None, frozenset[str]]:
        """Why the run may not have slots now however many are free; and the nodes on which it may not."""
        if run.setbacks and (retry_at := self._retry_at(run)) > self.now:
            self._wake_at(retry_at.timestamp())
            return Why("paused", retry_at=retry_at), frozenset()
        if (largest := self.placer.largest(wants)) < run.least:
            # It can wait for nodes, but must not keep anybody else waiting.
            return too_large(self.cluster, run, largest), frozenset()
        shut, refusal = self.entitlements.shut(run, wants, run.least)
        return (self._refused(run, refusal) if refusal is not None else None), shut

    def _in_turn(self, run: Run, wanted: frozenset[str], closed: dict[str, str]) -> Why:
        """The reason of a run that does not fit. Unless others may overtake it, it closes the nodes it waits for."""
        # Whoever is first in line for any of them is ahead.
        ahead = next((first for node_id, first in closed.items() if node_id in wanted), None)
        if not self.policy.order.skip:
            for node_id in wanted:
                closed.setdefault(node_id, run.run_id)
        return Why("priority" if ahead else "slots", ahead=ahead)

    def _is_too_much(self, run: Run) -> bool:
        """Whether no more than it needs has not fitted in this pass, of what there is: it need not be tried."""
        wants = run.wants
        # What there can never be is another reason to wait.
        if not isinstance(wants, ResourceRequest):
            return False
        return self._too_much.get(wants, NEVER) <= run.least <= self.placer.largest(wants)

    def _keep_owed(self) -> None:
        """Lend no idle slots to others where an owner who waits for them gets the rest back in a moment."""
        if self._owed is not None:
            return
        self._owed = []
        for run in self.entitlements.owners(self._blocked):
            wants, least = resource_request_of(self.cluster, run), run.spec.slots.min
            if not self.entitlements.gets_back(run, wants, self.snapshot, self._leaving):
                continue
            shut, _ = self.entitlements.shut(run, wants, least)
            idle = min(self.placer.most(self.snapshot, run, wants, shut), least)
            if idle and (taken := self.placer.find(self.snapshot, run, idle, wants, closed=shut)) is not None:
                self.snapshot.allocate(wants.demand, taken)
                self._owed.append((wants, taken))

    def _hopeless(self, closed: Collection[str], counted: bool) -> bool:
        """Whether nobody further down the line can be placed, and nobody is asked about."""
        if self.about is not None and self.about not in self.result.waits:
            return False
        if self._nothing_left or len(closed) >= len(self.snapshot.nodes):
            return True
        if not counted:
            return False
        fresh = ((resource_request_of(self.cluster, run), run.least) for run in self._fresh.values())
        sizes = chain(self.cluster.index.sizes, fresh)
        return all(self._too_much.get(wants, NEVER) <= least for wants, least in sizes)

    def _in_maintenance(self, run: Run, wants: ResourceRequest) -> Why | None:
        """The reason of a run that would fit, were it not for maintenance that is to begin before it is done."""
        out = self.placer.shut(run)
        if (
            not out
            or self.placer.find(self.snapshot, run, run.spec.slots.min, wants, respect_maintenance=False) is None
        ):
            return None
        ends = min(window.end for window in self.placer.windows)
        names = ", ".join(sorted(out)[:5])
        return Why(
            "maintenance",
            detail=f"nodes that have room for it ({names}) are in maintenance, or will be before it is expected to be "
            f"done: the next one ends at {ends.isoformat(timespec='seconds')}; with a shorter scheduling.limit_s it "
            "could go before",
        )

    def _refused(self, run: Run, refusal: Refusal) -> Why:
        """The reason of a run that may have no more; the text is made for those that are told."""
        told = (run.waiting_code, run.waiting_generation) == (refusal.code, run.next_generation)
        text = "" if told and run.run_id != self.about else refusal_text(self.cluster, run, refusal)
        return Why(refusal.code, detail=text)

    def _reserve(self, reserve: Reservations, run: Run, wants: ResourceRequest) -> Why:
        """Keep slots for a run that does not fit, if it is its turn; say for whom slots are kept from it."""
        made = reserve.hold(run, wants, self.snapshot)
        if made is not None:
            least, known = self.policy.reserve.promise_slots, run.reserved
            start_by = as_time(made.start_s)
            promise = made.firm and least is not None and run.spec.slots.min >= least
            # What was promised is said once: it can only start earlier.
            if promise and known is None and run.run_id in self.cluster.queued:
                node_ids = tuple(sorted({node_id for node_id, _ in made.taken}))
                self.result.decisions.append(ReserveRun(run.run_id, run.next_generation, start_by, node_ids))
            return Why("slots", start_by=start_by, firm=made.firm)
        kept_for = reserve.kept_from(run, wants, self.snapshot)
        return (
            Why("reserved", ahead=kept_for.run.run_id, start_by=as_time(kept_for.start_s)) if kept_for else Why("slots")
        )

    def _fit(
        self,
        run: Run,
        wants: ResourceRequest,
        count: int,
        closed: dict[str, str],
        shut: frozenset[str],
        reserve: Reservations | None,
    ) -> list[NodeSlots] | None:
        """So many slots for the run, if they are there and nobody before it waits for them."""
        avoid = avoided(self.cluster, run, self.policy) if run.strikes or run.stalled else ()
        # Room only shrinks in a pass, and more nodes are closed: what did not fit will not fit.
        plain = not shut and reserve is None and not self.placer.windows
        if plain and self._too_much.get(wants, count + 1) <= count:
            return None
        out = {**dict.fromkeys(shut, ""), **closed} if shut else closed
        if reserve is not None:
            return reserve.find(run, count, wants, self.snapshot, avoid, out)
        taken = self.placer.find(self.snapshot, run, count, wants, avoid, out)
        if taken is None and plain:
            self._too_much[wants] = min(count, self._too_much.get(wants, count))
        return taken

    def _widen(self) -> None:
        """Give what is left to those that were placed, the first in order first, and make it so."""
        for run, wants, taken in self._placed:
            most = run.spec.slots.max
            if most > run.spec.slots.min and len(self._placed) < MAX_PLACEMENTS_PER_CYCLE:
                self.snapshot.release(wants.demand, taken)
                self.entitlements.refund(run, taken)
                taken = self._widest(run, wants, most) or taken
                self.snapshot.allocate(wants.demand, taken)
                self.entitlements.charge(run, taken)
            self.result.decisions.append(PlaceRun(run.run_id, run.next_generation, members_of(taken), run.resume))

    def _widest(self, run: Run, wants: ResourceRequest, most: int) -> list[NodeSlots] | None:
        """As many slots as bring something, up to ``most``; None if that is no more than it needs."""
        # More slots are no gain on nodes where it fails.
        avoid = avoided(self.cluster, run, self.policy)
        most, shut = self.entitlements.most(run, wants, most)
        if most <= run.spec.slots.min:
            return None
        snapshot = self.snapshot if self._kept is None else self._kept.space_for(run, self.snapshot)
        count = useful(run, min(most, self.placer.most(snapshot, run, wants, avoid | shut)))
        return self.placer.find(snapshot, run, count, wants, avoid, shut) if count > run.spec.slots.min else None

    def _retry_at(self, run: Run) -> datetime:
        if run.run_id not in self.cluster.queued:
            return run.placed_at  # it is being queued in this pass, see _breaks_again
        return run.queued_at + timedelta(seconds=self.policy.faults.retry_delay_s(run.setbacks))

    @property
    def _nothing_left(self) -> bool:
        """Whether nothing is left for anybody: runs that need no accelerator are always looked at."""
        return self.snapshot.milli <= 0 and not self.cluster.index.light

    def _paused(self) -> bool:
        return any(why.code == "paused" for why in self.result.waits.values())

    def _wake_at(self, at_s: float) -> None:
        if at_s > self.now_s:
            self._wake_s = min(self._wake_s, at_s)

    # -- why ------------------------------------------------------------------

    def _tell(self) -> None:
        """Say why runs wait whose reason is not what they were told; those that can never run first."""
        cluster, index = self.cluster, self.cluster.index
        if index.nodes_changed:
            index.untold.update(cluster.queued)
            index.nodes_changed = False
        budget = self.told
        runs = cluster.runs
        for run_id, why in self.result.waits.items():
            run = runs[run_id]
            if run.waiting_code != why.code or run.waiting_generation != run.generation + 1:
                budget -= self._said(run_id, why)
            index.untold.pop(run_id, None)
        decided = {decision.run_id for decision in self.result.decisions}
        later = []
        for run_id in list(index.untold):
            run = cluster.runs[run_id]
            if run_id in decided:
                continue
            if run_id not in cluster.queued or run_id in self.result.waits:
                del index.untold[run_id]
            elif self.placer.largest(wants := resource_request_of(cluster, run)) < run.spec.slots.min:
                if not self._said(run_id, too_large(cluster, run, self.placer.largest(wants))):
                    del index.untold[run_id]
            else:
                later.append(run_id)
        for run_id in later:
            if budget <= 0:
                break
            if self._said(run_id, self._in_the_crowd()):
                budget -= 1
            else:
                del index.untold[run_id]

    def _in_the_crowd(self) -> Why:
        """The reason of those far down the line, none of whom was looked at."""
        if self._blocked and not self.policy.order.skip:
            return Why("priority", ahead=self._blocked[0].run_id)
        return Why("slots")

    def _in_numbers(self, run: Run, why: Why) -> Why:
        """The reason with how much is free for the run, after this pass, and how much there is."""
        if why.code not in ("slots", "priority", "reserved"):
            return why
        wanted = self.placer.waits_for(run, resource_request_of(self.cluster, run))
        free = sum(capacity.whole for node_id in wanted if (capacity := self.snapshot.nodes.get(node_id)) is not None)
        return replace(why, idle=free, capacity=sum(self.cluster.nodes[node_id].slots for node_id in wanted))

    def _said(self, run_id: str, why: Why) -> bool:
        """Say it, unless it was said."""
        run = self.cluster.runs[run_id]
        # One that is being queued in this pass is explained in the next: it may be placed by then.
        if run_id not in self.cluster.queued or (run.waiting_code, run.waiting_generation) == (
            why.code,
            run.next_generation,
        ):
            return False
        self.result.decisions.append(ExplainRun(run_id, run.next_generation, why.code, message(self.cluster, run, why)))
        return True
