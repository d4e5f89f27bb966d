"""The nodes that there are, and those that there could be, in one snapshot: what waiting runs would use of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from contracts.scheduling import Policy, Pool
from contracts.spec.run import RunSpec
from services.scheduler.core.place.pools import Preferences, capacity_of, checkpoint_interval_s, in_order
from services.scheduler.core.place.resource_request import ResourceRequest, resource_request_of, suits
from services.scheduler.core.place.snapshot import ClusterSnapshot, NodeCapacity, NodeSlots
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.run import Run

#: Pool, kind of capacity, cluster and accelerator: nodes that are alike in these are alike to any run.
_Kind = tuple[str, str, str, str]


@dataclass(slots=True)
class HypotheticalCapacity:
    """The nodes that there are, and those that there could be, in one snapshot."""

    policy: Policy
    cluster: Cluster
    snapshot: ClusterSnapshot
    #: Nodes with something free, by what is alike to every run: pool, capacity, cluster and accelerator.
    present: dict[_Kind, list[str]] = field(default_factory=dict)
    #: Pool -> a node of it, how many more there may be, those that were imagined, and the runs that they are for.
    template: dict[str, Node] = field(default_factory=dict)
    addable: dict[str, int] = field(default_factory=dict)
    added: dict[str, list[str]] = field(default_factory=dict)
    run_ids: dict[str, list[str]] = field(default_factory=dict)
    #: Nodes on which slots were taken to a run that waits.
    used_nodes: set[str] = field(default_factory=set)
    #: What did not fit. There is never more of it later on, so that its like need not be tried.
    refused: set[tuple[object, ...]] = field(default_factory=set)

    @classmethod
    def of(cls, cluster: Cluster, policy: Policy, timed_out: set[str], now: datetime) -> HypotheticalCapacity:
        joined = {node.labels.get("pool", ""): node for node in cluster.nodes.values()}
        pools = tuple(_with_profiles(pool, joined.get(pool.name)) for pool in policy.pools.pools)
        if pools != policy.pools.pools:
            policy = policy.model_copy(update={"pools": policy.pools.model_copy(update={"pools": pools})})
        found = cls(policy, cluster, ClusterSnapshot.free(cluster).copy())
        counts: dict[str, int] = {}
        for node_id, capacity in found.snapshot.nodes.items():
            labels, name = capacity.node.labels, capacity.node.labels.get("pool", "")
            counts[name] = counts.get(name, 0) + 1
            kind = (name, capacity_of(labels), labels.get("cluster", ""), capacity.node.accelerator)
            found.present.setdefault(kind, []).append(node_id)
        retried_before = now - timedelta(seconds=policy.pools.retry_s)
        for pool in policy.pools.pools:
            known = cluster.capacity.get(pool.name)
            is_resting = known is not None and known.gave_up_at is not None and known.gave_up_at > retried_before
            left = 0 if is_resting or pool.name in timed_out else pool.max_nodes - counts.get(pool.name, 0)
            found.addable[pool.name] = max(left, 0)
            found.template[pool.name] = _node_of(pool, joined.get(pool.name))
        return found

    def serve(self, run: Run, work_s: float | None) -> None:
        """Find slots for all of the run: on present nodes, else with new ones of one pool, else of several."""
        spec = run.spec
        like = (spec.slots.min, spec.resources, spec.gang, spec.scheduling, checkpoint_interval_s(spec), _exact(spec))
        if like in self.refused:
            return
        request = resource_request_of(self.cluster, run)
        ordered = [
            pool for pool in in_order(spec, self.policy, work_s) if self._could_hold(self.template[pool.name], request)
        ]
        present = self._suitable(run, request, work_s)
        if self._fill(run, [node_id for _, node_ids in present for node_id in node_ids], ()):
            return
        # A run that must stay on machines of one kind stays in one pool; none lies across clusters.
        choices: list[tuple[Pool, ...]] = [(pool,) for pool in ordered]
        if not _exact(spec):
            clusters = dict.fromkeys(pool.cluster for pool in ordered)
            choices += [tuple(pool for pool in ordered if pool.cluster == cluster) for cluster in clusters]
        for pools in choices:
            near = [
                node_id
                for kind, node_ids in present
                for node_id in node_ids
                if (kind[0] == pools[0].name if _exact(spec) else kind[2] == (pools[0].cluster or ""))
            ]
            if self._fill(run, near, pools):
                return
        self.refused.add(like)

    def _could_hold(self, node: Node, request: ResourceRequest) -> bool:
        """Whether an empty node like this holds any part of such a run."""
        return suits(node, request) and NodeCapacity.of(node, empty=True).fits(request.slot_spec) > 0

    def _suitable(self, run: Run, request: ResourceRequest, work_s: float | None) -> list[tuple[_Kind, list[str]]]:
        """Return the present nodes that suit the run, its first choice first."""
        preferences = Preferences.of(run.spec, self.policy, work_s)
        found = []
        for kind, node_ids in self.present.items():
            number = preferences.number({"pool": kind[0], "capacity": kind[1]})
            if number is not None:
                nodes = [node_id for node_id in node_ids if suits(self.snapshot.nodes[node_id].node, request)]
                found.append((number, kind, nodes))
        return [(kind, nodes) for _, kind, nodes in sorted(found, key=lambda each: each[:2])]

    def _fill(self, run: Run, present: Sequence[str], pools: Sequence[Pool]) -> bool:
        """Put all of the run on these nodes and on nodes of these pools, or nothing of it."""
        slot_spec, missing = run.slot_spec, run.spec.slots.min
        taken: list[tuple[str, bool, NodeSlots]] = []
        for name, is_new, node_id in self._nodes(present, pools):
            if is_new:
                node = replace(self.template[name], node_id=node_id)
                self.snapshot.put(node_id, NodeCapacity.of(node, empty=True))
            count = min(self.snapshot.nodes[node_id].fits(slot_spec), missing)
            if count <= 0:
                if is_new:
                    self.snapshot.remove(node_id)
                continue
            slots = (node_id, self.snapshot.nodes[node_id].pick(slot_spec, count))
            self.snapshot.allocate(slot_spec, [slots])
            taken.append((name, is_new, slots))
            missing -= count
            if missing <= 0:
                self._record(run, taken)
                return True
        for _, is_new, slots in taken:
            self.snapshot.release(slot_spec, [slots])
            if is_new:
                self.snapshot.remove(slots[0])
        return False

    def _nodes(self, present: Sequence[str], pools: Sequence[Pool]) -> Iterator[tuple[str, bool, str]]:
        """Yield (pool, whether it is imagined anew, node); the pool is '' for present nodes."""
        yield from (("", False, node_id) for node_id in present)
        for pool in pools:
            yield from ((pool.name, False, node_id) for node_id in self.added.get(pool.name, ()))
        for pool in pools:
            first = len(self.added.get(pool.name, ()))
            yield from ((pool.name, True, f"{pool.name}/{first + number}") for number in range(self.addable[pool.name]))

    def _record(self, run: Run, taken: Sequence[tuple[str, bool, NodeSlots]]) -> None:
        self.used_nodes.update(node_id for name, _, (node_id, _) in taken if not name)
        for name, is_new, (node_id, _) in taken:
            if is_new:
                self.addable[name] -= 1
                self.added.setdefault(name, []).append(node_id)
        for name in sorted({name for name, *_ in taken if name}):
            self.run_ids.setdefault(name, []).append(run.run_id)
        full = {node_id for _, _, (node_id, _) in taken if not self.snapshot.nodes[node_id].total_milli}
        if full and run.slot_spec.milli:  # no run finds slots there
            for node_ids in self.present.values():
                node_ids[:] = [node_id for node_id in node_ids if node_id not in full]


def _with_profiles(pool: Pool, joined: Node | None) -> Pool:
    """Return the pool with the MIG profiles of a node that has joined, unless the policy names them."""
    if pool.slot_profiles or joined is None or len(joined.profiles) != pool.slots_per_node:
        return pool
    return pool.model_copy(update={"slot_profiles": joined.profiles})


def _node_of(pool: Pool, joined: Node | None) -> Node:
    """Return a node as the pool has them: as the policy describes it, else as one that has joined is."""
    slots = pool.slots_per_node
    labels = {"pool": pool.name, "capacity": pool.capacity} | ({"cluster": pool.cluster} if pool.cluster else {})
    cpu_milli = round(pool.cpus_per_node * 1000) or (joined.cpu_milli if joined is not None else 0)
    memory = pool.memory_bytes_per_node or (joined.memory_bytes if joined is not None else 0)
    return Node(
        pool.name,
        "",
        slots,
        1.0,
        accelerator=pool.accelerator,
        labels=labels,
        cpu_milli=cpu_milli,
        memory_bytes=memory,
        profiles=pool.slot_profiles,
    )


def _exact(spec: RunSpec) -> bool:
    """Whether it matters to the run that its nodes are alike."""
    training = spec.training
    return training is not None and training.logical_ranks is not None and training.heterogeneous_nodes == "avoid"
