"""Quotas and shares in one cycle: what a run may have of which nodes, which run goes first, which may preempt which.

``quota.py`` and ``order/share.py`` count slots of teams; here they meet runs, nodes and kinds of accelerators. Without
quotas and fair share in the policy nothing here costs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice

from contracts.scheduling import Policy
from services.scheduler.core.decisions import StopRun
from services.scheduler.core.order.share import Shares
from services.scheduler.core.place.placer import Placer
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeSlots
from services.scheduler.core.policy_features import Feature, Shortcut
from services.scheduler.core.quota.quotas import Quotas, Refusal, SpentOut
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.index import Key
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.state.usage import lineage

NONE: frozenset[str] = frozenset()
#: How many runs a text names.
MAX_NAMED_RUNS = 5
#: For how many runs idle slots are kept from those that would borrow them.
MAX_OWNERS = 16
#: A quota that is used up within so long is: the clock of facts is no finer.
AT_ONCE_S = 1e-3


class Entitlements:
    """What each team has and may have in one cycle, as slots are charged and refunded in it."""

    def __init__(self, cluster: Cluster, policy: Policy, now_s: float, placer: Placer) -> None:
        self.cluster, self.policy, self.now_s, self.placer = cluster, policy, now_s, placer
        features = self.features = placer.features
        self.quotas = Quotas(policy, cluster.usage, now_s) if features.has(Feature.QUOTAS) else None
        has_shares = features.has(Feature.FAIR_SHARE)
        self.shares = Shares(cluster.usage, policy.fair_share, now_s) if has_shares else None
        self._share_at = policy.order.by.index("fair-share") if self.shares is not None else 0
        self._by_hours = features.has(Feature.SLOT_HOURS)
        if self.quotas is not None and self._by_hours:
            self.quotas.count(self._holders())
        self.lent = features.has(Feature.LENDING)
        #: Whether all runs within their quota have been examined, so that only borrowers follow.
        self.borrowing = False
        #: What was found out for runs that are alike, since slots were last given or taken.
        self._shut: dict[tuple[object, ...], tuple[frozenset[str], Refusal | None]] = {}
        self._within: dict[tuple[object, ...], bool] = {}

    def _holders(self) -> Iterator[tuple[Run, float, str]]:
        nodes = self.cluster.nodes
        for run_id in self.cluster.active:
            run = self.cluster.runs[run_id]
            try:
                parts = run.live if run.slot_spec.milli else ()
                held_slots = [(slots_of(run, len(part.slots)), nodes[part.node_id].accelerator) for part in parts]
            except Exception as error:
                note_suspect(error, run_id=run_id)
                raise
            for slots, accelerator in held_slots:
                yield run, slots, accelerator

    # -- what a run may have ----------------------------------------------------

    def shut(self, run: Run, request: ResourceRequest, count: int) -> tuple[frozenset[str], Refusal | None]:
        """Return the nodes of kinds of which the run may not have ``count`` slots; and why, if those are all."""
        if self.quotas is None or not run.slot_spec.milli:
            return NONE, None
        spec = run.spec
        alike = (spec.team, spec.user, request, count, spec.scheduling.preemptible, spec.grace_s)
        found = self._shut.get(alike)
        if found is None:
            found = self._shut[alike] = self._shut_for(self.quotas, run, request, count)
        return found

    def _shut_for(
        self, quotas: Quotas, run: Run, request: ResourceRequest, count: int
    ) -> tuple[frozenset[str], Refusal | None]:
        slots = slots_of(run, count)
        kinds = self.kinds(request)
        refusals = {kind: found for kind in kinds if (found := quotas.allows(run, slots, kind)) is not None}
        nodes = NONE.union(*(kinds[kind] for kind in refusals))
        if len(refusals) < len(kinds) or not refusals:
            return nodes, None
        # The one that is the soonest over.
        return nodes, min(refusals.values(), key=lambda refusal: (refusal.never, refusal.needs - refusal.room))

    def most(self, run: Run, request: ResourceRequest, count: int) -> tuple[int, frozenset[str]]:
        """How many of ``count`` slots the run may have, and on which nodes none of them can be.

        What it has already must have been given back.
        """
        if self.quotas is None or not run.slot_spec.milli:
            return count, NONE
        kinds = self.kinds(request)
        rooms = {kind: self.quotas.room(run, kind) * SLOT_MILLI / run.slot_spec.milli for kind in kinds}
        most = math.floor(min(max(rooms.values(), default=0.0) + 1e-6, count))
        return most, NONE.union(*(kinds[kind] for kind, room in rooms.items() if room + 1e-6 < most))

    def kinds(self, request: ResourceRequest) -> dict[str, frozenset[str]]:
        """The kinds of accelerators that will do, and the nodes that have them."""
        memory = self.cluster.index.memory()
        key = ("kinds", request)
        found: dict[str, frozenset[str]] | None = memory.get(key)
        if found is None:
            nodes: dict[str, set[str]] = {}
            node_id = ""
            try:
                for node_id, node in self.placer.eligible(request).items():
                    nodes.setdefault(node.accelerator, set()).add(node_id)
            except Exception as error:
                note_suspect(error, node_id=node_id)
                raise
            found = memory[key] = {kind: frozenset(node_ids) for kind, node_ids in nodes.items()}
        return found

    # -- what is given and taken --------------------------------------------------

    def charge(self, run: Run, taken: Iterable[NodeSlots]) -> None:
        """Charge the run's team for these slots."""
        self._change(run, taken, 1)

    def refund(self, run: Run, taken: Iterable[NodeSlots]) -> None:
        """Refund these slots to the run's team."""
        self._change(run, taken, -1)

    def refund_run(self, run: Run) -> None:
        """Refund all slots that the run still has."""
        self._change(run, held(run), -1)

    def _change(self, run: Run, taken: Iterable[NodeSlots], sign: int) -> None:
        if self.quotas is None and self.shares is None:
            return
        try:
            if not run.slot_spec.milli:
                return
            self._shut.clear()
            self._within.clear()
            for node_id, slots in taken:
                amount = sign * slots_of(run, len(slots))
                if self.quotas is not None and (node := self.cluster.nodes.get(node_id)) is not None:
                    self.quotas.charge(run, amount, node.accelerator)
                if self.shares is not None:
                    self.shares.charge(run.spec.team, amount)
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    # -- who goes first -------------------------------------------------------------

    def share(self, team: str) -> Key:
        """The standing of a team; smaller goes first."""
        return self.shares.key(team) if self.shares is not None else (0.0,)

    def in_order(self, line: Callable[[], Iterator[tuple[Key, Run]]]) -> Iterator[tuple[Key, Run]]:
        """The line, those first that have a right to what they wait for: what they borrowed, others take back."""
        if self.features.allows(Shortcut.ONE_PASS):
            yield from line()
            return
        looked_at = set()
        for key, run in line():
            if self.within(run):
                looked_at.add(run.run_id)
                yield key, run
        self.borrowing = True
        for key, run in line():
            if run.run_id not in looked_at:
                yield key, run

    def within(self, run: Run) -> bool:
        """Whether the run would borrow nothing."""
        if self.quotas is None or not self.lent:
            return True
        try:
            if not run.slot_spec.milli:
                return True
            request, least = resource_request_of(self.cluster, run), run.spec.slots.min
            alike = (run.spec.team, request, least)
            found = self._within.get(alike)
            if found is None:
                slots = slots_of(run, least)
                found = any(self.quotas.within(run, slots, kind) for kind in self.kinds(request))
                self._within[alike] = found
            return found
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    def rank(self, run: Run, key: Key) -> tuple[bool, Key, Key, Key]:
        """Where a run with this key stands in the line as things are now."""
        if self.shares is None:
            return not self.within(run), key, (), ()
        at = self._share_at
        try:
            return not self.within(run), key[:at], self.shares.key(run.spec.team), key[at + 1 :]
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    def alike(self, run: Run) -> Hashable:
        """What two runs have in common if the same holds for them here."""
        turns = run.spec.scheduling.time_slice and self.features.has(Feature.TURNS)
        return turns if self.features.allows(Shortcut.NO_RIGHTS) else (turns, run.spec.team, run.spec.user)

    # -- who may take from whom -------------------------------------------------------

    def verdict(self, waiter: Run, count: int, holder: Run) -> bool | None:
        """Whether quotas let the waiter have slots of the holder, forbid it, or say nothing about it (None)."""
        if self.quotas is None or not self.lent:
            return None
        slots, allowed = slots_of(waiter, count), self.kinds(resource_request_of(self.cluster, waiter))
        verdicts = {
            self.quotas.verdict(waiter, slots, holder, node.accelerator)
            for part in holder.live
            if (node := self.cluster.nodes[part.node_id]).accelerator in allowed
        }
        return next((verdict for verdict in (True, None, False) if verdict in verdicts), None)

    def owners(self, blocked: Iterable[Run]) -> list[Run]:
        """The first of these runs that have a right to slots."""
        return list(islice(filter(self._is_owner, blocked), MAX_OWNERS))

    def _is_owner(self, run: Run) -> bool:
        try:
            return bool(run.slot_spec.milli) and self.within(run)
        except Exception as error:
            note_suspect(error, run_id=run.run_id)
            raise

    def gets_back(
        self, run: Run, request: ResourceRequest, snapshot: ClusterSnapshot, leaving: Collection[str]
    ) -> bool:
        """Whether the run fits once all runs have stopped that are stopping, or may be stopped for it."""
        trial, gone = snapshot.copy(), []
        least, least_s = run.spec.slots.min, self.policy.preemption.min_run_s
        holders = [each for run_id in self.cluster.active if (each := self.cluster.runs[run_id]).live]
        holder_id = ""
        try:
            asked = set()
            for each in holders:
                holder_id = each.run_id
                if each.stopping is not None or holder_id in leaving:
                    asked.add(holder_id)
                    trial.release_run(each)
                    self.refund_run(each)
                    gone.append(each)
            for each in holders:
                holder_id = each.run_id
                granted = self.now_s - each.placed_at.timestamp() >= least_s
                may_go = granted and each.spec.scheduling.preemptible and not each.terminal and holder_id not in asked
                if may_go and self.verdict(run, least, each):
                    trial.release_run(each)
                    self.refund_run(each)
                    gone.append(each)
            for each in gone:
                holder_id = each.run_id
                self.charge(each, held(each))
        except Exception as error:
            note_suspect(error, run_id=run.run_id, victim_id=holder_id)
            raise
        shut, refusal = self.shut(run, request, run.spec.slots.min)
        return refusal is None and self.placer.find(trial, run, run.spec.slots.min, request, closed=shut) is not None

    def by_share(self, key: Key, run: Run, other_key: Key, other: Run) -> bool:
        """Whether it is the shares of their teams that decide between two runs."""
        at = self._share_at
        return self.shares is not None and key[:at] == other_key[:at] and run.spec.team != other.spec.team

    def may_take_share(self, waiter: Run, count: int, holder: Run) -> bool:
        """Whether the waiter's team stands so far below the holder's that it may take its slots."""
        if self.shares is None:
            return False
        loses = slots_of(holder, holder.slot_count)
        return self.shares.may_take(waiter.spec.team, slots_of(waiter, count), holder.spec.team, loses)

    # -- slot-hours ---------------------------------------------------------------------

    def spent(self, leaving: Iterable[str] = ()) -> tuple[list[StopRun], float]:
        """The stops of runs whose team has used up its slot-hours, and when the next ones will be due."""
        if self.quotas is None or not self._by_hours:
            return [], math.inf
        stops: dict[str, StopRun] = {}
        wake_s = math.inf
        for out in self.quotas.spent_out():
            if out.at > self.now_s + AT_ONCE_S:
                wake_s = min(wake_s, out.at)
                continue
            for run_id in out.run_ids:
                try:
                    run = self.cluster.runs[run_id]
                    if run.stopping is None and run_id not in leaving and not run.terminal:
                        stop = StopRun(run_id, run.generation, "quota_spent", _spent_text(out), run.spec.grace_s)
                        stops.setdefault(run_id, stop)
                except Exception as error:
                    note_suspect(error, run_id=run_id)
                    raise
        return list(stops.values()), wake_s

    @property
    def wake_s(self) -> float:
        """When the clock alone may allow what was refused."""
        return self.quotas.wake_at if self.quotas is not None else math.inf


