"""The scheduler's shell: folds the log, answers requests, and, while it leads, decides.

Every instance folds and every instance answers requests: an answer is a fact that is fenced on its
own (``accepted`` and ``rejected`` expect a run without facts, ``cancelling`` has one id, of two
decisions about a node's drain the one of the later request holds, and a policy is adopted in place of
the one before it), so it needs no leader and costs no time when the leader dies. ``core.decide`` decides
everything that changes slots or ends a run, on the one instance that holds the lease.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import Field

from contracts import subjects, topology
from contracts.base import run_id_for
from contracts.envelope import EnvelopeError, InvalidData, RawMessage, open_envelope
from contracts.events.node import NodeDraining, NodeUndrained
from contracts.events.run import DecisionRecord, RunCancelling
from contracts.events.train import (
    CancelRequested,
    DrainRequested,
    RestoreRequested,
    TrainRequested,
    UndrainRequested,
)
from contracts.scheduling import Policy
from services.kit.bus import Conflict, ExpectedSequence, Message, PoisonMessage, TransientError
from services.kit.clock import Clock
from services.kit.service import Service
from services.kit.settings import Settings
from services.scheduler import policies
from services.scheduler.capacity_publisher import CapacityPublisher
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.core import admission
from services.scheduler.core.decisions import AcceptRun, RejectRun, answer_fact
from services.scheduler.core.state.cluster import Node
from services.scheduler.core.state.run import Run
from services.scheduler.leader import CyclePacer, Leader
from services.scheduler.policy_in_force import PolicyInForce
from services.scheduler.policy_requests import PolicyRequests
from services.scheduler.queries import Forecast, serve_queries

#: Times that a request about an unknown run is tried again: its ``train.requested`` may be in the hands
#: of another instance at this moment.
UNKNOWN_RETRIES = 2

log = structlog.get_logger(__name__)


class SchedulerSettings(Settings):
    """The scheduler's own settings. All of them make the first policy; the log's is in force from then on.

    What is set besides the policy takes the place of the policy's own value.
    """

    #: The first policy, where nobody has chosen one yet: its name, or a file with it (TOML or JSON), see
    #: ``services/scheduler/policies``. Later ones are adopted by request.
    policy: str | None = None
    #: A run grows only after it has had its slots, and no slot has changed hands, for this time.
    resize_interval_s: float | None = Field(None, ge=0)
    #: What it costs to restart a run: seconds until it trains again on its new slots.
    resume_cost_s: float | None = Field(None, ge=0)
    #: How long a placement may take until its ranks run, downloads included; then it is revoked.
    start_deadline_s: float | None = Field(None, gt=0)
    #: How long after the grace period a node may take to release a run before it counts as lost.
    release_deadline_s: float | None = Field(None, gt=0)
    #: Generations in a row that nodes may break, without a new checkpoint, before the run fails.
    max_infrastructure_failures: int | None = Field(None, ge=1)
    #: How long a run that has ended waits for its final checkpoint to be committed.
    final_checkpoint_wait_s: float | None = Field(None, ge=0)


#: Setting -> the part of the policy that it belongs to.
_PARTS = {
    "resize_interval_s": "elastic",
    "resume_cost_s": "preemption",
    "start_deadline_s": "faults",
    "release_deadline_s": "faults",
    "max_infrastructure_failures": "faults",
    "final_checkpoint_wait_s": "faults",
}


def policy_of(settings: SchedulerSettings) -> PolicyInForce:
    """Return the policy in force, of which the first is what the settings name, with what they say besides.

    Raises:
        policies.PolicyError: there is no such policy, or it is not valid.
    """
    values = {name: getattr(settings, name) for name in _PARTS}
    changes = [f"{_PARTS[name]}.{name}={value}" for name, value in values.items() if value is not None]
    given = None if settings.policy is None else policies.with_settings(settings.policy, changes)
    return PolicyInForce(given, changes)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A scheduler's parts."""

    service: Service
    cache: ClusterCache
    leader: Leader


def build(settings: Settings) -> Service:
    """Make a scheduler: a leader or a standby, as the lease decides."""
    return assemble(settings).service


def assemble(
    settings: Settings, policy: Policy | None = None, *, clock: Clock | None = None, pace: CyclePacer | None = None
) -> Scheduler:
    """Make a scheduler out of its parts. With a clock and a pace of its own it lives in a simulation."""
    own = SchedulerSettings.of(settings)
    service = Service("scheduler", own, clock)
    cache = ClusterCache(service.bus, virtual=clock is not None)
    in_force = policy_of(own) if policy is None else PolicyInForce(policy)
    leader = Leader(service.bus, cache, in_force, own, pace)
    Requests(service, cache).register()
    PolicyRequests(service.bus, cache).register()
    service.add_background_task(cache.follow)
    service.add_background_task(cache.keep_time)
    service.add_background_task(leader.lead)
    service.add_background_task(leader.watch_nodes)
    service.add_background_task(CapacityPublisher(service.bus, cache, leader).run)
    forecast = Forecast(leader)
    service.add_background_task(forecast.run)
    service.add_resource(serve_queries(leader, forecast))
    service.add_readiness_check("folded", lambda: cache.caught_up.is_set())
    return Scheduler(service, cache, leader)


