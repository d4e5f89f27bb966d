"""What the demo shows while it runs: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from contracts.texts import describe
from trainbus.client.views import ModelView, NodeView, RunView
from trainbus.commands import render
from trainbus.commands.render import escape

if TYPE_CHECKING:
    from trainbus.client.stored_event import StoredEvent

TICKER_LINES = 8
COLOURS = ("cyan", "magenta", "green", "blue")
#: Facts that come too often for the ticker.
HIDDEN_FACTS = ("checkpoint_staged", "checkpoint_deleted", "waiting")


@dataclass(slots=True)
class Stage:
    """One line of the list at the top."""

    title: str
    detail: str = ""
    started_at: float | None = None
    ended_at: float | None = None

    def start(self) -> None:
        self.started_at = self.started_at or time.monotonic()

    def end(self) -> None:
        self.start()
        self.ended_at = self.ended_at or time.monotonic()

    @property
    def seconds(self) -> float:
        if self.started_at is None:
            return 0.0
        return (self.ended_at or time.monotonic()) - self.started_at


@dataclass(slots=True)
class Board:
    """What the gateway has last said of the stack."""

    runs: dict[str, RunView] = field(default_factory=dict)
    nodes: list[NodeView] = field(default_factory=list)
    models: dict[str, ModelView] = field(default_factory=dict)


@dataclass(slots=True)
class Screen:
    """The state of the screen; ``draw`` makes it visible."""

    board: Board
    console: Console
    stages: list[Stage] = field(default_factory=list)
    #: The runs to show, in order, and how each is called.
    runs: dict[str, str] = field(default_factory=dict)
    ticker: deque[str] = field(default_factory=lambda: deque(maxlen=TICKER_LINES))
    started_at: float = field(default_factory=time.monotonic)
    live: Live | None = None
    #: Plain output: the last tenth of each run that was printed.
    _printed_tenths: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def shown(self) -> Iterator[Screen]:
        """Draw until the block ends."""
        if not self.console.is_terminal:
            yield self
            return
        # Without rich's own thread: the demo's loop calls draw.
        with Live(self._render(), console=self.console, auto_refresh=False, transient=True) as self.live:
            yield self
        self.live = None

    def draw(self) -> None:
        if self.live is not None:
            self.live.update(self._render(), refresh=True)

    def stage(self, title: str) -> Stage:
        """Start a stage; ``done`` ends it."""
        stage = Stage(title)
        stage.start()
        self.stages.append(stage)
        self.draw()
        return stage

    def done(self, stage: Stage, detail: str = "") -> None:
        stage.detail = detail or stage.detail
        stage.end()
        if self.live is None:
            self.print_line(f"✓ {stage.title}: {stage.detail} ({stage.seconds:.1f} s)")
        self.draw()

    def print_line(self, text: str) -> None:
        """Print a line where there is no live screen."""
        if self.live is None:
            self.console.print(f"[dim]{self._elapsed():>7}[/] {escape(text)}", soft_wrap=True)

    def on_event(self, message: StoredEvent) -> None:
        """Show an event."""
        if message.event.fact in HIDDEN_FACTS:
            return
        about = self._about(message)
        self.ticker.append(f"[dim]{self._elapsed():>7}[/]  {about} {escape(describe(message.event))}")
        if self.live is None:
            self.console.print(self.ticker[-1], soft_wrap=True)

    def on_progress(self, view: RunView) -> None:
        """Show a run's progress."""
        if self.live is None and view.total_steps:
            tenth = 10 * view.step // view.total_steps
            if tenth > self._printed_tenths.get(view.run_id, 0):
                self._printed_tenths[view.run_id] = tenth
                self.print_line(f"{self.runs.get(view.run_id, view.name)}: {tenth * 10} %, {_training_text(view)}")

    # -- drawing ------------------------------------------------------------

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Rule(f"[bold]trainbus[/] · {self._elapsed()}", align="left"), self._stages()]
        if self.runs:
            parts += [self._runs(), self._nodes()]
        if self.ticker:
            parts += [Rule("[dim]events[/]", align="left", style="dim"), Text.from_markup("\n".join(self.ticker))]
        return Group(*(Padding(part, (0, 0, 1, 0)) if index else part for index, part in enumerate(parts)))

    def _stages(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for stage in self.stages:
            mark = "[green]✓[/]" if stage.ended_at is not None else "[yellow]…[/]"
            grid.add_row(mark, escape(stage.title), f"[dim]{escape(stage.detail)}[/]", f"[dim]{stage.seconds:.1f} s[/]")
        return grid

    def _runs(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for number, (run_id, called) in enumerate(self.runs.items()):
            view = self.board.runs.get(run_id)
            if view is None:
                grid.add_row(escape(called), "[dim]published[/]", "", "")
                continue
            share = 1.0 if view.state == "completed" else view.step / view.total_steps if view.total_steps else 0.0
            grid.add_row(
                f"[{COLOURS[number % len(COLOURS)]}]■[/] {escape(called)}",
                render.state(view.state),
                ProgressBar(total=1.0, completed=share, width=24),
                f"{view.slots_got} slots",
                escape(_training_text(view)),
                f"[bold]{escape(view.verdict)}[/]",
            )
        return grid

    def _nodes(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        colours = {run_id: COLOURS[number % len(COLOURS)] for number, run_id in enumerate(self.runs)}
        for view in self.board.nodes:
            boxes = " ".join(
                f"[{colours.get(view.busy[slot][0], 'yellow')}]■[/]" if slot in view.busy else "[dim]□[/]"
                for slot in range(view.slots)
            )
            grid.add_row(f"[dim]{view.node_id}[/]", boxes)
        return grid

    def _about(self, message: StoredEvent) -> str:
        aggregate, name, _ = message.subject.split(".")
        if aggregate == "run":
            called = self.runs.get(name) or (self.board.runs[name].name if name in self.board.runs else name)
            return f"[cyan]{escape(called)}[/]"
        return f"[dim]{aggregate}[/] [cyan]{escape(name[:12])}[/]"

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self.started_at:.1f} s"


def _training_text(view: RunView) -> str:
    """Step, epoch and the newest metric values."""
    values = {name.rsplit("/", 1)[-1]: value for name, value in sorted(view.metrics.items(), reverse=True)}
    parts = [f"step {view.step}" + (f"/{view.total_steps}" if view.total_steps else "")]
    parts += [f"{name} {values[name]:.3f}" for name in ("loss", "accuracy") if name in values]
    return ", ".join(parts)
