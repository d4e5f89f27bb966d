"""What a comparison report shows: a table of metrics, the verdict, and where mistakes are made."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from contracts.events.checkpoint import CheckpointCommitted
from contracts.predictions import PREDICTION, TARGET, Predictions
from contracts.spec.training import Evaluation
from services.evaluation.core.gate import Verdict, metric_value

#: More classes than this make a confusion matrix unreadable.
MAX_CLASSES = 50
MISSING = "–"


@dataclass(frozen=True, slots=True)
class Confusion:
    """How often each class (row) was taken for each (column)."""

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @property
    def total(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def correct(self) -> int:
        return sum(row[n] for n, row in enumerate(self.counts))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that a report shows."""

    name: str
    run_id: str
    model: str
    dataset_id: str | None
    wanted: Evaluation
    candidate: dict[str, float]
    champion: dict[str, float]
    champion_label: str
    verdict: Verdict
    confusion: Confusion | None = None
    #: The checkpoint that was measured, as it was committed; None if nothing is known of it.
    committed: CheckpointCommitted | None = None

    @property
    def gate_metric(self) -> str:
        """The name under which the metric that decides was measured."""
        value = metric_value(self.candidate, self.wanted.metric)
        named = [self.wanted.metric, f"test/{self.wanted.metric}", *sorted(self.candidate)]
        return next((name for name in named if value is not None and self.candidate.get(name) == value), "")

    @property
    def names(self) -> list[str]:
        """Every metric, the one that decides first."""
        names = sorted({*self.candidate, *self.champion})
        return sorted(names, key=lambda name: name != self.gate_metric)


def parse_predictions(content: bytes) -> Confusion | None:
    """Count ``{"labels": [...], "predictions": [...], "classes": [...]}``; None if it is nothing of the kind.

    Labels and predictions are class numbers or class names.
    """
    try:
        data = json.loads(content)
        classes = tuple(str(name) for name in data["classes"])
        labels, predictions = data["labels"], data["predictions"]
        if not 0 < len(classes) <= MAX_CLASSES or len(labels) != len(predictions):
            return None
        number = {name: n for n, name in enumerate(classes)}
        counts = [[0] * len(classes) for _ in classes]
        for label, prediction in zip(labels, predictions, strict=True):
            row, column = (number[each] if isinstance(each, str) else int(each) for each in (label, prediction))
            if min(row, column) < 0:
                return None
            counts[row][column] += 1
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return Confusion(classes, tuple(map(tuple, counts)))


def count_confusion(predictions: Predictions) -> Confusion | None:
    """Count the predictions of a classification; None for another kind, or for too many classes.

    Raises:
        PredictionsError: a value is not what its column may hold.
    """
    if not {TARGET, PREDICTION} <= set(predictions.columns):
        return None
    counts: Counter[tuple[Any, Any]] = Counter()
    for batch in predictions.batches((TARGET, PREDICTION)):
        counts.update(zip(batch.column(TARGET).to_pylist(), batch.column(PREDICTION).to_pylist(), strict=True))
        if any(isinstance(value, float) for value in next(iter(counts))) or len(counts) > MAX_CLASSES**2:
            return None
    found = {value for pair in counts for value in pair}
    named = dict(enumerate(predictions.info.classes)) if all(isinstance(value, int) for value in found) else {}
    values = sorted(found | set(named))
    if not 0 < len(values) <= MAX_CLASSES:
        return None
    classes = tuple(named.get(value, str(value)) for value in values)
    return Confusion(classes, tuple(tuple(counts[true, said] for said in values) for true in values))


def markdown(comparison: Comparison) -> str:
    """The report as a table that reads well as plain text."""
    header, rows = _table(comparison)
    widths = [max(len(line[n]) for line in (header, *rows)) for n in range(4)]

    def line(cells: tuple[str, ...]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(widths[n]) for n, cell in enumerate(cells[1:], start=1))]
        return f"| {' | '.join(padded)} |"

    rule = f"| {'-' * widths[0]} | " + " | ".join(f"{'-' * (width - 1)}:" for width in widths[1:]) + " |"
    return "\n".join(
        [
            f"# {_title(comparison)}",
            "",
            *(f"- {label}: {text}" for label, text in _facts(comparison)),
            "",
            line(header),
            rule,
            *map(line, rows),
            "",
        ]
    )


def html(comparison: Comparison, plot_png: bytes) -> str:
    """The same report as one page, with the plot inside."""
    header, rows = _table(comparison)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in _facts(comparison))
    image = base64.b64encode(plot_png).decode()
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(_title(comparison))}</title><style>{STYLE}</style>"
        f"<h1>{escape(_title(comparison))}</h1><dl>{facts}</dl>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f'<img alt="candidate and champion compared" src="data:image/png;base64,{image}"></html>\n'
    )


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dt{color:#57606a}dd{margin:0}"
    "table{border-collapse:collapse;margin:1.5rem 0}th,td{padding:.35rem .9rem;border-bottom:1px solid #d0d7de}"
    "td:not(:first-child),th:not(:first-child){text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}"
)


def _title(comparison: Comparison) -> str:
    return f"{comparison.name}: {'better' if comparison.verdict.promote else 'not better'} than the gate asks for"[:200]


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    wanted = comparison.wanted
    threshold = f", at least {wanted.threshold:g}" if wanted.threshold is not None else ""
    if wanted.threshold is not None and wanted.mode == "min":
        threshold = f", at most {wanted.threshold:g}"
    return [
        ("Verdict", "promote" if comparison.verdict.promote else "do not promote"),
        ("Reason", comparison.verdict.reason),
        ("Gate", f"{wanted.metric} ({wanted.mode}), improvement {wanted.min_improvement:g}{threshold}"),
        ("Model", comparison.model),
        ("Run", comparison.run_id),
        ("Champion", comparison.champion_label or "none"),
        ("Dataset", f"{comparison.dataset_id} (test split)" if comparison.dataset_id else "none"),
        *_state(comparison.committed),
    ]


def _state(committed: CheckpointCommitted | None) -> list[tuple[str, str]]:
    """Return what the measured weights are: their step, how exact they are, and the digest of their bits."""
    if committed is None:
        return []
    exactness = {
        "exact": "exact: the same to the bit on any number of processes",
        "samples-exact": "samples-exact: each sample as often as it should be, the last bits not reproducible",
    }[committed.exactness]
    found = [("Checkpoint", f"step {committed.checkpoint.step}"), ("Exactness", exactness)]
    return [*found, ("State digest", committed.state_digest)] if committed.state_digest else found


def _table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = ("metric (test)", "candidate", "champion", "difference")
    return header, [
        (name, *_cells(comparison.candidate.get(name), comparison.champion.get(name))) for name in comparison.names
    ]


def _cells(candidate: float | None, champion: float | None) -> tuple[str, str, str]:
    both = candidate is not None and champion is not None
    difference = _number((candidate or 0) - (champion or 0), "+.5g") if both else MISSING
    return _number(candidate), _number(champion), difference


def _number(value: float | None, form: str = ".5g") -> str:
    return MISSING if value is None or math.isnan(value) else format(value, form)


def bars(comparison: Comparison, limit: int = 4) -> list[tuple[str, float, float | None]]:
    """The metrics worth a picture: (name, candidate, champion), the one that decides first."""
    finite: Mapping[str, float] = {n: v for n, v in comparison.candidate.items() if math.isfinite(v)}
    shown = [name for name in comparison.names if name in finite][:limit]
    champion = {n: v for n, v in comparison.champion.items() if math.isfinite(v)}
    return [(name, finite[name], champion.get(name)) for name in shown]
