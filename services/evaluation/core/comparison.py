"""Candidate and champion on the same samples: differences, slices and the worst regressions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contracts.predictions import ID, PREDICTION, PROBABILITIES, SCORE, TARGET, Predictions, PredictionsError
from services.evaluation.core.bootstrap import DEFAULT_CONFIDENCE, PairedDifference, compare_paired

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The slices by the true class, for predictions without a column of this name.
CLASS = "class"
#: Values of one column that a report shows; of more, those with the fewest samples are left out.
MAX_SLICES = 50
#: Columns that results are sliced by.
MAX_SLICE_COLUMNS = 10
MAX_CLASSES = 50
MAX_REGRESSIONS = 12
CALIBRATION_BINS = 10
#: A metric and the mean of the scores are the same number when they differ by no more, relative to it.
SAME_METRIC = 1e-4


@dataclass(frozen=True, slots=True)
class SliceResult:
    """The mean scores of the samples that share one value of a column."""

    column: str
    value: str
    samples: int
    candidate: float
    champion: float | None = None
    difference: PairedDifference | None = None


@dataclass(frozen=True, slots=True)
class Regression:
    """A sample on which the candidate does worse than the champion."""

    key: str
    target: str
    candidate: str
    champion: str
    #: Score of the candidate minus that of the champion.
    difference: float
    columns: dict[str, str] = field(default_factory=dict)


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
class CalibrationBin:
    """Predictions of similar confidence: how sure they are in the mean, and how many of them are right."""

    confidence: float
    accuracy: float
    samples: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far confidence can be trusted: the bins of equal width that have samples, and their mean distance (ECE)."""

    bins: tuple[CalibrationBin, ...]
    error: float


@dataclass(frozen=True, slots=True)
class ModelPicture:
    """What the predictions of one model show."""

    samples: int
    confusion: Confusion | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """What the predictions of both models show; without a champion, what the candidate's do."""

    candidate: ModelPicture
    champion: ModelPicture | None = None
    difference: PairedDifference | None = None
    slices: tuple[SliceResult, ...] = ()
    regressions: tuple[Regression, ...] = ()
    #: Whether the candidate's mean score is its main metric: its improvement is the difference of the scores.
    is_of_metric: bool = False
    #: Why there is no paired difference, where a champion is there.
    problem: str = ""


def compare_predictions(
    candidate: Predictions,
    champion: Predictions | None,
    metric_value: float | None,
    mode: str,
    confidence: float | None,
    seed: int,
    champion_problem: str = "",
) -> PredictionComparison:
    """Compare the predictions of two models on the samples that both have.

    Args:
        metric_value: the candidate's main metric, ``mode`` whether more (max) or less (min) of it is better.

    Raises:
        PredictionsError: the candidate's predictions cannot be read.
    """
    import numpy as np

    level = confidence or DEFAULT_CONFIDENCE
    own = ScoredSamples.read(candidate)
    picture = _picture(candidate)
    is_of_metric = _is_metric(own.scores, metric_value, mode)
    if champion is None:
        return PredictionComparison(
            picture, slices=_slices(own, None, level, seed), is_of_metric=is_of_metric, problem=champion_problem
        )
    try:
        other = ScoredSamples.read(champion)
        champion_picture = _picture(champion)
    except PredictionsError as error:
        return PredictionComparison(
            picture, slices=_slices(own, None, level, seed), is_of_metric=is_of_metric, problem=str(error)
        )
    place = {key: number for number, key in enumerate(other.ids)}
    matches = np.array([place.get(key, -1) for key in own.ids], np.int64)
    if len(own.ids) != len(other.ids) or (matches < 0).any():
        shared = int((matches >= 0).sum())
        problem = (
            f"the predictions are not of the same samples: {len(own.ids):,} of the candidate, {len(other.ids):,} of "
            f"the champion, {shared:,} in both"
        )
        return PredictionComparison(
            picture, champion_picture, None, _slices(own, None, level, seed), (), is_of_metric, problem
        )
    scores = other.scores[matches]
    difference = compare_paired(own.scores - scores, level, seed)
    return PredictionComparison(
        picture,
        champion_picture,
        difference,
        _slices(own, scores, level, seed),
        _find_regressions(own, other, matches),
        is_of_metric,
    )


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """The rows of predictions that have a score."""

    ids: list[str]
    #: n of them.
    scores: NDArray[Any]
    targets: list[Any] | None
    predictions: list[Any] | None
    #: Column -> n values, for slices.
    columns: dict[str, list[Any]]
    classes: tuple[str, ...]

    @classmethod
    def read(cls, predictions: Predictions) -> ScoredSamples:
        """Read what comparisons need, without the probabilities.

        Raises:
            PredictionsError: a value is not what its column may hold, or no row has a score.
        """
        sliced = predictions.slice_columns[:MAX_SLICE_COLUMNS]
        present = [name for name in (TARGET, PREDICTION) if name in predictions.columns]
        table = predictions.table([ID, SCORE, *present, *sliced])
        table = table.filter(table[SCORE].is_valid())
        if not table.num_rows:
            raise PredictionsError("no row of the predictions has a score")
        ids = table[ID].to_pylist()
        if len(set(ids)) != len(ids):
            raise PredictionsError("the predictions name a sample more than once")
        targets, answers = (table[name].to_pylist() if name in present else None for name in (TARGET, PREDICTION))
        columns = {name: table[name].to_pylist() for name in sliced}
        classes = predictions.info.classes
        if CLASS not in columns and targets is not None and _are_classes(targets, classes):
            columns = {CLASS: [name_class(each, classes) for each in targets], **columns}
        return cls(ids, table[SCORE].to_numpy(), targets, answers, columns, classes)


