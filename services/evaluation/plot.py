"""The report's picture: candidate and champion side by side, and where the candidate is mistaken.

matplotlib is imported when the first picture is drawn: a service that waits should be small.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from services.evaluation.core.comparison import Confusion
from services.evaluation.core.report import Comparison, bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

CANDIDATE, CHAMPION, GATE, INK, FAINT = "#2563eb", "#94a3b8", "#dc2626", "#1f2937", "#e5e7eb"
DPI = 130


def comparison_png(comparison: Comparison) -> bytes:
    """Draw the comparison. The same input gives the same bytes (with one version of matplotlib)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = bars(comparison)
    rows = max(len(shown), 1)
    height = max(1.15 * rows + 1.3, 5.4 if comparison.confusion else 2.6)
    figure = Figure(figsize=(11.5 if comparison.confusion else 7.0, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left: Figure | SubFigure = figure
    if comparison.confusion:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.05))[0]
        _confusion(right, comparison.confusion)
    _metrics(left, comparison, shown)
    content = io.BytesIO()
    # Without the version of matplotlib in it the file depends on what it shows alone.
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _metrics(figure: Figure | SubFigure, comparison: Comparison, shown: list[tuple[str, float, float | None]]) -> None:
    """One small panel a metric, each with a scale of its own: losses and accuracies do not share one."""
    figure.text(0.04, 0.965, _short(comparison.name, 48), fontsize=13, fontweight="bold", color=INK, va="top")
    verdict = "passes the gates" if comparison.verdict.promote else "does not pass the gates"
    if comparison.verdict.awaits:
        verdict = comparison.headline
    champion = f"champion {comparison.champion_label}" if comparison.champion_label else "no champion yet"
    height = figure.bbox.height / DPI
    figure.text(0.04, 0.965 - 0.3 / height, f"{verdict}  ·  {champion}", fontsize=9, color=INK, va="top")
    if not shown:
        figure.text(0.04, 0.5, "the evaluation gave no finite metrics", fontsize=10, color=INK)
        return
    top = 1 - 1.0 / height
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    # Beside a tall matrix few panels would grow fat: the rest stays empty.
    bottom = max(0.5 / height, top - 1.4 * len(shown) / height)
    figure.subplots_adjust(left=0.17, right=0.95, top=top, bottom=bottom, hspace=1.15)
    for panel, (name, candidate, champion_value) in zip(axes, shown, strict=True):
        _bars(panel, name, candidate, champion_value, comparison)


def _bars(axes: Axes, name: str, candidate: float, champion: float | None, comparison: Comparison) -> None:
    wanted = comparison.criteria.evaluation
    decides = name == comparison.gate_metric
    values = [candidate] if champion is None else [candidate, champion]
    labels = ["candidate", "champion"][: len(values)]
    axes.barh(range(len(values)), values, color=[CANDIDATE, CHAMPION][: len(values)], height=0.66, zorder=2)
    threshold = comparison.criteria.threshold if decides else None
    low = min(0.0, *values, *([threshold] if threshold is not None else []))
    high = max(0.0, *values, *([threshold] if threshold is not None else []))
    span = (high - low) or 1.0
    axes.set_xlim(low - (0.16 * span if low < 0 else 0), high + 0.16 * span)
    axes.set_ylim(len(values) - 0.4, -0.6)
    for place, value in enumerate(values):
        shift = (4 if value >= 0 else -4, 0)
        side = "left" if value >= 0 else "right"
        axes.annotate(
            f"{value:.4g}",
            (value, place),
            shift,
            textcoords="offset points",
            va="center",
            ha=side,
            fontsize=9,
            color=INK,
        )
    better = f", {'higher' if wanted.mode == 'max' else 'lower'} is better" if decides else ""
    axes.set_title(
        name + better, loc="left", fontsize=9.5, fontweight="bold" if decides else "normal", color=INK, pad=5
    )
    axes.set_yticks(range(len(values)), labels, fontsize=9, color=INK)
    if threshold is not None:
        axes.axvline(threshold, color=GATE, linewidth=1.4, linestyle=(0, (4, 3)), zorder=3)
        axes.set_title(f"- - threshold {threshold:g}", loc="right", fontsize=8.5, color=GATE, pad=5)
    axes.tick_params(axis="x", labelsize=8, colors=INK, length=0)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=FAINT, zorder=0)
    axes.spines[:].set_visible(False)
    axes.axvline(0, color=INK, linewidth=0.8, zorder=3)


def _confusion(figure: SubFigure, confusion: Confusion) -> None:
    """Rows are shares of the true class, so that small classes are seen; numbers are counts."""
    axes = figure.subplots(1, 1)
    figure.subplots_adjust(left=0.2, right=0.97, top=0.84, bottom=0.17)
    size = len(confusion.classes)
    shares = [[count / max(sum(row), 1) for count in row] for row in confusion.counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="equal")
    if size <= 20:
        font = 9 if size <= 12 else 6
        for row in range(size):
            for column in range(size):
                if count := confusion.counts[row][column]:
                    wrong = row != column
                    light = shares[row][column] > 0.55
                    colour = "white" if light else GATE if wrong else INK
                    axes.text(column, row, str(count), ha="center", va="center", fontsize=font, color=colour)
    names = [_short(name, 12) for name in confusion.classes]
    step = 1 if size <= 25 else 5
    ticks = range(0, size, step)
    turned = 90 if max(map(len, names)) > 3 else 0
    axes.set_xticks(ticks, names[::step], fontsize=8, rotation=turned, color=INK)
    axes.set_yticks(ticks, names[::step], fontsize=8, color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("predicted", fontsize=9, color=INK)
    axes.set_ylabel("true", fontsize=9, color=INK)
    axes.set_title(
        f"Test split: {confusion.correct:,} of {confusion.total:,} right", fontsize=10, loc="left", color=INK, pad=8
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
