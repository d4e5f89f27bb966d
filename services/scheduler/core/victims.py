"""Which allocated runs are preempted for one that waits: the cheapest set after which it fits.

The cost of a set is compared field by field: the slots of runs that stop altogether, from the highest priority down to
the lowest but one; the slots lost in all; those of runs that stop rather than shrink; priority, and standing where the
policy preempts by it; then the work lost. Among runs of one priority that is the fewest slots, then the least work.
Sets are found in three steps, per node as Kueue and the KAI scheduler do:

1. For each node and number of bundles, the cheapest set of its runs that makes room for them (``_node_options``).
2. The cheapest combination of nodes (``_combine``, a knapsack), for each subset of the gangs that span nodes.
3. Victims that turn out not to be needed are added back (``_add_back``).

Where there are few gangs and the numbers are small the result is the minimum. Beyond (``MAX_COMBINED``,
``MAX_GANG_SUBSETS``) the cheapest part is taken first, and only the rest is combined exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from services.scheduler.core.place.snapshot import NodeCapacity, NodeSlots, has_profiles
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec

#: Sets of runs of one node that are compared; with more, those that are cheapest by themselves are taken.
MAX_NODE_SETS = 512
#: Steps of one knapsack over nodes.
MAX_COMBINED = 60_000
#: Subsets of gangs that are tried, and the steps of all their knapsacks together.
MAX_GANG_SUBSETS = 128
MAX_GANG_STEPS = 120_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocated run that may be preempted."""

    run_id: str
    slot_spec: SlotSpec
    parts: tuple[NodeSlots, ...]
    priority: int = 0
    #: Slots by which it can shrink, in steps of its own bundle.
    spare: int = 0
    #: Position among the candidates where the order of the policy decides; the lowest is preempted first.
    rank: int = 0
    #: Slot-seconds of work that a preemption costs.
    lost_slot_s: float = 0.0

    @property
    def slots(self) -> int:
        return sum(len(slots) for _, slots in self.parts)


class Victim(NamedTuple):
    """A run to be preempted, and what that frees."""

    run_id: str
    freed: tuple[NodeSlots, ...]
    #: By how many slots it shrinks; None: it stops altogether.
    by: int | None = None


@dataclass(slots=True)
class PreemptionProblem:
    """A run that waits for ``count`` slots, and all that decides what has to go for it."""

    slot_spec: SlotSpec
    count: int
    #: What is free of each node.
    nodes: Mapping[str, NodeCapacity]
    #: Sets of nodes within which the run may lie; of equal costs the first set is preferred.
    cells: Sequence[Sequence[str]]
    candidates: Sequence[Candidate]
    #: Node -> what is reserved there for others, also once it is free.
    reserved: Mapping[str, Sequence[tuple[SlotSpec, tuple[int, ...]]]] = field(default_factory=dict)


def select_victims(problem: PreemptionProblem) -> list[Victim] | None:
    """Return the cheapest victims, the cheapest first; None if all candidates together are not enough."""
    costs = _Costs(problem.candidates)
    best: _Solution | None = None
    for cell in problem.cells:
        found = _CellSearch(problem, cell, costs, best.cost if best is not None else None).solve()
        if found is not None and (best is None or found.cost < best.cost):
            best = found
    if best is None:
        return None
    return sorted(best.victims, key=lambda victim: costs.of_victim(victim))


