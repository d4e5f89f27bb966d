"""Ways to have machines: each is an ``Adapter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from contracts.scheduling import Pool
from services.autoscaler.core.decide import Machine


class AdapterError(Exception):
    """The machines' provider failed this time; the text is the reason."""


class Adapter(Protocol):
    """A provider of machines. Each machine runs an agent whose node has the machine's id and the pool's labels.

    Every call may be made again after a crash: what there is counts, not what was asked for.

    Raises:
        AdapterError: the provider failed this time.
    """

    async def nodes(self, pool: Pool) -> list[Machine]:
        """The machines of the pool that were started and not stopped, also those that are not ready yet."""
        ...

    async def start(self, pool: Pool, count: int) -> list[str]:
        """Start this many more machines and return their node ids, without waiting until they are ready."""
        ...

    async def stop(self, pool: Pool, node_ids: Sequence[str]) -> None:
        """Stop these machines for good. One that no longer exists is no error."""
        ...


def labels_of(pool: Pool) -> dict[str, str]:
    """What the nodes of a pool say of themselves."""
    return {
        "pool": pool.name,
        "capacity": pool.capacity,
        **({"cluster": pool.cluster} if pool.cluster is not None else {}),
    }
