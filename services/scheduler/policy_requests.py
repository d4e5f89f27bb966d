"""Requests for another policy: each is answered once, by whichever instance gets it."""

from __future__ import annotations

import structlog

from contracts import subjects, topology
from contracts.base import request_id_for
from contracts.envelope import Envelope
from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from contracts.texts import describe
from services.kit.bus import Bus, Conflict, ExpectedSequence, Message, PoisonMessage
from services.scheduler.cluster_cache import ClusterCache

log = structlog.get_logger(__name__)


class PolicyRequests:
    """Turns ``adopt_policy.requested`` into ``policy.<digest>.adopted``, fenced by the adoption before it."""

    def __init__(self, bus: Bus, cache: ClusterCache) -> None:
        self.bus, self.cache = bus, cache

    def register(self) -> None:
        self.bus.subscriber(topology.SCHEDULER_REQUESTS, AdoptPolicyRequested)(self.on_adopt_policy)

    async def on_adopt_policy(self, received: Message[AdoptPolicyRequested]) -> None:
        """Adopt the policy of a request, unless another one than it replaces is in force."""
        request_id = request_id_for(received.envelope.source, received.envelope.type, received.envelope.id)
        while True:
            await self.cache.catch_up()
            adopted, after_sequence = self.cache.cluster.adopted, self.cache.cluster.policy_sequence
            if await self._is_answered(request_id):
                log.info("already answered", request_id=request_id)
                return
            fact = answer_adopt_policy(received, adopted).model_copy(
                update={
                    "request_id": request_id,
                    "after_sequence": after_sequence,
                    "instance": self.bus.settings.instance,
                }
            )
            if await self._publish(fact, received.envelope):
                log.info("policy adopted", policy=fact.policy.name, digest=fact.digest, user=fact.user)
                return

    async def _publish(self, fact: PolicyAdopted, cause: Envelope) -> bool:
        """Publish an adoption; False if another one came first, perhaps of the same policy."""
        expected = ExpectedSequence(fact.after_sequence, PolicyAdopted.subject_filter())
        try:
            return not (await self.bus.publish(fact, cause, expected=expected)).duplicate
        except Conflict:
            return False

    async def _is_answered(self, request_id: str) -> bool:
        """Whether the request was refused or adopted before: by now its answer could be another one."""
        if await self.bus.get_last_sequence(subjects.refused(request_id)):
            return True
        adoptions = await self.bus.read_history(PolicyAdopted.subject_filter())
        return any(each.event.request_id == request_id for each in adoptions)


def answer_adopt_policy(received: Message[AdoptPolicyRequested], adopted: PolicyAdopted | None) -> PolicyAdopted:
    """Return the adoption that a request leads to.

    Raises:
        PoisonMessage: the policy in force is not the one that the request replaces.
    """
    request = received.event
    if request.replaces is not None and (adopted is None or adopted.digest != request.replaces):
        in_force = describe(adopted) if adopted is not None else "no policy has been adopted yet"
        raise PoisonMessage(
            f"the request replaces policy {request.replaces}, which is not in force: {in_force}. See what has changed "
            "(`trainbus policy diff FILE`), and apply the policy again"
        )
    return PolicyAdopted(
        digest=request.policy.digest,
        policy=request.policy,
        origin="request",
        user=request.user or received.envelope.source,
        reason=request.reason,
    )
