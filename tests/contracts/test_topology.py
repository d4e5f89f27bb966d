"""Who may publish and who reads each event, and that the services follow the topology."""

from __future__ import annotations

from typing import Any

import pytest

from contracts import topology
from contracts.base import Event, Fact
from contracts.events import BY_TYPE, FACTS, REQUESTS
from contracts.events.run import RunCancelled
from services.autoscaler.core.state import ALLOCATION_FACTS, STATE_FACTS
from services.checkpoint.core.ledger import LEDGER_FACTS
from services.evaluation.core.state import FOLDED
from services.kit.bus import Bus
from services.worker.agent.agent import FOLLOWED

EVENTS = tuple(BY_TYPE.values())


def test_every_event_has_a_producer_a_stream_and_a_reader() -> None:
    for event in EVENTS:
        assert topology.producers_of(event), event
        assert topology.consumers_of(event), event
        assert topology.stream_of(event).name in {"REQUESTS", "FACTS", "PROGRESS", "LOGS"}


def test_every_request_is_answered_by_a_service() -> None:
    handled = {event for consumer in topology.CONSUMERS for event in consumer.events}
    assert set(REQUESTS) <= handled


def test_clients_publish_requests_and_no_facts() -> None:
    assert all(topology.CLIENTS in topology.producers_of(event) for event in REQUESTS)
    assert not any(topology.CLIENTS in topology.producers_of(event) for event in FACTS)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.type)
@pytest.mark.parametrize("service", sorted(topology.SERVICES))
def test_a_service_publishes_its_own_events_only(service: str, event: type[Event]) -> None:
    if event in topology.SERVICES[service].publishes:
        topology.require_producer(service, event)
    else:
        with pytest.raises(topology.WrongProducer, match=f"{service} may not publish {event.type}"):
            topology.require_producer(service, event)


async def test_the_bus_refuses_what_belongs_to_another_service(make_bus: Any) -> None:
    bus: Bus = await make_bus("tracking")
    with pytest.raises(topology.WrongProducer, match=r"tracking may not publish .*cancelled.* belongs to scheduler"):
        await bus.publish(RunCancelled(run_id="r1", reason="x"))
    with pytest.raises(topology.WrongProducer):
        bus.build_message(RunCancelled(run_id="r1", reason="x"))
    assert await bus.get_last_sequence("run.r1.cancelled") == 0


@pytest.mark.parametrize(
    ("service", "followed"),
    [
        ("autoscaler", (*STATE_FACTS, *ALLOCATION_FACTS)),
        ("checkpoint", LEDGER_FACTS),
        ("evaluation", FOLDED),
        ("worker", FOLLOWED),
    ],
)
def test_what_a_service_follows_stands_in_the_topology(service: str, followed: tuple[type[Fact], ...]) -> None:
    assert set(followed) <= set(topology.SERVICES[service].follows)
