"""Where the ranks of a generation meet: a store on rank 0, to which each of them comes before the group is formed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from contracts.ranks import format_endpoint

#: How long the ranks wait for each other, and after how many seconds they say for whom.
TIMEOUT = timedelta(seconds=120)
SAID_AFTER_S = 5.0
#: Seconds between two looks of rank 0 at who has come.
POLL_S = 0.002
ALL_HERE = "all-here"

#: Is called with rank 0's address, the ranks that are missing and the seconds waited.
SayMissing = Callable[[str, tuple[int, ...], float], None]


def meet(rank: int, size: int, host: str, port: int, say: SayMissing, said_after_s: float = SAID_AFTER_S) -> Any:
    """Return the store, once each of ``size`` ranks has come. Called by every rank.

    Raises:
        RuntimeError: some have not come in time; the text names them.
    """
    address = format_endpoint(host, port)
    timer = threading.Timer(said_after_s, lambda: say(address, (0,), said_after_s))
    timer.daemon = True
    timer.start()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False
        )
    finally:
        timer.cancel()
    if rank == 0:
        _wait_for_all(store, range(1, size), lambda missing, s: say(address, missing, s), said_after_s, address)
        store.set(ALL_HERE, "")
    else:
        store.set(_key(rank), "")
        store.wait([ALL_HERE], TIMEOUT)
    return store


def _wait_for_all(
    store: Any, ranks: range, say: Callable[[tuple[int, ...], float], None], said_after_s: float, address: str
) -> None:
    """Wait until each of the ranks has come; say once which have not."""
    started, is_said = time.monotonic(), False
    missing = list(ranks)
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        waited_s = time.monotonic() - started
        if waited_s > TIMEOUT.total_seconds():
            # In the words of torch, by which such an end is told from a fault of the run.
            raise dist.DistStoreError(f"ranks {missing} did not come to {address} within {waited_s:.0f} s")
        if waited_s > said_after_s and not is_said:
            is_said = True
            say(tuple(missing), waited_s)
        time.sleep(POLL_S)


def has_duplicates(store: Any, size: int, value: str) -> bool:
    """Return whether two of ``size`` ranks call it with the same value; every rank calls it once, and waits."""
    if store.add(f"value/{value}", 1) > 1:
        store.add("duplicates", 1)
    if store.add("values", 1) == size:
        store.set("has-duplicates", str(store.add("duplicates", 0)))
    return int(store.get("has-duplicates")) > 0


def _key(rank: int) -> str:
    return f"here/{rank}"
