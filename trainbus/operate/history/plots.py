"""What-if as a picture: the waits and the use of each scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from trainbus.operate.history.history import offered
from trainbus.operate.simulation.plots import COLOURS, mean_between, new_figure, save_figure
from trainbus.operate.simulation.report import Recorder

#: Waits below this many seconds are drawn as this.
LEAST_WAIT_S = 1.0
TICKS_S = {
    1: "≤1 s",
    10: "10 s",
    60: "1 min",
    600: "10 min",
    3_600: "1 h",
    21_600: "6 h",
    86_400: "1 d",
    604_800: "1 w",
}
#: The time is shown until this share of the work is done.
MOST = 0.9
#: Points of a curve over time; more cannot be seen.
POINTS = 600


def draw(recorders: Sequence[tuple[str, Recorder]], counted: Set[str], folder: Path) -> Path:
    """Draw ``what_if.png`` into the folder: how many runs waited for at most how long, and what was in use when."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = new_figure(13, 4.6)
    left, right = figure.subplots(1, 2)
    for place, (name, recorder) in enumerate(recorders):
        colour = COLOURS[place % len(COLOURS)]
        style: dict[str, Any] = {"color": colour, "label": name, "linewidth": 1.8, "alpha": 0.9}
        style["linestyle"] = "-" if place < len(COLOURS) else "--"
        _waits(left, recorder, counted, style)
        _use(right, recorder, style)
    _dress(left, right)
    right.set_xlim(0, max((_mostly_done_s(recorder) for _, recorder in recorders), default=1.0) / 3600 or 1.0)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False)
    return save_figure(figure, folder / "what_if.png")


def _waits(axes: Any, recorder: Recorder, counted: Set[str], style: dict[str, Any]) -> None:
    waits = sorted(
        max(record.jct_s - math.fsum(span.end_s - span.start_s for span in record.spans), LEAST_WAIT_S)
        for run_id, record in recorder.records.items()
        if run_id in counted and record.completed_s < math.inf
    )
    shares = [(place + 1) / len(waits) for place in range(len(waits))]
    axes.step([LEAST_WAIT_S, *waits], [0.0, *shares], where="post", **style)


def _use(axes: Any, recorder: Recorder, style: dict[str, Any]) -> None:
    """Draw the mean number of slots in use in equal parts of the time."""
    end_s = _mostly_done_s(recorder)
    if end_s <= 0:
        return
    marks = np.linspace(0.0, end_s, POINTS + 1)
    axes.plot((marks[:-1] + marks[1:]) / 2 / 3600, mean_between(recorder.used, marks), **style)
    most = offered(recorder.trace.nodes, recorder.trace.events, end_s)[1]
    axes.axhline(most, color=style["color"], linewidth=0.8, linestyle=":")


def _mostly_done_s(recorder: Recorder) -> float:
    """When nearly all of the work was done: what goes on for long after is one run or two."""
    parts = [(until_s, value * (until_s - start_s)) for (start_s, value), (until_s, _) in pairwise(recorder.used)]
    left = MOST * math.fsum(work for _, work in parts)
    for until_s, work in parts:
        left -= work
        if left <= 0:
            return until_s
    return recorder.used[-1][0]


def _dress(left: Any, right: Any) -> None:
    left.set_xscale("log")
    low, high = left.get_xlim()
    ticks = {value: text for value, text in TICKS_S.items() if low <= value <= max(high, 60)}
    left.set_xticks(list(ticks), list(ticks.values()))
    left.minorticks_off()
    left.set_ylim(0, 1.02)
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set_title("runs that waited for at most …")
    left.set_xlabel("time without slots, from submission to the end")
    right.set_title("slots in use (dotted: all there are)")
    right.set_xlabel("hours since the beginning")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
