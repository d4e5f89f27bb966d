"""Facts about wanted capacity (``capacity.<pool>.wanted``) and the policy in force (``policy.<digest>.adopted``)."""

from __future__ import annotations

from pydantic import Field

from contracts.base import Fact, Instant, Token
from contracts.events.run import DecisionRecord
from contracts.lenient import Lenient
from contracts.scheduling import Policy


class CapacityWanted(
    Fact, aggregate="capacity", fact="wanted", id_field="pool", occurrence="decided_at_sequence/nodes"
):
    """The total number of nodes that a pool needs. An autoscaler acts on the newest fact of each pool."""

    pool: Token
    nodes: int = Field(ge=0)
    #: The runs that wait for them.
    run_ids: tuple[Token, ...] = ()
    reason: str = ""
    #: Nodes of the pool that have been idle for so long that they may go; they are drained before they are stopped.
    spare: tuple[Token, ...] = ()
    #: Nodes that were wanted did not come in time; the pool is left alone for a while.
    timed_out: bool = False
    decided_at: Instant
    decided_at_sequence: int = 0
    decision: DecisionRecord | None = None


class PolicyAdopted(Fact, aggregate="policy", fact="adopted", id_field="digest", occurrence="after_sequence"):
    """The leading scheduler decides by this policy from now on."""

    digest: Token
    policy: Lenient[Policy]
    instance: str = ""
    #: Sequence of the fact before it, which distinguishes two adoptions of one policy.
    after_sequence: int = 0
