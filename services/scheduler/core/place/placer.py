"""Which slots a gang gets: all of them at once, out of one ``Space``.

The nodes that will do for a run (``eligible``) are divided into cells: a gang never lies across clusters, an exact run
never across unlike machines, and where it can all of it lies within one zone. In the best cell that has enough, nodes
are taken in the order of ``policy.place.by``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from contracts.events.run import Member
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.place.clusters import FETCH_S, Candidate, choose_cluster
from services.scheduler.core.place.fragmentation import FragmentationScores, rarity_of
from services.scheduler.core.place.maintenance import closed as closed_for
from services.scheduler.core.place.pools import Preferences, kinds_of
from services.scheduler.core.place.resource_request import CAPACITY, CLUSTER, NODE, ResourceRequest, suits
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeCapacity, NodeSlots, has_profiles
from services.scheduler.core.place.strategies import CHOICES
from services.scheduler.core.policy_features import Feature, PolicyFeatures, Shortcut
from services.scheduler.core.state.cluster import Cluster, Node, schedulable_nodes
from services.scheduler.core.state.remaining_time import left_s
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SIMPLE, SlotSpec
from services.scheduler.core.state.suspects import note_suspect


class Placer:
    """Finds slots for runs in one cycle. What it finds out about the present nodes is cached until they change."""

    def __init__(self, cluster: Cluster, policy: Policy, now: datetime, features: PolicyFeatures | None = None) -> None:
        self.cluster, self.policy, self.now = cluster, policy, now
        self.features = features if features is not None else PolicyFeatures.of(policy, now)
        self._memory = cluster.index.memory()
        self.choose = CHOICES.get(policy.place.by) or _fragmentation_scores(cluster).choose
        if self._memory.setdefault("pools", policy.pools) != policy.pools:
            self._memory.clear()
            self._memory["pools"] = policy.pools
        #: Maintenance that is not over; and by run the nodes that it may not have for it.
        self.windows = policy.covers(now) if self.features.has(Feature.MAINTENANCE) else ()
        self._shut: dict[str, frozenset[str]] = {}
        self._preferences: dict[str, Preferences] = {}
        #: Cluster -> slots that runs wait for which can go nowhere else; found out when it is needed.
        self._bound: dict[str, int] | None = None

    def eligible(self, request: ResourceRequest) -> dict[str, Node]:
        """Return the schedulable nodes that suit the request."""
        key: Hashable = ("eligible", request)
        found: dict[str, Node] | None = self._memory.get(key)
        if found is None:
            tier = kinds_of(request.capacity, request.tier, self.policy.pools)
            found, node_id = {}, ""
            try:
                for node_id, node in self.cluster.nodes.items():
                    is_suitable = node.is_schedulable and suits(node, request)
                    if is_suitable and node.labels.get(CAPACITY, "on-demand") in tier:
                        found[node_id] = node
            except Exception as error:
                note_suspect(error, node_id=node_id)
                raise
            self._memory[key] = found
        return found

    def waits_for(self, run: Run, request: ResourceRequest) -> frozenset[str]:
        """Return the nodes on which the run could lie if they were empty: those that it waits for."""
        least = run.spec.slots.min
        key: Hashable = ("waits for", request, least)
        found: frozenset[str] | None = self._memory.get(key)
        if found is None:
            empty = self.empty()
            found = self._memory[key] = frozenset(
                node_id
                for division in self.cells(request)
                for cell in division
                if self._may_lie(cell, request, least)
                and sum(empty.nodes[each].fits(request.slot_spec) for each in cell) >= least
                for node_id in cell
            )
        return found

    def cells(self, request: ResourceRequest) -> list[list[tuple[str, ...]]]:
        """Divisions of the eligible nodes, the one that would be best first."""
        key: Hashable = ("cells", request)
        found: list[list[tuple[str, ...]]] | None = self._memory.get(key)
        if found is None:
            nodes = self.eligible(request)
            found = self._memory[key] = [_divided(nodes, traits) for traits in _divisions(request)]
        return found

    def open_cells(self, run: Run, request: ResourceRequest, closed: Collection[str]) -> list[list[str]]:
        """The cells in which the run may lie now, the best first; without those that are all of a later one.

        A cell that is a part of another one stays only where the run asked to lie together.
        """
        shut = self.shut(run)
        found: list[list[str]] = []
        for division in self.cells(request):
            for cell in division:
                if self._may_lie(cell, request, run.spec.slots.min):
                    nodes = [node_id for node_id in cell if node_id not in closed and node_id not in shut]
                    if nodes and nodes not in found:
                        found.append(nodes)
        if request.topology:
            return found
        sets = [frozenset(nodes) for nodes in found]
        return [nodes for nodes, own in zip(found, sets, strict=True) if not any(own < other for other in sets)]

    def largest(self, request: ResourceRequest) -> int:
        """Return the most slots that such a run could have if all nodes were empty."""
        key: Hashable = ("largest", request)
        found: int | None = self._memory.get(key)
        if found is None:
            found = self._memory[key] = self._most(request, own_kind=request.bound)
        return found

    def empty(self) -> ClusterSnapshot:
        """Return the present nodes as if they were empty; never changed."""
        found: ClusterSnapshot | None = self._memory.get("empty")
        if found is None:
            found = self._memory["empty"] = ClusterSnapshot.empty(self.cluster)
        return found

    def _most(self, request: ResourceRequest, *, own_kind: bool) -> int:
        empty = self.empty()
        counts = [
            sum(empty.nodes[node_id].fits(request.slot_spec) for node_id in cell)
            for division in self.cells(request)
            for cell in division
            if not own_kind or self._alike(cell, request)
        ]
        return max(counts, default=0)

    def _alike(self, cell: tuple[str, ...], request: ResourceRequest) -> bool:
        """Whether the cell's machines are those on which an exact run's state came about."""
        try:
            return not request.machine or self.cluster.nodes[cell[0]].machine == request.machine
        except Exception as error:
            note_suspect(error, node_id=cell[0])
            raise

    def _may_lie(self, cell: tuple[str, ...], request: ResourceRequest, least: int) -> bool:
        """An exact run goes where its state came about; if that can never be, and it is not bound, anywhere."""
        if self._alike(cell, request):
            return True
        if request.bound:
            return False
        key: Hashable = ("own kind", request)
        if key not in self._memory:
            self._memory[key] = self._most(request, own_kind=True)
        return bool(self._memory[key] < least)

    def find(
        self,
        snapshot: ClusterSnapshot,
        run: Run,
        count: int,
        request: ResourceRequest,
        avoid: Collection[str] = (),
        closed: Collection[str] = (),
        respect_maintenance: bool = True,
    ) -> list[NodeSlots] | None:
        """``count`` slots for the run out of ``space``, or None. Nothing is taken yet.

        ``respect_maintenance``: whether nodes are left out whose maintenance begins too soon.
        """
        is_quick = not avoid and not closed and not run.reads_files
        if is_quick and (quick := self._packed(snapshot, count, request)) is not None:
            return quick
        best = self.roomiest(snapshot, run, count, request, closed, respect_maintenance)
        if best is None:
            return None
        capacities, slot_spec = best, request.slot_spec
        good = [capacity for capacity in capacities if capacity.node.node_id not in avoid] if avoid else capacities
        plain = self._plain(good, request)
        for candidates in (plain, good, capacities):
            if candidates is capacities or _enough(candidates, slot_spec, count):
                break
        preferred, _ = self._preferred(candidates, run, slot_spec, count)
        if run.reads_files:
            # Making them takes longer than anything else that nodes differ in here.
            local = [capacity for capacity in preferred if has_data(capacity.node, run)]
            preferred = local if _enough(local, slot_spec, count) else preferred
        return self.choose(preferred, slot_spec, count, avoid)

    def fits(
        self,
        snapshot: ClusterSnapshot,
        run: Run,
        count: int,
        request: ResourceRequest,
        closed: Collection[str] = (),
        respect_maintenance: bool = True,
    ) -> bool:
        """Whether ``find`` finds anything, which it does not in a part of a space where it does not in all of it."""
        if (
            not closed
            and (cell := self._only_cell(request))
            and count > 0
            and snapshot.free_slot_index(cell).total >= count
        ):
            return True
        return self.roomiest(snapshot, run, count, request, closed, respect_maintenance) is not None

    def _packed(self, snapshot: ClusterSnapshot, count: int, request: ResourceRequest) -> list[NodeSlots] | None:
        """What ``find`` comes to where nothing but the number of whole slots counts, without a look at every node;
        None: that is not so, or there are too few."""
        cell = self._only_cell(request)
        if not cell or count <= 0:
            return None
        index = snapshot.free_slot_index(cell)
        if index.total < count:
            return None
        return [
            (node_id, snapshot.nodes[node_id].pick(request.slot_spec, slots)) for node_id, slots in index.packed(count)
        ]

    def _only_cell(self, request: ResourceRequest) -> tuple[str, ...]:
        """The nodes of which any will do, if they only differ in how many whole slots they have; () otherwise."""
        key: Hashable = ("only cell", request, self.policy.digest)
        found: tuple[str, ...] | None = self._memory.get(key)
        if found is None:
            found = self._memory[key] = self._alike_nodes(request)
        return found

    def _alike_nodes(self, request: ResourceRequest) -> tuple[str, ...]:
        if not self.features.allows(Shortcut.WHOLE_SLOTS):
            return ()
        plain = request.slot_spec._replace(accelerators=frozenset()) == SIMPLE and not request.machine
        cells = self.cells(request)[0]
        if not plain or len(cells) != 1 or any(has_profiles(self.cluster.nodes[each]) for each in cells[0]):
            return ()
        return cells[0]

    def shut(self, run: Run) -> frozenset[str]:
        """The nodes that will be in maintenance before the run, started now, is expected to be done, or are."""
        if not self.windows:
            return frozenset()
        found = self._shut.get(run.run_id)
        if found is None:
            found = self._shut[run.run_id] = self.shut_from(run, self.now)
        return found

    def shut_from(self, run: Run, start: datetime) -> frozenset[str]:
        """The same for the run, started at that time."""
        if not self.windows:
            return frozenset()
        end = start + timedelta(seconds=left_s(self.cluster, run, self.now, self.policy) + run.spec.grace_s)
        found, node_id = set(), ""
        try:
            for node_id, node in schedulable_nodes(self.cluster).items():
                if any(closed_for(node_id, node.labels, window, start, end) for window in self.windows):
                    found.add(node_id)
        except Exception as error:
            note_suspect(error, node_id=node_id)
            raise
        return frozenset(found)

    def _preferred(
        self, capacities: list[NodeCapacity], run: Run, slot_spec: SlotSpec, count: int
    ) -> tuple[list[NodeCapacity], int]:
        """Of these rooms those of the pools that the run would rather have, as many pools as it takes; and how far
        down its order that went."""
        pools = self.policy.pools
        if not self.features.has(Feature.POOLS):
            return capacities, 0
        preferences = self._preferences.get(run.run_id)
        if preferences is None:
            preferences = Preferences.of(run.spec, self.policy, left_s(self.cluster, run, self.now, self.policy, 0.5))
            self._preferences[run.run_id] = preferences
        numbers, node_id = [], ""
        try:
            for capacity in capacities:
                node_id = capacity.node.node_id
                numbers.append(preferences.number(capacity.node.labels))
        except Exception as error:
            note_suspect(error, node_id=node_id)
            raise
        there = 0
        for best in sorted({number for number in numbers if number is not None}):
            there += sum(
                capacity.fits(slot_spec) for capacity, number in zip(capacities, numbers, strict=True) if number == best
            )
            if there >= count:
                kept = [
                    capacity
                    for capacity, number in zip(capacities, numbers, strict=True)
                    if number is not None and number <= best
                ]
                return kept, best
        return capacities, len(pools.pools) + 2

    def _plain(self, capacities: list[NodeCapacity], request: ResourceRequest) -> list[NodeCapacity]:
        """Those that are not of a scarce kind, unless the run asked for it."""
        scarce = self.policy.place.scarce
        if not scarce or request.slot_spec.accelerators:
            return capacities
        return [capacity for capacity in capacities if capacity.node.accelerator not in scarce]

    def most(self, snapshot: ClusterSnapshot, run: Run, request: ResourceRequest, closed: Collection[str] = ()) -> int:
        """The most slots that the run could have out of ``space``."""
        shut = self.shut(run)
        counts = [
            sum(
                snapshot.nodes[node_id].fits(request.slot_spec)
                for node_id in cell
                if node_id in snapshot.nodes and node_id not in closed and node_id not in shut
            )
            for division in self.cells(request)
            for cell in division
            if self._may_lie(cell, request, run.spec.slots.min)
        ]
        return max(counts, default=0)

    def roomiest(
        self,
        snapshot: ClusterSnapshot,
        run: Run,
        count: int,
        request: ResourceRequest,
        closed: Collection[str] = (),
        respect_maintenance: bool = True,
    ) -> list[NodeCapacity] | None:
        """The rooms of the best cell that has ``count`` slots for the run."""
        slot_spec, shut = request.slot_spec, self.shut(run) if respect_maintenance else ()
        if snapshot.milli < count * slot_spec.milli:
            return None  # in a full cluster most searches end here
        for division in self.cells(request):
            fitting: list[tuple[str, Candidate, tuple[float, ...], list[NodeCapacity]]] = []
            for cell in division:
                if not self._may_lie(cell, request, run.spec.slots.min):
                    continue
                capacities, total, cached = [], 0, 0
                for node_id in cell:
                    capacity = snapshot.nodes.get(node_id)
                    if capacity is None or node_id in closed or node_id in shut:
                        continue
                    slots = capacity.fits(slot_spec)
                    if slots:
                        capacities.append(capacity)
                        total += slots
                        cached += bool(run.dataset_ids) and has_data(capacity.node, run)
                if total >= count:
                    # An exact run can grow on its own kind alone; any other leaves the large holes to those.
                    slots_left = -total if request.machine is not None else total
                    _, down = self._preferred(capacities, run, slot_spec, count)
                    name = _trait(capacities[0].node, CLUSTER)
                    seen = Candidate(name, total, total, 0, cached / len(capacities), down)
                    fitting.append((name, seen, (down, -min(cached, 1), slots_left), capacities))
            if len(fitting) == 1:
                return fitting[0][3]
            if fitting:
                first = self._clusters(run, count, [seen for _, seen, _, _ in fitting])
                return min(fitting, key=lambda each: (first[each[0]], each[2]))[3]
        return None

    def _clusters(self, run: Run, count: int, seen: list[Candidate]) -> dict[str, int]:
        """The place of each cluster that has room for the run in its order of them."""
        best: dict[str, Candidate] = {}
        for each in seen:
            known = best.get(each.name)
            if known is None or (each.cost, -each.local) < (known.cost, -known.local):
                best[each.name] = each
        if len(best) == 1:
            return dict.fromkeys(best, 0)
        bound, work_s = self._bound_slots(run), left_s(self.cluster, run, self.now, self.policy, 0.5)
        fetch_s = FETCH_S if run.dataset is not None else 0.0
        there = [replace(each, queued=bound.get(each.name, 0)) for each in best.values()]
        ordered = choose_cluster(there, count, work_s, self.policy.predict.prior_s, fetch_s)
        return {each.name: number for number, each in enumerate(ordered)}

    def _bound_slots(self, run: Run) -> dict[str, int]:
        """Return cluster -> slots for which runs wait that can go nowhere else; others should leave them these."""
        if self._bound is None:
            self._bound = {}
            for run_id in self.cluster.queued:
                spec = _spec_of(self.cluster, run_id)
                if len(spec.scheduling.clusters) == 1:
                    name = spec.scheduling.clusters[0]
                    self._bound[name] = self._bound.get(name, 0) + spec.slots.min
        own = run.spec.scheduling.clusters
        return {} if len(own) == 1 else self._bound


def _divisions(request: ResourceRequest) -> list[tuple[str, ...]]:
    """By what the nodes are divided, the best first: machines alike, one zone; then less of it."""
    zone = (request.topology,) if request.topology else ()
    if request.machine is not None:
        found = [(CLUSTER, "machine", *zone), (CLUSTER, "machine")]
    else:
        found = [(CLUSTER, *zone, "machine"), (CLUSTER, *zone), (CLUSTER, "machine"), (CLUSTER,)]
    if request.strict and zone:
        found = [traits for traits in found if request.topology in traits]
    return list(dict.fromkeys(found))


def _divided(nodes: Mapping[str, Node], traits: tuple[str, ...]) -> list[tuple[str, ...]]:
    cells: dict[tuple[str, ...], list[str]] = {}
    for node_id, node in nodes.items():
        cells.setdefault(tuple(_trait(node, trait) for trait in traits), []).append(node_id)
    return [tuple(node_ids) for node_ids in cells.values()]


def _trait(node: Node, trait: str) -> str:
    try:
        if trait == "machine":
            return node.machine
        # A node without the label shares it with no other node.
        return (
            node.node_id if trait == NODE else node.labels.get(trait, "" if trait == CLUSTER else f"({node.node_id})")
        )
    except Exception as error:
        note_suspect(error, node_id=node.node_id)
        raise


def has_data(node: Node, run: Run) -> bool:
    """Whether the node has all data of the run, as the run reads it."""
    try:
        return run.dataset_ids <= (node.data_folders if run.reads_files else node.datasets)
    except Exception as error:
        note_suspect(error, node_id=node.node_id)
        raise


def _fragmentation_scores(cluster: Cluster) -> FragmentationScores:
    """Return the scores for the workload and the nodes as they are by now."""
    index, typical = cluster.index, cluster.workload.typical
    scores = index.find_cache(FragmentationScores)
    memory = index.memory()
    if scores.typical is not typical or "rarity" not in memory:
        slots: Counter[str] = Counter()
        node_id = ""
        try:
            for node in schedulable_nodes(cluster).values():
                node_id = node.node_id
                slots[node.accelerator] += node.slots
        except Exception as error:
            note_suspect(error, node_id=node_id)
            raise
        rarity = memory["rarity"] = rarity_of(typical, slots)
        if scores.typical is not typical or scores.rarity != rarity:
            scores = index.caches[FragmentationScores] = FragmentationScores(typical, rarity)
    return scores


def _spec_of(cluster: Cluster, run_id: str) -> RunSpec:
    try:
        return cluster.runs[run_id].spec
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise


def _enough(capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int) -> bool:
    """Whether the nodes together have ``count`` slots."""
    for capacity in capacities:
        if count <= 0:
            break
        count -= capacity.fits(slot_spec)
    return count <= 0


def members_of(taken: list[NodeSlots]) -> tuple[Member, ...]:
    """The gang's members; ranks count on from node to node."""
    found, rank = [], 0
    for node_id, slots in taken:
        found.append(Member(node_id=node_id, slots=slots, ranks=tuple(range(rank, rank + len(slots)))))
        rank += len(slots)
    return tuple(found)
