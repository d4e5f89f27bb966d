"""A run as it goes, line by line: what happens to it, what it prints, and how far its training is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from contracts.events.dataset import DatasetProgress
from contracts.events.run import RunLog, RunProgress
from contracts.formats import format_duration
from trainbus.client.errors import TrainbusError
from trainbus.client.run_list import explain_requested
from trainbus.client.runs import ENDS, follow_output
from trainbus.client.views import RunView
from trainbus.commands import render
from trainbus.commands.run_failure import HeldOutput, ToldFailure, describe_next_step

if TYPE_CHECKING:
    from rich.console import Console

    from trainbus.client.client import AsyncClient
    from trainbus.client.stored_event import StoredEvent

#: Seconds between two lines about the progress within an epoch.
INTERVAL_S = 10.0
#: Seconds between the lines of short epochs.
MIN_INTERVAL_S = 1.0
#: Seconds after which a request that nobody answers is worth a line.
PATIENCE_S = 3.0
#: Metrics that a line names.
MAX_METRICS = 3
#: Metrics that say how the training runs, not how well the model does.
TECHNICAL = ("lr", "learning_rate", "grad_norm", "samples_per_s", "data_wait_s")


async def print_run(client: AsyncClient, run_id: str, rank: int | None = 0, *, stderr: bool = False) -> None:
    """Print a run until it has ended and its verdict is out. Ctrl-C leaves it alone and prints how to go on.

    Raises:
        TrainbusError: it did not complete. Its reason is printed; the error has what to do next.
    """
    printer = RunPrinter(render.console(stderr), has_many_ranks=rank is None)
    view = RunView(run_id)
    explained = False
    start = time.monotonic()
    try:
        async with aclosing(follow_output(client.connection, run_id, rank)) as batches:
            async for newest, batch in batches:
                view = newest
                printer.print_batch(view, batch)
                if view.state == "requested" and not explained and time.monotonic() - start > PATIENCE_S:
                    explained = True
                    printer.print_moment(await explain_requested(client.connection, run_id))
    except asyncio.CancelledError:
        if not view.ended:
            print(describe_departure(run_id), file=sys.stderr, flush=True)
        raise
    if view.state != "completed":
        raise TrainbusError(describe_next_step(view))


def describe_departure(run_id: str) -> str:
    """Return how to go on with a run that is no longer followed."""
    steps = (
        ("see it", f"trainbus attach {run_id}"),
        ("stop it", f"trainbus cancel {run_id}"),
        ("fetch its result", f"trainbus fetch {run_id}"),
    )
    return f"\nrun {run_id} goes on.\n" + "\n".join(f"  {what + ':':<18} {command}" for what, command in steps)


class RunPrinter:
    """Prints facts and progress with their time, and lines of output as they are."""

    def __init__(
        self, console: Console, *, has_many_ranks: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._has_many_ranks, self._clock = console, has_many_ranks, clock
        self._progress = ProgressLines(clock)
        self._held, self._told_failure = HeldOutput(clock), ToldFailure()
        self._phase, self._phase_printed_at = "", 0.0
        self._warned: set[str] = set()

    def print_batch(self, view: RunView, batch: Iterable[StoredEvent]) -> None:
        """Print what a batch has; ``view`` is the run after it."""
        for message in batch:
            event = message.event
            if isinstance(event, RunLog):
                self._print_output(event)
            elif isinstance(event, RunProgress):
                if event.kind == "training":
                    self.print_moment(self._progress.add(view))
            elif isinstance(event, DatasetProgress):
                self._print_preparation(event)
            else:
                self._print_fact(event, f"{message.time:%H:%M:%S}")
        for rank, lines in self._held.poll():
            self._print_lines(rank, lines)
        self.print_moment(self._progress.poll())
        for text in view.warnings:
            if (field := text.split()[0]) not in self._warned:  # what is reported later makes another text of it
                self._warned.add(field)
                self.print_moment(f"warning: {text}")

    def _print_fact(self, event: Any, moment: str) -> None:
        """Print a fact, and before one that ends the ranks what waits to be printed."""
        traceback, text = self._told_failure.describe(event)
        if isinstance(event, ENDS):
            self.print_moment(self._progress.flush())
            for rank, lines in self._held.release(getattr(event, "reason", "")):
                self._print_lines(rank, lines)
        self._print_lines(getattr(event, "rank", None), traceback)
        self.print_moment(text, moment)

    def _print_preparation(self, event: DatasetProgress) -> None:
        """Print how far the data is: each phase once, and every ten seconds."""
        now = self._clock()
        if event.phase != self._phase or now - self._phase_printed_at >= INTERVAL_S:
            self._phase, self._phase_printed_at = event.phase, now
            self.print_moment(format_preparation(event))

    def print_moment(self, text: str, moment: str = "") -> None:
        """Print a line with its time of day, by default now; nothing for ''."""
        if text:
            moment = moment or f"{render.utc_now():%H:%M:%S}"
            self._console.print(f"[dim]{moment}[/] [cyan]{render.escape(text)}[/]", soft_wrap=True)
            self._console.file.flush()

    def _print_output(self, event: RunLog) -> None:
        for line in event.lines:
            # A progress bar writes its states one over the other: the last one stands.
            self._print_lines(event.rank, self._held.add(event.rank, line.rstrip("\r").rpartition("\r")[2]))
        self._console.file.flush()

    def _print_lines(self, rank: int | None, lines: Iterable[str]) -> None:
        head = f"[{rank}] " if self._has_many_ranks and rank is not None else ""
        for line in lines:
            self._console.print(head + render.visible(line), markup=False, soft_wrap=True)


class ProgressLines:
    """One line an epoch, and one every ten seconds within an epoch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._printed_at = -INTERVAL_S
        self._printed_step = self._epoch = -1
        #: The newest line, '' once it is printed.
        self._newest = ""

    def add(self, view: RunView) -> str:
        """Take over the position of a run; return the line that is due before it: the end of the last epoch."""
        due = self.flush() if view.epoch != self._epoch and self._clock() - self._printed_at >= MIN_INTERVAL_S else ""
        self._epoch = view.epoch
        self._newest = format_progress(view) if view.step != self._printed_step else ""
        self._step = view.step
        return due

    def poll(self) -> str:
        """Return the newest line if it is due by time."""
        return self.flush() if self._clock() - self._printed_at >= INTERVAL_S else ""

    def flush(self) -> str:
        """Return the newest line unless it was printed."""
        line, self._newest = self._newest, ""
        if line:
            self._printed_at, self._printed_step = self._clock(), self._step
        return line


