"""Timings of batch loading by cause, from which the starvation of a rank is explained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal, get_args

#: ``fetch``: a shard is not on the node yet; ``read``: out of a shard; ``decode``: decoding, augmenting and collating;
#: ``transfer``: into pinned memory and to the device.
Cause = Literal["fetch", "read", "decode", "transfer"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class BatchTimings:
    """Seconds spent so far, by cause. Any thread may add; the parent adds the time of worker processes."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        #: What is being done right now; the latest last.
        self._doing: dict[object, Cause] = {}
        self._lock = threading.Lock()

    def add(self, cause: Cause, seconds: float) -> None:
        with self._lock:
            self._seconds[cause] += seconds

    @contextmanager
    def during(self, cause: Cause) -> Generator[None]:
        """Count the time inside; use it for a batch or a shard, never for each sample."""
        started, token = self._clock(), object()
        with self._lock:
            self._doing[token] = cause
        try:
            yield
        finally:
            with self._lock:
                del self._doing[token]
                self._seconds[cause] += self._clock() - started

    def doing(self) -> Cause | None:
        """Return what was begun last and has not ended: where there is no progress, what it waits for."""
        with self._lock:
            return next(reversed(self._doing.values()), None)

    def totals(self) -> dict[Cause, float]:
        """Return the seconds so far; they only grow."""
        with self._lock:
            return dict(self._seconds)
