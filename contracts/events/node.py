"""Facts about nodes, on ``node.<node_id>.<fact>``. Heartbeats are leases, not facts."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import AwareDatetime, Field, model_validator

from contracts.base import Fact, Sha256, Token

#: Slots of one node: far more than any machine has accelerators or processors.
MAX_NODE_SLOTS = 4096
#: What a drain is bound to: the node's id, or the present life of its agent.
DrainScope = Literal["node", "incarnation"]


class NodeFact(Fact, aggregate="node", id_field="node_id", occurrence="incarnation"):
    node_id: Token
    #: Which life of the agent this is about, so that news of an old one cannot end a new one.
    incarnation: str


class NodeJoined(NodeFact, fact="joined"):
    """The node offers these slots from now on, and keeps a lease while it does."""

    address: str
    slots: int = Field(ge=0)
    accelerator: str = "cpu"
    memory_bytes: int = 0
    slot_memory_bytes: int = 0
    #: Processors for runs that say how many they need; 0: not counted.
    cpus: float = Field(0.0, ge=0)
    #: MIG profile of each slot, '' for a whole accelerator; empty: all are whole.
    slot_profiles: tuple[str, ...] = ()
    #: ``cluster``, ``zone``, ``switch``, ``pool`` and ``capacity`` (on-demand or spot) mean something to the scheduler.
    labels: dict[str, str] = Field(default_factory=dict)
    #: Datasets whose shards lie in the node's cache.
    datasets: tuple[Sha256, ...] = ()
    #: Those whose plain files do, which scripts read; None: the agent is of a version that answers no ``run.staging``.
    data_folders: tuple[Sha256, ...] | None = None
    lease_ttl_s: float = Field(gt=0)
    software: dict[str, str] = Field(default_factory=dict)
    #: Nodes with the same one do arithmetic with the same last bits: processor, accelerator, libraries.
    machine_digest: str = ""
    #: (run_id, generation) whose ranks still run here: a restarted agent has taken them up again.
    running: tuple[tuple[str, int], ...] = ()

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.slots > MAX_NODE_SLOTS:
            raise ValueError(f"slots is {self.slots}, more than {MAX_NODE_SLOTS}")
        if self.slot_profiles and len(self.slot_profiles) != self.slots:
            raise ValueError(f"slot_profiles has {len(self.slot_profiles)} entries for {self.slots} slots")
        if min(self.memory_bytes, self.slot_memory_bytes) < 0:
            raise ValueError("memory_bytes and slot_memory_bytes must not be negative")
        if not math.isfinite(self.cpus) or not math.isfinite(self.lease_ttl_s):
            raise ValueError("cpus and lease_ttl_s must be finite")
        return self


class NodeLeft(NodeFact, fact="left"):
    """The agent stopped in good order; nothing runs there."""

    reason: str = ""


class NodeLost(NodeFact, fact="lost"):
    """The node's lease expired: all ranks there count as dead."""

    reason: str = ""


class NodeDraining(NodeFact, fact="draining"):
    """Nothing new is placed on the node, and the runs there are asked to release it."""

    reason: str = ""
    #: ``node``: until it is undrained, whatever becomes of its agent. ``incarnation``: until its agent joins again, as
    #: every drain before this field.
    scope: DrainScope = "incarnation"
    #: Who asked for it: the user, else the source of the request.
    user: str = ""
    #: When the server stored the request: of two decisions about a node the later request holds.
    requested_at: AwareDatetime | None = None
    request_id: str = ""

    @property
    def occurrence(self) -> str:
        # A node that was undrained may be drained again in the same incarnation.
        return "/".join(filter(None, (self.incarnation, self.request_id)))


class NodeUndrained(NodeFact, fact="undrained", occurrence="incarnation/request_id"):
    """The node takes new runs again, as far as no notice, failed check or maintenance keeps it from that."""

    reason: str = ""
    user: str = ""
    requested_at: AwareDatetime
    request_id: str


class NodeNotice(NodeFact, fact="notice"):
    """The machine's operator takes it away, or may do so. Nothing new is placed there, and its runs are moved."""

    source: str
    kind: str
    #: Seconds that are left; None: unknown.
    grace_s: float | None = None
    detail: str = ""

    @property
    def occurrence(self) -> str:
        # A recommendation to leave may be followed by the order.
        return f"{self.incarnation}/{self.source}/{self.kind}"


class NodeStaged(NodeFact, fact="staged", occurrence="incarnation/run_id"):
    """The node has the files of the data of a run that is staged there, or cannot have them."""

    run_id: Token
    #: The datasets whose files are there, and their size; none if it failed.
    dataset_ids: tuple[Sha256, ...] = ()
    size_bytes: int = Field(0, ge=0)
    seconds: float = Field(0.0, ge=0)
    #: Why it failed; '' if it did not.
    error: str = ""


class NodeUnfit(NodeFact, fact="unfit"):
    """A check of the node's devices failed; nothing is placed there until the agent joins again."""

    reason: str
    slots: tuple[int, ...] = ()