def format_preparation(event: DatasetProgress) -> str:
    """Return how far the data of a run is: ``data: validating 1,200 of 5,000, 830 records/s, 5 s left``."""
    done = f"{event.done:,}" + (f" of {event.total:,}" if event.total else "")
    rate = [f"{event.records_per_s:,.0f} records/s"] if event.records_per_s >= 1 and event.phase != "listing" else []
    left = [f"{format_duration(event.eta_s)} left"] if event.eta_s else []
    return ", ".join([f"data: {event.phase} {done}", *rate, *left])


def format_progress(view: RunView) -> str:
    """Return how far a run is: ``step 120/471, epoch 2, loss 0.2312, 8.3 steps/s, 42 s left``."""
    parts = [f"step {view.step:,}" + (f"/{view.total_steps:,}" if view.total_steps else "")]
    if view.epoch:
        parts.append(f"epoch {view.epoch}")
    parts += [f"{name} {value:.4g}" for name, value in choose_metrics(view.metrics)]
    if view.steps_per_s:
        parts.append(format_rate(view.steps_per_s))
    if view.left_s:
        parts.append(f"{format_duration(view.left_s)} left")
    return ", ".join(parts)


def choose_metrics(values: dict[str, float]) -> list[tuple[str, float]]:
    """Return the metrics that tell how well the model does, losses first."""
    telling = [(name, value) for name, value in values.items() if name.rpartition("/")[2] not in TECHNICAL]
    ordered = sorted(telling, key=lambda each: "loss" not in each[0])
    return [(name.removeprefix("train/"), value) for name, value in ordered[:MAX_METRICS]]


def format_rate(steps_per_s: float) -> str:
    """Return a speed: ``8.3 steps/s``, or ``4.2 s/step`` of slow steps."""
    return f"{steps_per_s:.3g} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.3g} s/step"