class Requests:
    """Turns requests into facts; decides nothing about slots."""

    def __init__(self, service: Service, cache: ClusterCache) -> None:
        self.bus = service.bus
        self.cache = cache

    def register(self) -> None:
        consumer = topology.SCHEDULER_REQUESTS
        self.bus.subscriber(consumer, TrainRequested, on_invalid=self.on_invalid)(self.on_train)
        self.bus.subscriber(consumer, CancelRequested)(self.on_cancel)
        self.bus.subscriber(consumer, RestoreRequested)(self.on_restore)
        self.bus.subscriber(consumer, DrainRequested)(self.on_drain)
        self.bus.subscriber(consumer, UndrainRequested)(self.on_undrain)

    async def on_train(self, received: Message[TrainRequested]) -> None:
        run_id = run_id_for(received.envelope.source, received.envelope.id)
        if admission.depends_on_log(received.event):
            await self.cache.catch_up()
        await self._answer(received, admission.answer_train(self.cache.cluster, run_id, received.event))

    async def on_restore(self, received: Message[RestoreRequested]) -> None:
        await self.cache.catch_up()
        run_id = run_id_for(received.envelope.source, received.envelope.id)
        try:
            parent = self._run(received, "restore")
        except PoisonMessage as error:
            await self._answer(received, RejectRun(run_id, None, str(error)))
            return
        await self._answer(received, admission.answer_restore(parent, run_id, received.event))

    async def on_cancel(self, received: Message[CancelRequested]) -> None:
        if received.event.run_id not in self.cache.cluster.runs:
            await self.cache.catch_up()
        run = self._run(received, "cancel")
        if run.terminal:
            log.info("nothing to cancel, the run is over", run_id=run.run_id, phase=str(run.phase))
            return
        fact = RunCancelling(run_id=run.run_id, reason=received.event.reason)
        await self.bus.publish(fact, received.envelope)

    async def on_drain(self, received: Message[DrainRequested]) -> None:
        node = await self._find_node(received, "drain")
        fact = NodeDraining(**_drain_fields(received, node), scope=received.event.scope)
        await self.bus.publish(fact, received.envelope)

    async def on_undrain(self, received: Message[UndrainRequested]) -> None:
        node = await self._find_node(received, "undrain")
        await self.bus.publish(NodeUndrained(**_drain_fields(received, node)), received.envelope)

    async def _find_node(self, received: Message[DrainRequested] | Message[UndrainRequested], verb: str) -> Node:
        """Return the node of a request. It may be away: a drain waits for its return."""
        await self.cache.catch_up()
        node = self.cache.cluster.nodes.get(received.event.node_id)
        if node is None:
            known = ", ".join(sorted(self.cache.cluster.nodes)) or "none"
            raise PoisonMessage(f"no node {received.event.node_id!r} to {verb}; these have joined: {known}")
        return node

    async def on_invalid(self, raw: RawMessage, error: InvalidData) -> bool:
        """Reject a request that would have made a run, with the reason."""
        if error.envelope.type not in (TrainRequested.type, RestoreRequested.type):
            return False
        data = None
        with suppress(EnvelopeError):
            _, data = open_envelope(raw)
        run_id = run_id_for(error.envelope.source, error.envelope.id)
        rejection = admission.answer_invalid(run_id, data, error.problems)
        fact = answer_fact(rejection, error.envelope.id, error.envelope.source, self._made())
        try:
            await self.bus.publish(fact, error.envelope, expected=_nothing_yet(run_id))
        except Conflict:
            log.info("already answered", run_id=run_id)
        return True

    async def _answer(
        self, received: Message[TrainRequested] | Message[RestoreRequested], answer: AcceptRun | RejectRun
    ) -> None:
        fact = answer_fact(answer, received.envelope.id, received.envelope.source, self._made())
        try:
            await self.bus.publish(fact, received.envelope, expected=_nothing_yet(answer.run_id))
        except Conflict:
            # The same request came before: it is one run for ever.
            log.info("already answered", run_id=answer.run_id)

    def _made(self) -> DecisionRecord:
        """From what an answer is made that is made now."""
        return DecisionRecord(at_sequence=self.cache.cluster.sequence, at=self.cache.now())

    def _run(self, received: Message[CancelRequested] | Message[RestoreRequested], verb: str) -> Run:
        run_id = received.event.run_id
        run = self.cache.cluster.runs.get(run_id)
        if run is not None:
            return run
        text = f"no run has the id {run_id!r}, so there is nothing to {verb}: take it from the accepted fact"
        raise TransientError(text) if received.deliveries <= UNKNOWN_RETRIES else PoisonMessage(text)


def _drain_fields(received: Message[DrainRequested] | Message[UndrainRequested], node: Node) -> dict[str, Any]:
    """Return what both facts about a node's drain have."""
    request, envelope = received.event, received.envelope
    return {
        "node_id": node.node_id,
        "incarnation": node.incarnation,
        "reason": request.reason,
        "user": request.user or envelope.source,
        "requested_at": received.stored_at or envelope.time,
        "request_id": envelope.id,
    }


def _nothing_yet(run_id: str) -> ExpectedSequence:
    return ExpectedSequence(0, subjects.run(run_id))
