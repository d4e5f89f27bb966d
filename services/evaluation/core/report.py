"""What a comparison report shows: a table of metrics, the gates' verdicts, and where mistakes are made. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from contracts.events.checkpoint import CheckpointCommitted
from contracts.formats import format_bytes
from contracts.metric_names import LATENCY_MS, strip_split
from services.evaluation.core.comparison import (
    MAX_CLASSES,
    Confusion,
    ModelPicture,
    PredictionComparison,
)
from services.evaluation.core.footprint import Footprint
from services.evaluation.core.gate import Criteria, Verdict, metric_value

MISSING = "–"
#: Of the layout of ``report.json``.
JSON_VERSION = 1
OUTCOMES = {True: "passed", False: "failed", None: "waiting"}


@dataclass(frozen=True, slots=True)
class SampleContent:
    """A sample as a report shows it: an image as a ``data:`` address, or text."""

    image: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that a report shows."""

    name: str
    run_id: str
    model: str
    dataset_id: str | None
    criteria: Criteria
    candidate: dict[str, float]
    champion: dict[str, float]
    champion_label: str
    verdict: Verdict
    predictions: PredictionComparison | None = None
    #: The checkpoint that was measured, as it was committed; None if nothing is known of it.
    committed: CheckpointCommitted | None = None
    candidate_footprint: Footprint = field(default_factory=Footprint)
    champion_footprint: Footprint = field(default_factory=Footprint)
    #: Content of the samples among the worst regressions, by key.
    samples: dict[str, SampleContent] = field(default_factory=dict)

    @property
    def confusion(self) -> Confusion | None:
        """The candidate's."""
        return self.predictions.candidate.confusion if self.predictions else None

    @property
    def gate_metric(self) -> str:
        """The name under which the metric that decides was measured."""
        wanted = self.criteria.evaluation.metric
        value = metric_value(self.candidate, wanted)
        named = [wanted, f"test/{wanted}", *sorted(self.candidate)]
        return next((name for name in named if value is not None and self.candidate.get(name) == value), "")

    @property
    def names(self) -> list[str]:
        """Every metric, the one that decides first. The latency is a part of what the models take."""
        measured = sorted({*self.candidate, *self.champion})
        names = [name for name in measured if strip_split(name) != LATENCY_MS or name == self.gate_metric]
        return sorted(names, key=lambda name: name != self.gate_metric)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the deciding metric's difference, as the metric counts."""
        found = self.predictions
        if found is None or found.difference is None or not found.is_of_metric:
            return None
        low, high = found.difference.low, found.difference.high
        return (low, high) if self.criteria.sign > 0 else (-high, -low)

    @property
    def headline(self) -> str:
        """The verdict in a word or two."""
        if self.verdict.promote:
            return "promote"
        return f"awaiting {self.verdict.awaits}" if self.verdict.awaits else "do not promote"


def confusion_of_json(content: bytes) -> PredictionComparison | None:
    """Count ``{"labels": [...], "predictions": [...], "classes": [...]}``; None if it is nothing of the kind.

    Labels and predictions are class numbers or class names.
    """
    confusion = parse_predictions(content)
    return PredictionComparison(ModelPicture(confusion.total, confusion)) if confusion else None


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


def markdown(comparison: Comparison) -> str:
    """The report as a table that reads well as plain text."""
    header, rows = metric_table(comparison)
    widths = [max(len(line[n]) for line in (header, *rows)) for n in range(4)]

    def line(cells: tuple[str, ...]) -> str:
        padded = [cells[0].ljust(widths[0]), *(cell.rjust(widths[n]) for n, cell in enumerate(cells[1:], start=1))]
        return f"| {' | '.join(padded)} |"

    rule = f"| {'-' * widths[0]} | " + " | ".join(f"{'-' * (width - 1)}:" for width in widths[1:]) + " |"
    return "\n".join(
        [
            f"# {title(comparison)}",
            "",
            *(f"- {label}: {text}" for label, text in facts(comparison)),
            "",
            line(header),
            rule,
            *map(line, rows),
            "",
            "## Gates",
            "",
            *(f"- {gate.name}: {OUTCOMES[gate.passed]}. {gate.words}" for gate in comparison.verdict.gates),
            *_slices_text(comparison.predictions),
            "",
        ]
    )


def _slices_text(found: PredictionComparison | None) -> list[str]:
    """Return the slices that lose most, as lines of text."""
    losing = [each for each in found.slices if each.difference and each.difference.mean < 0] if found else []
    if not losing:
        return []
    losing.sort(key=lambda each: each.difference.mean if each.difference else 0.0)
    lines = [
        f"- {each.column}={each.value}: {each.difference.mean:+.4g} ({each.samples:,} samples)"
        for each in losing[:10]
        if each.difference
    ]
    return ["", "## Slices that are worse than the champion's", "", *lines]


