"""Says when the accelerator waits for data, what for, and which setting would help."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from contracts.events.train import Loading
from contracts.ranks import StarvationLine
from trainbus.data.batch_timings import CAUSES, BatchTimings, Cause


class StarvationDetector:
    """Looks at windows of ``starved_s``; speaks once, and again only after a window in which data came in time.

    A wait that does not end is told of while it lasts, from a thread.
    """

    def __init__(
        self,
        loading: Loading,
        waits: BatchTimings,
        rank: int,
        say: Callable[[StarvationLine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loading, self._waits, self._rank, self._say, self._clock = loading, waits, rank, say, clock
        self._lock = threading.Lock()
        self._said, self._step = False, 0
        self._waiting_since: float | None = None
        self._begin(clock())

    @contextmanager
    def watching(self, step: int) -> Generator[None]:
        """Watch over the training loop inside, which has ``step`` steps behind it."""
        self._step = step
        self._begin(self._clock())
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self._loading.starved_s / 4):
                self.look()

        threading.Thread(target=watch, name="trainbus-starved", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def waiting(self) -> None:
        """Note that the loop begins to wait for its next data."""
        self._waiting_since = self._clock()

    def got(self) -> None:
        """Note that the data is here, though the step may have to wait for other ranks."""
        with self._lock:
            self._waiting_since = None

    def saw(self, step: int, waited_s: float) -> None:
        """Take in one step, and how long its data was waited for."""
        with self._lock:
            now, self._waiting_since, self._step = self._clock(), None, step
            self._steps += 1
            self._waited_s += waited_s
            if now - self._began < self._loading.starved_s:
                return
            starved = self._is_starved(now, self._waited_s)
            if starved and not self._said:
                self._tell(now, self._waited_s, self._most())
            self._said = starved
            self._begin(now)

    def look(self) -> None:
        """Say so if the loop has been waiting for too long and still is."""
        with self._lock:
            now, since = self._clock(), self._waiting_since
            if since is None or self._said or now - since < self._loading.starved_s:
                return
            waited_s = self._waited_s + now - since
            if self._is_starved(now, waited_s):
                # What is not done yet is in no total. Workers decode unseen; the rest is seen while it is done.
                self._tell(now, waited_s, self._waits.doing() or ("decode" if self._loading.workers else self._most()))
                self._said = True

    def _begin(self, now: float) -> None:
        self._began, self._steps, self._waited_s = now, 0, 0.0
        self._before = self._waits.totals()

    def _is_starved(self, now: float, waited_s: float) -> bool:
        return waited_s > self._loading.starved_share * (now - self._began)

    def _spent_s(self) -> dict[Cause, float]:
        now = self._waits.totals()
        return {cause: now[cause] - self._before[cause] for cause in CAUSES}

    def _most(self) -> Cause:
        spent = self._spent_s()
        return max(CAUSES, key=lambda cause: spent[cause])

    def _tell(self, now: float, waited_s: float, bound_by: Cause) -> None:
        over_s = now - self._began
        self._say(
            StarvationLine(
                time=time.time(),
                step=self._step,
                rank=self._rank,
                wait_share=min(1.0, waited_s / over_s),
                over_s=over_s,
                over_steps=self._steps,
                bound_by=bound_by,
                hint=hint(bound_by, self._spent_s(), max(over_s - waited_s, 0.0), self._loading, _cores()),
            )
        )


def _cores() -> int:
    """Return the cores that this rank may use, where the ranks of the node share them evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def hint(bound_by: Cause, spent_s: Mapping[Cause, float], busy_s: float, loading: Loading, cores: int) -> str:
    """Return what to change.

    Args:
        spent_s: by cause, of making the batches.
        busy_s: of training with them, which loading has to keep up with.
    """
    match bound_by:
        case "fetch":
            return (
                "shards come to the node more slowly than they are read: enlarge the node's cache "
                "(TRAINBUS_CACHE_MAX_BYTES), put a shared folder between it and the store, or lower "
                "training.loading.lanes so that fewer shards are needed at a time"
            )
        case "read":
            return (
                "shards are read from disk more slowly than they are used: put the node's cache on a faster disk, "
                "give the node memory to keep them in, or lower training.loading.lanes or training.loading.window"
            )
        case "transfer":
            return (
                "the batch's way to the device takes the time: collate smaller types (uint8, bfloat16) and convert "
                "them in Task.loss, or raise training.accumulate"
            )
        case "decode":
            now = loading.workers
            wanted = math.ceil(1.2 * max(now, 1) * spent_s["decode"] / busy_s) if busy_s else 2 * max(now, 1)
            wanted = max(wanted, now + 1)
            if wanted <= cores:
                return f"decoding takes the time: set training.loading.workers to {wanted} (it is {now})"
            if now < cores:
                return (
                    f"decoding takes the time: set training.loading.workers to {cores} (it is {now}), all this node's "
                    "cores, and make Task.decode cheaper: store smaller samples, or give the task a decode_batch"
                )
            return (
                f"decoding takes the time of all {cores} cores: make Task.decode cheaper (store smaller samples, give "
                "the task a decode_batch), or use nodes with more cores for each slot"
            )