def name_class(value: Any, classes: Sequence[str]) -> str:
    """Return the name of a class that is given by its number, or any other value as text."""
    if isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _are_classes(targets: Sequence[Any], classes: Sequence[str]) -> bool:
    return bool(classes) or (not isinstance(targets[0], float) and len(set(targets)) <= MAX_CLASSES)


def _is_metric(scores: Any, value: float | None, mode: str) -> bool:
    """Return whether the mean score is the metric: itself where more is better, negated where less is."""
    if value is None or not math.isfinite(value):
        return False
    mean = float(scores.mean()) * (1 if mode == "max" else -1)
    return abs(mean - value) <= SAME_METRIC * max(abs(value), 1e-3)


def _slices(own: ScoredSamples, champion: Any, confidence: float, seed: int) -> tuple[SliceResult, ...]:
    """Return the results of every value of every column, those with the most samples first."""
    import numpy as np

    found: list[SliceResult] = []
    for column, values in own.columns.items():
        names = np.array([name_class(value, ()) if value is not None else "(none)" for value in values], object)
        distinct, counts = np.unique(names.astype(str), return_counts=True)
        if len(distinct) > len(values) // 2 and len(distinct) > MAX_SLICES:
            continue  # a column of names, not of groups
        order = np.argsort(-counts, kind="stable")[:MAX_SLICES]
        for value in distinct[order]:
            rows = names == value
            scores = own.scores[rows]
            result = SliceResult(column, str(value), len(scores), float(scores.mean()))
            if champion is not None:
                difference = compare_paired(scores - champion[rows], confidence, seed)
                result = SliceResult(
                    column, str(value), len(scores), result.candidate, float(champion[rows].mean()), difference
                )
            found.append(result)
    return tuple(found)


def _find_regressions(own: ScoredSamples, other: ScoredSamples, matches: Any) -> tuple[Regression, ...]:
    """Return the samples on which the candidate is worse by most; of equals those that come first by their key."""
    import numpy as np

    difference = own.scores - other.scores[matches]
    worse = [int(row) for row in np.flatnonzero(difference < 0)]
    worst = sorted(worse, key=lambda row: (difference[row], own.ids[row]))[:MAX_REGRESSIONS]

    def cell(values: list[Any] | None, row: int) -> str:
        return name_class(values[row], own.classes) if values is not None else ""

    return tuple(
        Regression(
            own.ids[row],
            cell(own.targets, row),
            cell(own.predictions, row),
            cell(other.predictions, int(matches[row])),
            float(difference[row]),
            {name: str(values[row]) for name, values in own.columns.items() if name != CLASS},
        )
        for row in worst
    )


def _picture(predictions: Predictions) -> ModelPicture:
    """Count mistakes and confidences batch by batch."""
    import numpy as np

    classes = list(predictions.info.classes)
    counts: dict[tuple[str, str], int] = {}
    sums = np.zeros((CALIBRATION_BINS, 3))
    names = [name for name in (TARGET, PREDICTION, PROBABILITIES) if name in predictions.columns]
    if TARGET not in names:
        return ModelPicture(predictions.rows)
    for batch in predictions.batches(names):
        targets, answers = (batch[name].to_pylist() for name in (TARGET, PREDICTION))
        if isinstance(targets[0], float):
            return ModelPicture(predictions.rows)  # numbers have no classes to be mistaken for
        for target, answer in zip(targets, answers, strict=True):
            pair = name_class(target, classes), name_class(answer, classes)
            counts[pair] = counts.get(pair, 0) + 1
        if PROBABILITIES in names:
            best = np.array([max(each, default=0.0) for each in batch[PROBABILITIES].to_pylist()])
            right = np.array([target == answer for target, answer in zip(targets, answers, strict=True)], float)
            bins = np.clip((best * CALIBRATION_BINS).astype(int), 0, CALIBRATION_BINS - 1)
            for column, weights in enumerate((best, right, np.ones(len(best)))):
                sums[:, column] += np.bincount(bins, weights, CALIBRATION_BINS)
    return ModelPicture(predictions.rows, _confusion(counts, classes), _calibration(sums))


def _confusion(counts: Mapping[tuple[str, str], int], classes: Sequence[str]) -> Confusion | None:
    found = sorted({name for pair in counts for name in pair} - set(classes))
    shown = (*classes, *found)
    if not shown or len(shown) > MAX_CLASSES:
        return None
    return Confusion(shown, tuple(tuple(counts.get((row, column), 0) for column in shown) for row in shown))


def _calibration(sums: Any) -> Calibration | None:
    total = float(sums[:, 2].sum())
    if not total:
        return None
    bins = tuple(CalibrationBin(row[0] / row[2], row[1] / row[2], int(row[2])) for row in sums.tolist() if row[2])
    error = sum(each.samples * abs(each.confidence - each.accuracy) for each in bins) / total
    return Calibration(bins, error)