def title(comparison: Comparison) -> str:
    """Return the name of the run with its verdict."""
    return f"{comparison.name}: {comparison.headline}"[:200]


def facts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what was compared and decided, in pairs of label and text."""
    wanted, criteria = comparison.criteria.evaluation, comparison.criteria
    threshold = f", at least {criteria.threshold:g}" if criteria.threshold is not None else ""
    if criteria.threshold is not None and wanted.mode == "min":
        threshold = f", at most {criteria.threshold:g}"
    sure = f" with {criteria.confidence:g} confidence" if criteria.confidence and comparison.interval else ""
    return [
        ("Verdict", comparison.headline),
        ("Reason", comparison.verdict.reason),
        ("Gate", f"{wanted.metric} ({wanted.mode}), improvement {criteria.min_improvement:g}{sure}{threshold}"),
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
    found = [("Checkpoint", committed.checkpoint.point), ("Exactness", exactness)]
    return [*found, ("State digest", committed.state_digest)] if committed.state_digest else found


def footprint_table(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return what both models take: (what, candidate, champion), as far as it is known of the candidate or champion."""
    own, other = comparison.candidate_footprint, comparison.champion_footprint
    rows = [
        ("Latency", *(_of(each.latency_ms, lambda ms: f"{ms:.3g} ms") for each in (own, other))),
        ("Weights", *(_of(each.size_bytes, format_bytes) for each in (own, other))),
        ("Cost of training", *(_of(each.slot_hours, lambda hours: f"{hours:.3g} slot-hours") for each in (own, other))),
    ]
    return [(what, one, two) for what, one, two in rows if (one, two) != (MISSING, MISSING)]


def _of(value: float | None, form: Any) -> str:
    return MISSING if value is None else str(form(value))


def to_json(comparison: Comparison) -> bytes:
    """Return the report as JSON, for programs and the terminal; without the content of samples."""
    verdict, found = comparison.verdict, comparison.predictions
    content = {
        "version": JSON_VERSION,
        "run_id": comparison.run_id,
        "name": comparison.name,
        "model": comparison.model,
        "champion": comparison.champion_label,
        "dataset_id": comparison.dataset_id,
        "verdict": comparison.headline,
        "reason": verdict.reason,
        "gates": [gate.model_dump(mode="json") for gate in verdict.gates],
        "metric": comparison.gate_metric,
        "interval": comparison.interval,
        "metrics": [
            {"name": name, "candidate": comparison.candidate.get(name), "champion": comparison.champion.get(name)}
            for name in comparison.names
        ],
        "paired": found.difference if found else None,
        "paired_problem": found.problem if found else "the evaluation kept no predictions",
        "slices": found.slices if found else (),
        "regressions": found.regressions if found else (),
        "calibration_error": {
            "candidate": _calibration_error(found.candidate if found else None),
            "champion": _calibration_error(found.champion if found else None),
        },
        "footprint": {"candidate": comparison.candidate_footprint, "champion": comparison.champion_footprint},
    }
    return json.dumps(_plain(content), ensure_ascii=False, allow_nan=False).encode()


def _calibration_error(picture: ModelPicture | None) -> float | None:
    return picture.calibration.error if picture and picture.calibration else None


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: no dataclasses, no NaN."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def metric_table(comparison: Comparison) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows: every metric of both models."""
    header = ("metric (test)", "candidate", "champion", "difference")
    return header, [
        (name, *_cells(comparison.candidate.get(name), comparison.champion.get(name))) for name in comparison.names
    ]


def _cells(candidate: float | None, champion: float | None) -> tuple[str, str, str]:
    both = candidate is not None and champion is not None
    difference = format_number((candidate or 0) - (champion or 0), "+.5g") if both else MISSING
    return format_number(candidate), format_number(champion), difference


def format_number(value: float | None, form: str = ".5g") -> str:
    """Return a number in few digits; a dash for none."""
    return MISSING if value is None or math.isnan(value) else format(value, form)


def bars(comparison: Comparison, limit: int = 4) -> list[tuple[str, float, float | None]]:
    """The metrics worth a picture: (name, candidate, champion), the one that decides first."""
    finite: Mapping[str, float] = {n: v for n, v in comparison.candidate.items() if math.isfinite(v)}
    shown = [name for name in comparison.names if name in finite][:limit]
    champion = {n: v for n, v in comparison.champion.items() if math.isfinite(v)}
    return [(name, finite[name], champion.get(name)) for name in shown]
