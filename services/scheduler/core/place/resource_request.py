"""The request of a run: where it may lie, and how many slots are of use to it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from contracts.scheduling import Policy
from services.scheduler.core.state.cluster import Cluster, Node, schedulable_nodes
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import SlotSpec
from services.scheduler.core.state.suspects import note_suspect

#: Labels of nodes that mean something here.
CLUSTER, CAPACITY, NODE = "cluster", "capacity", "node"


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """All of a run that decides where it may lie; runs with the same request share what is cached for it."""

    slot_spec: SlotSpec
    clusters: tuple[str, ...]
    capacity: str
    tier: str
    #: Exact runs lie on machines of one kind: on this one, '' for any one; None: it does not matter.
    machine: str | None
    #: Whether it may go elsewhere when there is none of that kind.
    bound: bool
    #: The label of nodes that all of it should share, and whether it must.
    topology: str
    strict: bool
    #: The hash, which is needed many times in a cycle.
    hashed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        traits = tuple(getattr(self, each.name) for each in fields(self) if each.compare)
        object.__setattr__(self, "hashed", hash(traits))

    def __hash__(self) -> int:
        return self.hashed


def resource_request_of(cluster: Cluster, run: Run) -> ResourceRequest:
    """Return the request of the run; one object for all runs with the same one."""
    if run.request is None:
        found = _build_request(run)
        run.request = cluster.index.request.setdefault(found, found)
    assert isinstance(run.request, ResourceRequest)
    return run.request


def _build_request(run: Run) -> ResourceRequest:
    spec = run.spec
    exact = run.exact
    return ResourceRequest(
        slot_spec=run.slot_spec,
        clusters=spec.scheduling.clusters,
        capacity=spec.scheduling.capacity,
        tier=spec.scheduling.tier or "",
        machine=(run.machine or run.inherited_machine) if exact else None,
        bound=run.bound,
        topology=spec.gang.together or "",
        strict=spec.gang.strict,
    )


def avoided(cluster: Cluster, run: Run, policy: Policy) -> frozenset[str]:
    """The nodes on which the run kept failing by no fault of its own, or is not to be again."""
    if not run.strikes:
        return frozenset(run.excluded_nodes)
    found, node_id = set(run.excluded_nodes), ""
    strikes = run.strikes
    try:
        for node_id, node in schedulable_nodes(cluster).items():
            if strikes.get(node.incarnation, 0) >= policy.faults.avoid_node_after:
                found.add(node_id)
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return frozenset(found)


def useful(run: Run, slots: int) -> int:
    """The slots out of ``slots`` that make the run's step shorter; never below its minimum.

    A step takes as long as the process with the most logical ranks: of four logical ranks one has two, on two
    processes as on three.
    """
    bundle = run.slot_spec.bundle
    slots = max(slots - slots % bundle, run.spec.slots.min)
    training = run.spec.training
    if training is None or training.logical_ranks is None or run.spec.kind != "train":
        return slots
    logical = training.logical_ranks
    most = -(-logical // min(slots, logical))
    least = -(-logical // most)
    return max(least + -least % bundle, run.spec.slots.min)


def suits(node: Node, request: ResourceRequest) -> bool:
    """Whether such a run may ever lie on this node, however full it is."""
    slot_spec = request.slot_spec
    if slot_spec.accelerators and node.accelerator not in slot_spec.accelerators:
        return False
    if slot_spec.milli and slot_spec.profile and slot_spec.profile not in node.profiles:
        return False
    if request.clusters and node.labels.get(CLUSTER, "") not in request.clusters:
        return False
    return request.capacity == "any" or node.labels.get(CAPACITY, "on-demand") == request.capacity
