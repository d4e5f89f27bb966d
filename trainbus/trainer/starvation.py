"""Detects that the accelerator waits for data, what causes it, and which setting would help."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from contracts.machine_limits import usable_cores
from contracts.ranks import StarvationLine
from contracts.spec.training import DataLoading
from trainbus.data.batch_timings import CAUSES, BatchTimings, Cause
from trainbus.trainer.observers import CompletedStep, StepObserver


class StarvationDetector(StepObserver):
    """Looks at windows of ``starved_s``; reports once, and again only after a window in which data came in time.

    A thread reports a wait that does not end while it lasts.
    """

    def __init__(
        self,
        loading: DataLoading,
        waits: BatchTimings,
        rank: int,
        report: Callable[[StarvationLine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loading, self._waits, self._rank, self._report, self._clock = loading, waits, rank, report, clock
        self._lock = threading.Lock()
        self._is_reported, self._step = False, 0
        self._waiting_since: float | None = None
        self._begin_window(clock())

    @contextmanager
    def watching(self, step: int) -> Generator[None]:
        """Watch the training loop inside, which has taken ``step`` steps."""
        self._step = step
        self._begin_window(self._clock())
        over = threading.Event()

        def watch() -> None:
            while not over.wait(self._loading.starved_s / 4):
                self.check_current_wait()

        threading.Thread(target=watch, name="trainbus-starved", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def on_data_wait(self) -> None:
        self._waiting_since = self._clock()

    def on_data_ready(self) -> None:
        with self._lock:
            self._waiting_since = None

    def on_step_end(self, step: CompletedStep) -> None:
        self._waits.add("transfer", step.copied_s)
        self.add_step(step.step, step.waited_s + step.copied_s)

    def add_step(self, step: int, waited_s: float) -> None:
        """Count one step, and how long the loop waited for its data."""
        with self._lock:
            now, self._waiting_since, self._step = self._clock(), None, step
            self._steps += 1
            self._waited_s += waited_s
            if now - self._began < self._loading.starved_s:
                return
            starved = self._is_starved(now, self._waited_s)
            if starved and not self._is_reported:
                self._report_starvation(now, self._waited_s, self._slowest_cause())
            self._is_reported = starved
            self._begin_window(now)

    def check_current_wait(self) -> None:
        """Report if the loop has been waiting for too long and still is."""
        with self._lock:
            now, since = self._clock(), self._waiting_since
            if since is None or self._is_reported or now - since < self._loading.starved_s:
                return
            waited_s = self._waited_s + now - since
            if self._is_starved(now, waited_s):
                # Totals lack what is still under way, and worker processes report only what they have finished.
                cause = self._waits.doing() or ("decode" if self._loading.workers else self._slowest_cause())
                self._report_starvation(now, waited_s, cause)
                self._is_reported = True

    def _begin_window(self, now: float) -> None:
        self._began, self._steps, self._waited_s = now, 0, 0.0
        self._before = self._waits.totals()

    def _is_starved(self, now: float, waited_s: float) -> bool:
        return waited_s > self._loading.starved_share * (now - self._began)

    def _spent_s(self) -> dict[Cause, float]:
        now = self._waits.totals()
        return {cause: now[cause] - self._before[cause] for cause in CAUSES}

    def _slowest_cause(self) -> Cause:
        spent = self._spent_s()
        return max(CAUSES, key=lambda cause: spent[cause])

    def _report_starvation(self, now: float, waited_s: float, bound_by: Cause) -> None:
        over_s = now - self._began
        self._report(
            StarvationLine(
                time=time.time(),
                step=self._step,
                rank=self._rank,
                wait_share=min(1.0, waited_s / over_s),
                over_s=over_s,
                over_steps=self._steps,
                bound_by=bound_by,
                hint=advise(bound_by, self._spent_s(), max(over_s - waited_s, 0.0), self._loading, _cores()),
            )
        )


def _cores() -> int:
    """Return the cores that this rank may use, where the ranks of the node share them evenly."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def advise(bound_by: Cause, spent_s: Mapping[Cause, float], busy_s: float, loading: DataLoading, cores: int) -> str:
    """Return which setting to change.

    Args:
        spent_s: by cause, of making the batches.
        busy_s: of training with them, with which loading has to keep up.
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
                "copying batches to the device takes the time: collate smaller types (uint8, bfloat16) and convert "
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
