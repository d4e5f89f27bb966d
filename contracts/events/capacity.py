"""Facts about wanted capacity (``capacity.<pool>.wanted``) and the policy in force (``policy.<digest>.adopted``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_serializer

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


#: What led to an adoption: nobody's choice, a setting of the first scheduler, or a request.
PolicyOrigin = Literal["default", "setting", "request"]


class PolicyAdopted(
    Fact, aggregate="policy", fact="adopted", id_field="digest", occurrence="after_sequence", version=2
):
    """The scheduler decides by this policy from its next cycle on, whichever of its processes leads."""

    digest: Token
    policy: Lenient[Policy]
    instance: str = ""
    #: Sequence of the fact before it, which distinguishes two adoptions of one policy.
    after_sequence: int = 0
    #: None: a log from before this field.
    origin: PolicyOrigin | None = None
    #: What the first scheduler's settings change of the default policy; each version's own default keeps them.
    settings: tuple[str, ...] = ()
    #: Who asked for it: the user, else the source of the request; and why.
    user: str = ""
    reason: str = ""
    #: The request, as ``request_id_for`` has it: one is answered once.
    request_id: str = ""

    @field_serializer("policy")
    def _write_whole(self, policy: Policy) -> dict[str, Any]:
        # With its defaults: those of another version are another policy.
        return policy.model_dump(mode="json")