def slots_of(run: Run, count: int) -> float:
    """Return ``count`` slots of the run as a number of whole accelerators."""
    return count * run.slot_spec.milli / SLOT_MILLI


def held(run: Run) -> list[NodeSlots]:
    """What the run has."""
    return [(part.node_id, part.slots) for part in run.live]


# -- texts ------------------------------------------------------------------------------------------------


def refusal_text(cluster: Cluster, run: Run, refusal: Refusal) -> str:
    """Why the run may not have slots: whose limit it is, who has what, until when, and what would start it."""
    needs = f"needs at least {_slots(refusal.needs)}"
    text = f"{needs}, {_limit_text(refusal)}"
    changes = _changes(refusal)
    if refusal.bound == "hours":
        return f"{text}; {', or '.join(changes)}"
    if refusal.never:
        return f"{text}; it never runs as it is: {', or '.join(changes)}"
    names = _holders(cluster, refusal)
    has = f"; {_list_names(names)} {'has' if len(names) == 1 else 'have'} them" if names else ""
    more = refusal.needs - refusal.room
    return f"{text}{has}; {', or '.join([f'it may start when {_slots(more)} of them are given back', *changes])}"


def _limit_text(refusal: Refusal) -> str:
    of = f" of {refusal.accelerator}" if refusal.accelerator is not None else ""
    who = _who(refusal)
    match refusal.bound:
        case "run":
            return f"and a run may have {_slots(refusal.limit)} at most (admit.max_slots_per_run)"
        case "user":
            return f"but {who} has {refusal.used:g} of the {_slots(refusal.limit)} that a user may have at once"
        case "team":
            return f"but {who} has {refusal.used:g} of the {_slots(refusal.limit)}{of} that it may have at once"
        case "hours":
            return (
                f"but {who} has used {refusal.used:.6g} of its {refusal.limit:g} slot-hours{of} in this period, which "
                f"ends at {_time(refusal.until)}"
            )
        case "borrowed":
            return (
                f"but {who} has {refusal.used:g} of its {_slots(refusal.limit)}{of}, and a run that may not be "
                "preempted gets none that belong to others"
            )


