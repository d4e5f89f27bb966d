"""Draw a history: an exact run that is killed, preempted, shrunk and grown, beside the one that nothing was done to.

    python -m loadtest.picture

Both are runs on an embedded stack (real services, a store, processes). What is drawn is what the log says: the losses
that the ranks reported and who held which slot when. Writes ``exact-losses.png`` and ``exact-timeline.png`` into
``docs/pictures``, and fails unless every loss, of repeated steps too, and every committed state is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import structlog
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from contracts import subjects, topology
from tests.e2e.history import Config, Deed, Result, Theatre
from tests.e2e.support import Body, connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
NODES, SLOTS = 3, 2
CONFIG = Config("MLP", logical_ranks=6)
#: What is done, how long after a generation's ranks have started, and to whom (as in ``tests/e2e/history.py``).
DEEDS: tuple[tuple[Deed, float, float], ...] = (
    ("rank", 4.0, 0.5),
    ("shrink", 4.0, 0.5),
    ("node", 7.0, 0.4),
    ("preempt", 4.0, 0.9),
    ("rank", 7.0, 0.1),
)
#: How many slots others take, and for how long.
WANTED: dict[Deed, int] = {"shrink": 3, "preempt": NODES * SLOTS}
HELD_S = 4.0
SAID = {
    "rank": "kill -9 a rank",
    "node": "kill -9 a node",
    "shrink": "others want 3 slots",
    "preempt": "others want all",
}
LOSS = "train/loss"
#: Behind words, so that no line runs through them.
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1}
INK, GREY, BLUE, RED = "#1d2733", "#8a94a0", "#2f6fb5", "#c8442f"
#: A generation's colour says where its state came from.
SOURCES = {"scratch": "#b9c2cc", "checkpoint": "#8fb4dc", "memory": "#9ccba6"}


@dataclass(slots=True)
class Bar:
    """One generation on one slot, in seconds since the request."""

    place: str
    generation: int
    start_s: float
    end_s: float
    source: str


@dataclass(slots=True)
class History:
    """What the log says of one run."""

    result: Result
    #: Every loss that was reported for a step: more than one where a step was repeated.
    losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    bars: list[Bar] = field(default_factory=list)
    #: What was done, and when, in seconds since the request.
    deeds: list[tuple[Deed, float]] = field(default_factory=list)

    def curve(self) -> tuple[list[int], list[float]]:
        """Steps and losses. Where the ranks that knew a step's loss were killed before they said it, there is a gap."""
        steps = list(range(1, max(self.losses) + 1))
        return steps, [self.losses[step][-1] if step in self.losses else math.nan for step in steps]


class Recorder(Theatre):
    """Remembers when it did what."""

    done: list[tuple[Deed, float]]

    async def _do(self, deed: Deed, whom: float, result: Result) -> bool:
        at = time.time()
        if deed in WANTED:
            for _ in range(WANTED[deed]):
                await self.stack.sleeper(seconds=HELD_S, priority=10)
            done = True
        else:
            done = await super()._do(deed, whom, result)
        if done:
            self.done.append((deed, at))
        return done

    async def record(self, body: Body, deeds: tuple[tuple[Deed, float, float], ...] = ()) -> History:
        """Play a run and read its history out of the log."""
        self.done = []
        history = History(await self.run(body, deeds))
        run_id = history.result.run_id
        points = await self.stack.bus.read_history(subjects.progress(run_id), stream=topology.PROGRESS.name)
        for message in points:
            for point in message.event.points:
                if LOSS in point.values:
                    history.losses[point.step].append(point.values[LOSS])
        begin = await self._bars(history)
        history.deeds = [(deed, at - begin) for deed, at in self.done]
        return history

    async def _bars(self, history: History) -> float:
        """Fill in who held which slot; return the time of the request."""
        facts = await self.stack.bus.read_history(subjects.run(history.result.run_id), subjects.node())
        placed: dict[int, Any] = {}
        running: dict[tuple[int, str], tuple[float, str]] = {}
        begin = next(each for each in facts if each.event.fact == "accepted").envelope.time.timestamp()

        def end(generation: int, node: str, at: float) -> None:
            start, source = running.pop((generation, node), (None, ""))
            if start is None:
                return
            for member in placed[generation].members:
                for slot in member.slots if member.node_id == node else ():
                    place = f"{node}, slot {slot}"
                    history.bars.append(Bar(place, generation, start, at, source))

        for message in facts:
            event, at = message.event, message.envelope.time.timestamp() - begin
            match event.fact:
                case "placed":
                    placed[event.generation] = event
                case "started":
                    running[event.generation, event.node_id] = (at, event.resumed_from)
                case "released" | "exited":
                    end(event.generation, event.node_id, at)
                case "lost" | "left" | "joined":
                    for generation, node in list(running):
                        if node == event.node_id:
                            end(generation, node, at)
        return float(begin)


async def play(data_dir: Path, steps: int) -> tuple[History, History, tuple[History, History]]:
    """The undisturbed run, the disturbed one, and plain DDP on one rank and on three."""
    async with connected(data_dir) as stack:
        theatre = await Recorder.open(stack, data_dir.parent / "dataset")
        assert isinstance(theatre, Recorder)
        settings = {**CONFIG.training(), "max_steps": steps, "log_every_steps": 1, "checkpoint_every_steps": 50}
        exact = {name: value for name, value in settings.items() if value is not None}
        body = theatre.body(CONFIG, 1, training=exact, params={"width": 64})
        undisturbed = await theatre.record(body)
        disturbed = await theatre.record({**body, "slots": {"min": 1, "max": NODES * SLOTS}}, DEEDS)
        # Without dropout, whose numbers are a rank's own in fast mode: only the order of additions differs.
        fast = {name: value for name, value in exact.items() if name not in ("logical_ranks", "buffers")}
        plain = {**body, "training": fast, "params": {"width": 64, "dropout": 0.0}}
        one = await theatre.record(plain)
        three = await theatre.record({**plain, "slots": {"min": 3, "max": 3}})
    return undisturbed, disturbed, (one, three)