class _Costs:
    """Costs as whole numbers that add up, and compare field by field."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._of = {each.run_id: each for each in candidates}
        slots = sum(each.slots for each in candidates)
        priorities = sorted({each.priority for each in candidates})
        ranks = max((each.rank for each in candidates), default=0)
        order = sorted(candidates, key=lambda each: (each.priority, each.rank, each.lost_slot_s, each.run_id))
        self._place = {each.run_id: place for place, each in enumerate(order)}
        self._level = {priority: level for level, priority in enumerate(priorities)}
        #: Where each field begins, in bits; the first one counts least.
        self._shift: list[int] = []
        largest = [
            len(order) ** 2,
            sum(_milli(each.lost_slot_s) for each in candidates),
            slots * ranks,
            slots * len(priorities),
            *([slots] * (1 + len(priorities))),
        ]
        at = 0
        for value in largest:
            self._shift.append(at)
            at += value.bit_length() + 1

    def of(self, candidate: Candidate, by: int | None = None) -> int:
        """Return the cost of stopping the run, or of shrinking it by ``by`` slots."""
        place, work, rank, level, whole, slots, *above = self._shift
        lost = candidate.slots if by is None else by
        at = self._level[candidate.priority]
        cost = (
            (lost << slots)
            + (lost * at << level)
            + (lost * candidate.rank << rank)
            + (_milli(candidate.lost_slot_s) << work)
            + (self._place[candidate.run_id] << place)
        )
        if by is None:
            cost += (lost << whole) + (lost << above[at - 1] if at else 0)
        return cost

    def of_victim(self, victim: Victim) -> int:
        return self.of(self._of[victim.run_id], victim.by)


def _milli(seconds: float) -> int:
    return round(seconds * 1000)


class _Option(NamedTuple):
    """A way to make room for ``gain`` more bundles."""

    gain: int
    cost: int
    victims: tuple[Victim, ...] = ()


class _Solution(NamedTuple):
    cost: int
    victims: list[Victim]


class _CellSearch:
    """The search within one set of nodes."""

    def __init__(
        self, problem: PreemptionProblem, cell: Sequence[str], costs: _Costs, limit: int | None = None
    ) -> None:
        self.problem, self.costs = problem, costs
        self.nodes = [node_id for node_id in cell if node_id in problem.nodes]
        #: What costs as much as this is of no use.
        self.limit = limit
        self._local: dict[str, list[Candidate]] = {}
        self._gangs: list[Candidate] = []
        inside = set(self.nodes)
        for candidate in problem.candidates:
            homes = [node_id for node_id, _ in candidate.parts if node_id in inside]
            if len(homes) == 1:
                self._local.setdefault(homes[0], []).append(candidate)
            elif homes:
                self._gangs.append(candidate)
        self._bundle = problem.slot_spec.bundle
        self._steps = 0
        self._free = {node_id: self._bundles(node_id, ()) for node_id in self.nodes}
        self._options: dict[str, list[_Option]] = {}

    def solve(self) -> _Solution | None:
        needed = -(-self.problem.count // self._bundle)
        if sum(self._free.values()) >= needed:
            return _Solution(0, [])
        if not self._may_suffice(needed):
            return None
        best: _Solution | None = None
        for gangs in self._gang_subsets(needed):
            cost = sum(self.costs.of_victim(each) for each in gangs)
            limit = self._least(best)
            if limit is not None and cost >= limit:
                continue
            if (found := self._with_gangs(gangs, cost, needed, limit)) is not None:
                found = self._add_back(found, needed)
                if limit is None or found.cost < limit:
                    best = found
            if self._steps > MAX_GANG_STEPS:
                break
        return best

    def _least(self, best: _Solution | None) -> int | None:
        return best.cost if best is not None else self.limit

    def _may_suffice(self, needed: int) -> bool:
        """Whether the run fits when all candidates are gone."""
        everything: dict[str, list[Victim]] = {}
        for candidate in chain(self._gangs, *self._local.values()):
            for node_id, slots in candidate.parts:
                everything.setdefault(node_id, []).append(Victim(candidate.run_id, ((node_id, slots),)))
        return sum(self._bundles(node_id, everything.get(node_id, ())) for node_id in self.nodes) >= needed

    # -- gangs that span nodes ----------------------------------------------------

    def _gang_subsets(self, needed: int) -> Iterator[tuple[Victim, ...]]:
        """The subsets of gangs that are tried."""
        choices = [(each, self._gang_choices(each)) for each in self._gangs]
        yield ()
        total = 1
        for _, options in choices:
            total *= 1 + len(options)
        if total <= MAX_GANG_SUBSETS:
            subsets: Iterable[tuple[Victim | None, ...]] = product(*((None, *options) for _, options in choices))
            found = [tuple(each for each in subset if each is not None) for subset in subsets]
            yield from sorted(filter(None, found), key=lambda subset: sum(map(self.costs.of_victim, subset)))
            return
        ranked = sorted(
            (victim for _, options in choices for victim in options), key=lambda victim: self._price(victim, needed)
        )
        for victim in ranked[: MAX_GANG_SUBSETS // 4]:
            yield (victim,)
        for pair in combinations(ranked[:8], 2):
            if pair[0].run_id != pair[1].run_id:
                yield pair
        taken: dict[str, Victim] = {}
        for victim in ranked:
            # (Shrinking comes before stopping: it costs less, and a later choice takes its place.)
            taken[victim.run_id] = victim
            if len(taken) > 1:
                yield tuple(taken.values())

    def _gang_choices(self, gang: Candidate) -> list[Victim]:
        """The ways to preempt a gang: shrink it as far as it goes, or stop it."""
        whole = Victim(gang.run_id, gang.parts)
        step = gang.slot_spec.bundle
        spare = gang.spare - gang.spare % step
        if spare <= 0:
            return [whole]
        inside = set(self.nodes)
        parts = [part for part in gang.parts if part[0] in inside]
        gains = {node_id: self._gain(node_id, (Victim(gang.run_id, ((node_id, slots),)),)) for node_id, slots in parts}
        parts.sort(key=lambda part: (-gains[part[0]] / len(part[1]), part[0]))
        # (What a bundle of its own lies on is given up together.)
        freed: list[NodeSlots] = []
        for node_id, slots in parts:
            given = min(spare, len(slots)) // step * step
            if given:
                freed.append((node_id, slots[-given:]))
                spare -= given
        by = sum(len(slots) for _, slots in freed)
        return [Victim(gang.run_id, tuple(freed), by), whole] if by else [whole]

    def _price(self, victim: Victim, needed: int) -> tuple[int, int]:
        """The cost of a gang by the bundles that it makes room for; those that make room for none come last."""
        gain = sum(self._gain(node_id, (victim,)) for node_id, _ in victim.freed)
        cost = self.costs.of_victim(victim)
        return (0, cost // min(gain, needed)) if gain > 0 else (1, cost)

    def _with_gangs(self, gangs: Sequence[Victim], cost: int, needed: int, limit: int | None) -> _Solution | None:
        """The cheapest set with these gangs and no others."""
        changed: dict[str, list[Victim]] = {}
        for victim in gangs:
            for node_id, _ in victim.freed:
                if node_id in self._free:
                    changed.setdefault(node_id, []).append(victim)
        free = sum(self._bundles(node_id, changed.get(node_id, ())) for node_id in changed)
        free += sum(bundles for node_id, bundles in self._free.items() if node_id not in changed)
        if free >= needed:
            return _Solution(cost, list(gangs))
        options = []
        for node_id in self._local:
            if node_id in changed:
                options.append(self._node_options(node_id, changed[node_id]))
            else:
                if node_id not in self._options:
                    self._options[node_id] = self._node_options(node_id, ())
                options.append(self._options[node_id])
        left = limit - cost if limit is not None else None
        found = self._combine([each for each in options if each], needed - free, left)
        return _Solution(cost + found.cost, [*gangs, *found.victims]) if found is not None else None

    # -- one node -----------------------------------------------------------------

    def _node_options(self, node_id: str, before: Sequence[Victim]) -> list[_Option]:
        """The cheapest set of the runs of one node alone for each number of bundles that it makes room for."""
        bundles = self._bundles(node_id, before)
        groups = self._groups(node_id)
        total = 1
        for group in groups:
            total *= len(group)
        sets: Iterable[tuple[tuple[Victim, ...], ...]] = (
            product(*groups) if total <= MAX_NODE_SETS else self._ordered_sets(node_id)
        )
        best: dict[int, _Option] = {}
        for parts in sets:
            victims = tuple(chain.from_iterable(parts))
            if not victims:
                continue
            gain = self._bundles(node_id, (*before, *victims)) - bundles
            if gain > 0:
                cost = sum(map(self.costs.of_victim, victims))
                if gain not in best or cost < best[gain].cost:
                    best[gain] = _Option(gain, cost, victims)
        # A set that makes room for more at no higher cost is better.
        found: list[_Option] = []
        for gain in sorted(best, reverse=True):
            if not found or best[gain].cost < found[-1].cost:
                found.append(best[gain])
        return found[::-1]

    def _groups(self, node_id: str) -> list[list[tuple[Victim, ...]]]:
        """What is chosen independently on a node. Of runs that free the same the cheapest go first."""
        profiles = has_profiles(self.problem.nodes[node_id].node)
        alike: dict[object, list[Candidate]] = {}
        groups: list[list[tuple[Victim, ...]]] = []
        for candidate in self._local[node_id]:
            slots = _slots_on(candidate, node_id)
            choices = self._shrinks(candidate, node_id)
            if choices:
                groups.append([(), *((each,) for each in choices), (Victim(candidate.run_id, candidate.parts),)])
                continue
            whole = candidate.slot_spec.milli == SLOT_MILLI and not profiles
            alike.setdefault((candidate.slot_spec, len(slots) if whole else slots), []).append(candidate)
        for same in alike.values():
            same.sort(key=self.costs.of)
            victims = [Victim(each.run_id, each.parts) for each in same]
            groups.append([tuple(victims[:count]) for count in range(len(victims) + 1)])
        return groups

    def _shrinks(self, candidate: Candidate, node_id: str) -> list[Victim]:
        """The ways to shrink a run that lies on this node."""
        slots, step = _slots_on(candidate, node_id), candidate.slot_spec.bundle
        most = min(candidate.spare, len(slots))
        return [
            Victim(candidate.run_id, ((node_id, slots[len(slots) - by :]),), by) for by in range(step, most + 1, step)
        ]

    def _ordered_sets(self, node_id: str) -> Iterator[tuple[tuple[Victim, ...], ...]]:
        """The cheapest first, each time one more; and one accelerator after the other, the cheapest first."""
        runs = sorted(self._local[node_id], key=self.costs.of)
        on_slot: dict[int, list[Candidate]] = {}
        for each in runs:
            for slot in _slots_on(each, node_id):
                on_slot.setdefault(slot, []).append(each)
        by_slot = sorted(on_slot.values(), key=lambda group: sum(map(self.costs.of, group)))
        slot_order = list(dict.fromkeys(each.run_id for group in by_slot for each in group))
        known = {each.run_id: each for each in runs}
        for order in (runs, [known[run_id] for run_id in slot_order]):
            victims = [Victim(each.run_id, each.parts) for each in order]
            level = self._bundles(node_id, ())
            for count in range(1, len(victims) + 1):
                reached = self._bundles(node_id, victims[:count])
                if reached > level:
                    level = reached
                    yield (tuple(self._without_spare(node_id, victims[:count], reached)),)

    def _without_spare(self, node_id: str, victims: Sequence[Victim], reached: int) -> list[Victim]:
        """Add back, the most expensive first, the victims that the node does not need for ``reached`` bundles."""
        kept = list(victims)
        for each in sorted(victims, key=self.costs.of_victim, reverse=True):
            fewer = [other for other in kept if other is not each]
            if self._bundles(node_id, fewer) >= reached:
                kept = fewer
        return kept

    # -- several nodes ------------------------------------------------------------

    def _combine(self, options: list[list[_Option]], needed: int, limit: int | None) -> _Solution | None:
        """The cheapest choice of at most one option a node that makes room for all bundles."""
        options = self._relevant(options, needed)
        count = sum(map(len, options))
        if sum(each[-1].gain for each in options) < needed:
            return None
        taken: dict[int, _Option] = {}
        if needed * count > MAX_COMBINED:
            # The cheapest ones by the bundle, until what is left is small enough to be combined exactly.
            rest = max(MAX_COMBINED // count, 1)
            ranked = sorted(
                ((option.cost // option.gain, number, option) for number, each in enumerate(options) for option in each)
            )
            for _, number, option in ranked:
                if needed <= rest:
                    break
                if number not in taken and option.gain <= needed - rest // 2:
                    taken[number] = option
                    needed -= option.gain
            options = [_beyond(each, taken[number]) if number in taken else each for number, each in enumerate(options)]
        base = sum(option.cost for option in taken.values())
        best = self._knapsack(options, needed, limit - base if limit is not None else None)
        if best is None:
            return None
        cost, numbers = best
        chosen = {**taken, **numbers}
        victims = [victim for option in chosen.values() for victim in option.victims]
        return _Solution(base + cost, victims)

    def _relevant(self, options: list[list[_Option]], needed: int) -> list[list[_Option]]:
        """The nodes that are among the cheapest for some gain: no more of them than bundles can be in use."""
        if len(options) <= needed:
            return options
        by_gain: dict[int, list[tuple[int, int]]] = {}
        for number, each in enumerate(options):
            at = 0
            for gain in range(1, min(each[-1].gain, needed) + 1):
                while each[at].gain < gain:
                    at += 1
                by_gain.setdefault(gain, []).append((each[at].cost, number))
        keep: set[int] = set()
        for costs in by_gain.values():
            keep.update(number for _, number in sorted(costs)[:needed])
        return [options[number] for number in sorted(keep)]

    def _knapsack(
        self, options: Sequence[Sequence[_Option]], needed: int, limit: int | None
    ) -> tuple[int, dict[int, _Option]] | None:
        if needed <= 0:
            return 0, {}
        #: Bundles -> the least cost, and what was chosen for it last.
        best: dict[int, tuple[int, Any]] = {0: (0, None)}
        least = limit
        for number, each in enumerate(options):
            for bundles, (cost, chosen) in list(best.items()):
                if bundles >= needed:
                    continue
                self._steps += len(each)
                for option in each:
                    total, reached = cost + option.cost, min(bundles + option.gain, needed)
                    if least is not None and total >= least:
                        break  # they ascend
                    known = best.get(reached)
                    if known is None or total < known[0]:
                        best[reached] = (total, (number, option, chosen))
                        if reached == needed:
                            least = total
        if needed not in best:
            return None
        cost, at = best[needed]
        found: dict[int, _Option] = {}
        while at is not None:
            number, option, at = at
            found[number] = option
        return cost, found

    # -- what is not needed ---------------------------------------------------------

    def _add_back(self, solution: _Solution, needed: int) -> _Solution:
        """Leave out what is not needed, the dearest first, and shrink no run by more than it takes."""
        kept = {victim.run_id: victim for victim in solution.victims}
        for victim in sorted(solution.victims, key=self.costs.of_victim, reverse=True):
            without = [each for each in kept.values() if each is not victim]
            if self._total(without) >= needed:
                del kept[victim.run_id]
            elif victim.by is not None:
                kept[victim.run_id] = self._least_shrink(victim, without, needed)
        victims = list(kept.values())
        return _Solution(sum(map(self.costs.of_victim, victims)), victims)

    def _least_shrink(self, victim: Victim, others: list[Victim], needed: int) -> Victim:
        candidate = next(each for each in self.problem.candidates if each.run_id == victim.run_id)
        step = candidate.slot_spec.bundle
        while len(victim.freed) > 1 or len(victim.freed[0][1]) > step:
            node_id, slots = victim.freed[-1]
            last = ((node_id, slots[step:]),) if len(slots) > step else ()
            smaller = Victim(victim.run_id, (*victim.freed[:-1], *last), (victim.by or 0) - step)
            if self._total([*others, smaller]) < needed:
                break
            victim = smaller
        return victim

    def _total(self, victims: Iterable[Victim]) -> int:
        """The bundles that fit with these victims gone."""
        changed: dict[str, list[Victim]] = {}
        for victim in victims:
            for node_id, _ in victim.freed:
                if node_id in self._free:
                    changed.setdefault(node_id, []).append(victim)
        return sum(self._free.values()) + sum(
            self._bundles(node_id, there) - self._free[node_id] for node_id, there in changed.items()
        )

    def _gain(self, node_id: str, victims: Sequence[Victim]) -> int:
        return self._bundles(node_id, victims) - self._free[node_id] if node_id in self._free else 0

    def _bundles(self, node_id: str, victims: Sequence[Victim]) -> int:
        """The bundles that fit on the node with these victims gone."""
        problem, slot_spec = self.problem, self.problem.slot_spec
        capacity = problem.nodes[node_id]
        reserved = problem.reserved.get(node_id, ())
        if not victims and not reserved:
            return capacity.fits(slot_spec) // self._bundle
        capacity = capacity.copy()
        for victim in victims:
            candidate = self.costs._of[victim.run_id]
            for home, slots in victim.freed:
                if home == node_id:
                    capacity.release(candidate.slot_spec, slots)
        for other, slots in reserved:
            capacity.allocate(
                other, tuple(s for s in slots if s >= len(capacity.free_milli) or capacity.free_milli[s] >= other.milli)
            )
        return capacity.fits(slot_spec) // self._bundle


def _beyond(options: Sequence[_Option], taken: _Option) -> list[_Option]:
    """What more than the option that is taken already can be had of a node."""
    return [
        _Option(each.gain - taken.gain, each.cost - taken.cost, each.victims)
        for each in options
        if each.gain > taken.gain
    ]


def _slots_on(candidate: Candidate, node_id: str) -> tuple[int, ...]:
    return next(slots for home, slots in candidate.parts if home == node_id)
