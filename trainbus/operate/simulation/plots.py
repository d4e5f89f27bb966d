"""Charts of a simulation: who has which slots when, how long jobs wait, how much is in use; for packing, what is given.

Written without a display; two simulations of one trace give charts with the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter
from numpy.typing import NDArray

from contracts.events.run import Member
from services.scheduler.core.explain.estimate import quantile
from trainbus.operate.simulation.report import Recorder, nodes_of

#: Users with a colour of their own; the rest share one.
USERS = 7
#: Colours that colour-blind readers can distinguish (Okabe and Ito), and grey for the rest.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
OTHERS, FREE = "#9A9A9A", "#FFFFFF"
#: Columns of the picture of all slots.
COLUMNS = 2400
HOUR_S, DAY_S = 3600.0, 86_400.0
#: Waits below this are shown as none.
SHORT_S = 1.0


def draw(recorder: Recorder, folder: Path, title: str) -> list[Path]:
    """Draw what there is to be seen into ``folder``; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{recorder.trace.name}: {title}" if recorder.trace.name else title
    if recorder.trace.packing:
        return [save_figure(_packing(recorder, name), folder / "packing.png")]
    return [
        save_figure(_gantt(recorder, name), folder / "gantt.png"),
        save_figure(_waits(recorder, name), folder / "waits.png"),
        save_figure(_use(recorder, name), folder / "use.png"),
    ]


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that needs no display."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure to a file; return its path."""
    figure.savefig(path)
    return path


# -- who has which slots when -----------------------------------------------------------------------


def _gantt(recorder: Recorder, title: str) -> Figure:
    """Every slot as a line of pixels, once coloured by user, once by the size of the gang."""
    last_s = _shown_until(recorder)
    # So that a slot has at least a pixel, and a few slots do not fill the page.
    height = min(max(2.0 + recorder.trace.slots / 90, 3.0), 14.0)
    figure = new_figure(12, height * 2)
    by_user, by_size = figure.subplots(2, 1, sharex=True)
    rows = _rows(recorder)
    colours = _user_colours(recorder)
    picture = np.ones((len(rows), COLUMNS, 3), dtype=np.float32)
    sizes = np.full((len(rows), COLUMNS), np.nan, dtype=np.float32)
    for record in recorder.records.values():
        colour = to_rgb(colours.get(record.job.user, OTHERS))
        for span in record.spans:
            first, end = _columns(span.start_s, span.end_s, last_s)
            for row in _rows_of(span.members, rows):
                picture[row, first:end] = colour
                sizes[row, first:end] = max(span.gpus, 1)
    unit_s, unit = _unit(last_s)
    extent = (0.0, last_s / unit_s, len(rows), 0.0)
    by_user.imshow(picture, extent=extent, aspect="auto", interpolation="nearest")
    largest = max(2.0, float(np.nanmax(sizes)) if np.isfinite(sizes).any() else 2.0)
    shown = by_size.imshow(
        sizes, extent=extent, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=LogNorm(1, largest)
    )
    by_user.set_title(f"{title} — slots by user (white: free)", loc="left")
    by_size.set_title("the same by the size of the gang", loc="left")
    handles = [Patch(color=colour, label=user or "(no user)") for user, colour in colours.items()]
    handles += [Patch(color=OTHERS, label="others")] if len(_users(recorder)) > len(colours) else []
    by_user.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), title="user", frameon=False)
    bar = figure.colorbar(shown, cax=by_size.inset_axes((1.012, 0.0, 0.015, 1.0)))
    bar.set_ticks([2.0**power for power in range(math.floor(math.log2(largest)) + 1)])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.minorticks_off()
    bar.set_label("GPUs of the job")
    for axes in (by_user, by_size):
        _node_labels(axes, recorder)
    by_size.set_xlabel(f"{unit} since the beginning")
    return figure