def _changes(refusal: Refusal) -> list[str]:
    changes = []
    if refusal.bound == "hours":
        changes.append(f"the next period begins at {_time(refusal.until)}")
    if refusal.bound == "borrowed":
        changes.append("with scheduling.preemptible true it may have idle slots of others until they want them back")
    fewer = math.floor(refusal.room + 1e-6)
    if refusal.bound != "hours" and 1 <= fewer < refusal.needs:
        changes.append(f"with slots.min of at most {fewer} it may start now")
    if refusal.never and not changes:
        changes.append("the limit stands in the policy")
    return changes


def _holders(cluster: Cluster, refusal: Refusal) -> list[str]:
    """The runs that have what the limit is about."""
    found = []
    for run_id in cluster.active:
        run = cluster.runs[run_id]
        counted = (
            (run.spec.user or "") == refusal.name
            if refusal.bound == "user"
            else refusal.name in lineage(run.spec.team) and refusal.bound != "run"
        )
        kinds = {cluster.nodes[part.node_id].accelerator for part in run.live}
        if counted and run.slot_spec.milli and kinds and refusal.accelerator in (None, *kinds):
            found.append(run_id)
    return sorted(found)


def _spent_text(out: SpentOut) -> str:
    of = f" of {out.quota.accelerator}" if out.quota.accelerator is not None else ""
    team = f"team {out.quota.team}" if out.quota.team else "everybody together"
    return (
        f"{team} has used its {out.quota.slot_hours:g} slot-hours{of} of this period; "
        f"the next one begins at {_time(out.period_ends_at)}"
    )


def _who(refusal: Refusal) -> str:
    if refusal.bound == "user":
        return f"user {refusal.name}" if refusal.name else "the user without a name"
    return f"team {refusal.name}" if refusal.name else "everybody together"


def _time(at_s: float | None) -> str:
    return datetime.fromtimestamp(at_s or 0.0, UTC).isoformat(timespec="seconds")


def _slots(count: float) -> str:
    return f"{count:g} slot{'s' if count != 1 else ''}"


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED_RUNS]) + (
        f" and {len(names) - MAX_NAMED_RUNS} more" if len(names) > MAX_NAMED_RUNS else ""
    )
    return f"run{'s' if len(names) != 1 else ''} {shown}"
