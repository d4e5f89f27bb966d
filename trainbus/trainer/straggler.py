"""Finds stragglers: ranks whose own work in a step takes much longer than that of the others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from contracts.ranks import StragglerLine
from contracts.spec.training import Watch
from trainbus.agent_link.channels import Journal
from trainbus.trainer.observers import CompletedStep, StepObserver
from trainbus.trainer.step_agreement import StepSummary
from trainbus.trainer.step_data import StepData
from trainbus.trainer.world import World

#: Seconds that a straggler must cost each step; below it a ratio says nothing.
MIN_EXCESS_S = 0.001


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank whose own work took ``factor`` times the others' median over ``over_steps`` steps."""

    rank: int
    factor: float
    over_steps: int


class StragglerDetector:
    """Looks at windows of ``over_steps`` steps; names a rank once, and again only after a window in which it kept up.

    It compares medians: over a rank's steps, so that one hiccup does not count, and over the other ranks.
    """

    def __init__(self, factor: float, over_steps: int) -> None:
        self._factor, self._over_steps = factor, over_steps
        self._window: list[Sequence[float]] = []
        self._named: set[int] = set()

    def add_step(self, busy_s: Sequence[float]) -> list[Straggler]:
        """Add one step, the seconds by rank; return the ranks that have become stragglers with it."""
        if len(busy_s) < 2:
            return []
        self._window.append(busy_s)
        if len(self._window) < self._over_steps:
            return []
        typical = [median(times) for times in zip(*self._window, strict=True)]
        self._window = []
        slow: dict[int, float] = {}
        for rank, own in enumerate(typical):
            others = median(typical[:rank] + typical[rank + 1 :])
            if own - others > MIN_EXCESS_S and own > self._factor * others:
                slow[rank] = own / max(others, 1e-9)
        found = [Straggler(rank, slow[rank], self._over_steps) for rank in slow if rank not in self._named]
        self._named = set(slow)
        return found


class WorkTimer:
    """Measures this rank's own work in a step, and not how long it waits for the others.

    On CPU that is the time that the training thread was running or ready to run: time on a run queue counts, a wait in
    a collective does not. On CUDA it is the device's time for the last forward before the measurement.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        self._device = device
        self._ran = False
        self._fd: int | None = None
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,assignment]
            model.register_forward_pre_hook(lambda *_: self._mark(0))
            model.register_forward_hook(lambda *_: self._mark(1))
        else:
            try:
                self._fd = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = None  # no Linux, or one without these statistics: the thread's CPU time has to do
        self._last_s = self._clock_s()

    def _mark(self, which: int) -> None:
        if self._events is not None:
            self._events[which].record(torch.cuda.current_stream(self._device))
            self._ran |= which == 1

    def _clock_s(self) -> float:
        if self._fd is None:
            return time.thread_time()
        running_ns, ready_ns, *_ = os.pread(self._fd, 128, 0).split()
        return (int(running_ns) + int(ready_ns)) * 1e-9

    def lap_s(self) -> float:
        """Return the seconds of work since the last call; 0 where they are not known yet."""
        if self._events is not None:
            begin, end = self._events
            return float(begin.elapsed_time(end)) / 1000 if self._ran and end.query() else 0.0
        before, self._last_s = self._last_s, self._clock_s()
        return self._last_s - before

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class StragglerObserver(StepObserver):
    """Measures this rank's own work in each step; on rank 0 it journals which rank holds the others up."""

    def __init__(self, watch: Watch, model: nn.Module, world: World, journal: Journal) -> None:
        self._timer = WorkTimer(model, world.device)
        self._detector = StragglerDetector(watch.straggler_factor, watch.straggler_steps)
        self._world, self._journal = world, journal
        #: Seconds that this rank's own work in the last step would have taken, had the rank an even share of the step.
        self.busy_s = 0.0

    def on_step_begin(self, step: int, data: StepData) -> None:
        self._timer.lap_s()  # validation and checkpoints since the last step do not count

    def on_step_end(self, step: CompletedStep) -> None:
        own, data = step.data.own_samples, step.data
        work_s = self._timer.lap_s() + step.waited_s
        self.busy_s = work_s * data.global_samples / (own * self._world.size) if own else 0.0

    def on_step_summary(self, summary: StepSummary) -> None:
        if self._world.is_first:
            for found in self._detector.add_step(summary.busy_s):
                self._journal.append(StragglerLine(time=time.time(), step=summary.step, **asdict(found)))
