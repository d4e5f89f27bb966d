"""The process that takes one snapshot: ``python -m services.scheduler.snapshot_process``."""

from __future__ import annotations

import asyncio
import os

from services.kit import telemetry
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.settings import Settings
from services.scheduler.cluster_cache import ClusterCache
from services.scheduler.snapshot import CREATE_TIMEOUT_S, SnapshotStore


async def take_snapshot(settings: Settings) -> str:
    """Fold what came since the newest snapshot and save it; returns its name."""
    bus = Bus("scheduler-snapshot", settings)
    await bus.connect(reconcile_topology=False)
    try:
        cache = ClusterCache(bus)
        folding = asyncio.create_task(cache.follow())
        waiting = asyncio.create_task(cache.caught_up.wait())
        await asyncio.wait({folding, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if folding.done():
            folding.result()
        await cancel_and_wait(folding, waiting)
        return await SnapshotStore(bus).write(cache.cluster)
    finally:
        await bus.close()


def main() -> None:
    """Take one snapshot, at low priority."""
    os.nice(10)
    settings = Settings()
    telemetry.set_up("scheduler-snapshot", settings)
    # The leader that wanted it may be dead, and the bus gone: it must not wait for them for ever.
    asyncio.run(asyncio.wait_for(take_snapshot(settings), CREATE_TIMEOUT_S))


if __name__ == "__main__":
    main()