def _rows(recorder: Recorder) -> dict[tuple[str, int], int]:
    """The line of each slot: nodes in order, slots within."""
    slots = [(joined.node_id, slot) for joined in nodes_of(recorder.trace) for slot in range(joined.slots)]
    return {slot: row for row, slot in enumerate(slots)}


def _rows_of(members: Sequence[Member], rows: dict[tuple[str, int], int]) -> list[int]:
    return [rows[key] for member in members for slot in member.slots if (key := (member.node_id, slot)) in rows]


def _node_labels(axes: Axes, recorder: Recorder) -> None:
    """Name some of the nodes at their first slot."""
    nodes = nodes_of(recorder.trace)
    starts = np.cumsum([0, *(joined.slots for joined in nodes)])[:-1]
    every = max(math.ceil(len(nodes) / 12), 1)
    axes.set_yticks(starts[::every], [joined.node_id for joined in nodes[::every]], fontsize=8)
    if len(nodes) <= 60:
        for start in starts[1:]:
            axes.axhline(start, color="#FFFFFF", linewidth=0.3)


def _columns(start_s: float, end_s: float, last_s: float) -> tuple[int, int]:
    """The columns of a time range; at least one, so that nothing is invisible."""
    first = min(int(start_s / last_s * COLUMNS), COLUMNS - 1)
    return first, max(math.ceil(min(end_s, last_s) / last_s * COLUMNS), first + 1)


def _shown_until(recorder: Recorder) -> float:
    """The end of the last placement; but a long tail of few jobs is left out."""
    ends = [span.end_s for record in recorder.records.values() for span in record.spans if span.end_s < math.inf]
    submits = [record.job.submit_s for record in recorder.records.values()]
    last_s = max(ends, default=1.0)
    most_s = quantile(sorted(ends), 0.995) if ends else last_s
    return max(min(last_s, max(1.3 * most_s, max(submits, default=0.0))), 1.0)


def _unit(last_s: float) -> tuple[float, str]:
    """In what a time axis counts."""
    return (DAY_S, "days") if last_s > 4 * DAY_S else (HOUR_S, "hours")


def _users(recorder: Recorder) -> dict[str, float]:
    """User -> GPU-seconds, the most first."""
    used: dict[str, float] = {}
    for record in recorder.records.values():
        for span in record.spans:
            end_s = span.end_s if span.end_s < math.inf else span.start_s
            used[record.job.user] = used.get(record.job.user, 0.0) + (end_s - span.start_s) * span.gpus
    return dict(sorted(used.items(), key=lambda each: (-each[1], each[0])))


def _user_colours(recorder: Recorder) -> dict[str, str]:
    return dict(zip(list(_users(recorder))[:USERS], COLOURS, strict=False))


# -- how long jobs wait -------------------------------------------------------------------------------


def _waits(recorder: Recorder, title: str) -> Figure:
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    waits = sorted(record.wait_s for record in recorder.records.values() if record.completed_s < math.inf)
    short = sum(wait_s < SHORT_S for wait_s in waits)
    longer = np.array([wait_s for wait_s in waits if wait_s >= SHORT_S])
    top = max(float(longer.max()) if len(longer) else 10.0, 10.0) * 1.1
    bins = np.geomspace(SHORT_S, top, 60)
    axes.hist(longer, bins=list(bins), color=COLOURS[0])
    axes.set_xscale("log")
    axes.set_xlim(SHORT_S, top)
    mean_s = math.fsum(waits) / max(len(waits), 1)
    for value, name, style in (
        (mean_s, "average", "-"),
        (quantile(waits, 0.99), "p99", "--"),
        (quantile(waits, 1.0), "longest", ":"),
    ):
        if value >= SHORT_S:
            axes.axvline(value, color="#D55E00", linestyle=style, linewidth=1.2, label=f"{name} {_duration(value)}")
    if len(longer):
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.98))
    share = short / max(len(waits), 1)
    axes.set_title(
        f"{title} — {share:.0%} of {len(waits):,} jobs wait less than {SHORT_S:g} s; the others:", loc="left"
    )
    axes.set_xlabel("time without progress: queued, preempted, starting again")
    axes.set_ylabel("jobs")
    ticks = [value for value in (1, 10, 60, 600, 3600, 6 * 3600, DAY_S, 7 * DAY_S) if value <= top]
    axes.set_xticks(ticks, [_duration(value) for value in ticks])
    axes.minorticks_off()
    _plain(axes)
    return figure


