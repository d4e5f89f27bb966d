"""The rendezvous of a generation's ranks: address and port of rank 0, chosen by its node, read by the others."""

from __future__ import annotations

import asyncio
import socket

import nats.errors
import structlog
from nats.js.errors import APIError, BadRequestError

from contracts import topology
from contracts.events.run import Member, RunPlaced
from services.kit.bus import Bus, TransientError

log = structlog.get_logger(__name__)

#: Seconds until a failed write to the bus is repeated.
RETRY_S = 0.1


async def find_master(bus: Bus, placed: RunPlaced, member: Member, address: str, timeout_s: float) -> tuple[str, int]:
    """Return (address, port) of the generation's rank 0. ``address`` is this node's own.

    Raises:
        TransientError: rank 0's node did not publish it in time.
    """
    key = f"{placed.run_id}.{placed.generation}"
    if sum(1 for each in placed.members if each.ranks) == 1:
        return address, free_port(address)
    try:
        async with asyncio.timeout(timeout_s):
            if 0 in member.ranks:
                await _publish_master(bus, key, f"{address}:{free_port(address)}".encode())
            # One subscription: the other nodes learn of it at once. The first value stands.
            async for entries in bus.follow_bucket(topology.RENDEZVOUS, key, idle_s=1.0):
                for entry in entries:
                    if entry.value:
                        return _parse_address(entry.value)
    except TimeoutError:
        pass
    raise TransientError(f"rank 0's node did not publish its address within {timeout_s:.0f} s")


async def _publish_master(bus: Bus, key: str, value: bytes) -> None:
    """Publish where rank 0 listens, unless an earlier life of this agent did."""
    bucket = await bus.open_bucket(topology.RENDEZVOUS)
    while True:
        try:
            await bucket.create(key, value)
            return
        except BadRequestError:
            log.info("the rendezvous was published before", key=key)
            return
        except (nats.errors.Error, APIError, TimeoutError) as error:
            log.warning("the rendezvous cannot be published", error=repr(error))
            await asyncio.sleep(RETRY_S)


def free_port(address: str) -> int:
    """Return a port that is free now. If it is taken before the ranks listen, that is an infrastructure failure."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _parse_address(value: bytes) -> tuple[str, int]:
    host, _, port = value.decode().rpartition(":")
    return host, int(port)