def differences(one: History, other: History) -> tuple[list[int], list[float]]:
    """The largest difference of any two losses reported for each step."""
    steps = sorted(one.losses.keys() & other.losses.keys())
    return steps, [max(abs(a - b) for a in one.losses[step] for b in other.losses[step]) for step in steps]


def draw_losses(undisturbed: History, disturbed: History, plain: tuple[History, History], path: Path) -> None:
    """Both curves on one another, and what lies between them."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5.4), sharex=True, height_ratios=(3, 2))
    worlds = "→".join(str(world) for world in disturbed.result.worlds)
    top.plot(*disturbed.curve(), color=BLUE, alpha=0.35, linewidth=4, label=f"disturbed, on {worlds} processes")
    top.plot(*undisturbed.curve(), color=INK, linewidth=0.6, label="undisturbed, on 1 process")
    top.set_ylabel("training loss")
    top.legend(frameon=False)
    steps, apart = differences(undisturbed, disturbed)
    broken_off = len(disturbed.result.worlds) - 1
    top.set_title(f"A run that was broken off {broken_off} times, and one that was not", loc="left")
    control_steps, control = differences(*plain)
    bottom.plot(control_steps, control, color=GREY, linewidth=0.6)
    bottom.plot(steps, apart, color=BLUE, linewidth=2.5, clip_on=False, zorder=3)
    bottom.set_yscale("symlog", linthresh=1e-8, linscale=0.6)
    bottom.set_ylim(0, max([*control, 1e-6]) * 30)
    bottom.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
    bottom.minorticks_off()
    bottom.set_ylabel("difference of the losses")
    bottom.set_xlabel("step")
    states = sorted(undisturbed.result.digests.keys() & disturbed.result.digests.keys())
    equal = [step for step in states if undisturbed.result.digests[step] == disturbed.result.digests[step]]
    bottom.plot(equal, [0] * len(equal), "o", color=INK, markersize=5, clip_on=False, zorder=4)
    text = f"exact mode: 0 at all {len(steps)} steps that both reported; dots: committed states with the same digest"
    bottom.annotate(text, (1, 0), xytext=(0, 8), textcoords="offset points", color=BLUE, bbox=PAPER)
    label = "for comparison: plain DDP, 1 process and 3 (no dropout)"
    bottom.annotate(
        label, (steps[-1], max(control)), (0, 6), textcoords="offset points", color=GREY, ha="right", bbox=PAPER
    )
    _finish(figure, (top, bottom), path)


def draw_timeline(history: History, path: Path) -> None:
    """Who held which slot when, and what was done."""
    places = sorted({bar.place for bar in history.bars}, reverse=True)
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for bar in history.bars:
        row = places.index(bar.place)
        width = bar.end_s - bar.start_s
        axes.barh(row, width, left=bar.start_s, height=0.82, color=SOURCES[bar.source], edgecolor="white")
        axes.text(bar.start_s + width / 2, row, str(bar.generation), ha="center", va="center", color=INK, fontsize=8)
    for deed, at in history.deeds:
        axes.axvline(at, color=RED, linewidth=1, linestyle="-" if deed in ("rank", "node") else ":")
        axes.text(at, len(places) - 0.35, SAID[deed], color=RED, fontsize=8, rotation=20, rotation_mode="anchor")
    handles = [mpl.patches.Patch(color=colour) for colour in SOURCES.values()]
    names = ["begins", "goes on from a checkpoint", "goes on from memory"]
    axes.legend(handles, names, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.2), frameon=False)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(-0.6, len(places) - 0.4)
    axes.set_xlim(0, max(bar.end_s for bar in history.bars) * 1.01)
    axes.set_xlabel("seconds since the request; numbers are generations")
    _finish(figure, (axes,), path)


def _finish(figure: Any, all_axes: tuple[Axes, ...], path: Path) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--into", type=Path, default=PICTURES)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 9, "axes.edgecolor": GREY, "axes.titlesize": 11})
    with tempfile.TemporaryDirectory(prefix="trainbus-picture-") as scratch:
        options = StackOptions(Path(scratch) / "data", nodes=NODES, slots=SLOTS)
        with StackProcess(options, output=Path(scratch) / "output.log") as stack:
            stack.wait_ready()
            undisturbed, disturbed, plain = asyncio.run(play(options.data_dir, arguments.steps))
    arguments.into.mkdir(parents=True, exist_ok=True)
    draw_losses(undisturbed, disturbed, plain, arguments.into / "exact-losses.png")
    draw_timeline(disturbed, arguments.into / "exact-timeline.png")
    result = disturbed.result
    print(f"{', '.join(result.done)}: on {result.worlds} processes, state from {dict(result.resumed_from)}")
    print(f"{len(result.digests.keys() & undisturbed.result.digests.keys())} states compared, final {result.final}")
    if wrong := result.difference(undisturbed.result):
        sys.exit(wrong)
    if result.exactness != "exact" or any(differences(undisturbed, disturbed)[1]):
        sys.exit(f"{result.run_id} is {result.exactness}, and not every loss is the same")


if __name__ == "__main__":
    main()