def _duration(seconds: float) -> str:
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds:.3g} s"


# -- how much is in use ---------------------------------------------------------------------------------


def _use(recorder: Recorder, title: str) -> Figure:
    last_s, slots = _shown_until(recorder), recorder.trace.slots
    figure = new_figure(11, 5.5)
    above, below = figure.subplots(2, 1, sharex=True)
    marks = np.linspace(0, last_s, 1200)
    used, wanted = mean_between(recorder.used, marks), mean_between(recorder.wanted, marks)
    unit_s, unit = _unit(last_s)
    times = marks[:-1] / unit_s
    above.fill_between(times, used / slots, step="post", color=COLOURS[0], alpha=0.85, linewidth=0)
    above.axhline(1.0, color="#444444", linewidth=0.8)
    above.set_ylim(0, 1.05)
    above.yaxis.set_major_formatter(PercentFormatter(1.0))
    above.set_ylabel(f"of {slots} GPUs in use")
    above.set_title(title, loc="left")
    below.fill_between(times, wanted, step="post", color=COLOURS[3], alpha=0.85, linewidth=0)
    below.axhline(slots, color="#444444", linewidth=0.8, linestyle="--")
    below.annotate("as many as there are", (times[-1], slots), ha="right", va="bottom", fontsize=8, color="#444444")
    below.set_ylim(0, max(float(wanted.max()) * 1.08, slots * 1.25))
    below.set_ylabel("GPUs that are waited for")
    below.set_xlabel(f"{unit} since the beginning")
    below.set_xlim(0, last_s / unit_s)
    for axes in (above, below):
        _plain(axes)
    return figure


def mean_between(series: Sequence[tuple[float, float]], marks: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of a step series between each mark and the next."""
    times = np.array([moment for moment, _ in series])
    values = np.array([value for _, value in series], dtype=float)
    areas = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    at = np.clip(np.searchsorted(times, marks, side="right") - 1, 0, len(times) - 1)
    area = areas[at] + values[at] * (marks - times[at])
    return np.asarray(np.diff(area) / np.diff(marks))


# -- packing ----------------------------------------------------------------------------------------------


def _packing(recorder: Recorder, title: str) -> Figure:
    figure = new_figure(7.5, 5)
    axes = figure.subplots()
    capacity = max(recorder.trace.slots, 1)
    asked = np.array([asked for asked, _ in recorder.packed]) / capacity
    given = np.array([given for _, given in recorder.packed]) / capacity
    axes.plot(asked, np.minimum(asked, 1.0), color="#999999", linewidth=1, linestyle="--", label="asked for, up to all")
    axes.plot(asked, given, color=COLOURS[0], linewidth=1.8, label="given")
    at_100 = next((i for i, share in enumerate(asked) if share >= 1), None)
    if at_100 is not None:
        axes.plot([asked[at_100]], [given[at_100]], "o", color=COLOURS[3])
        text = f"{given[at_100]:.2%} given\nas 100% is asked for"
        axes.annotate(text, (asked[at_100], given[at_100]), xytext=(8, -34), textcoords="offset points", fontsize=9)
    low = max(float(given.max()) - 0.4, 0.0) if len(given) else 0.0
    axes.set_xlim(low, max(float(asked.max()), 1.0) if len(asked) else 1.0)
    axes.set_ylim(low, 1.01)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("GPUs asked for so far, of all there are")
    axes.set_ylabel("GPUs given")
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, loc="lower right")
    _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
