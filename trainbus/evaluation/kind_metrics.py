"""The metrics of a kind of task, from all its predictions at once: no batch and no rank changes them.

| kind                 | metrics                                                                      |
|----------------------|------------------------------------------------------------------------------|
| `classification`     | accuracy, macro_f1; with probabilities auc, calibration_error                |
| `regression`         | rmse, mae, r2                                                                |
| `ranking`            | ndcg, mrr: means over the queries that have a relevant document              |
| `language-modelling` | perplexity; with the column `correct` token_accuracy                         |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.predictions import PREDICTION, PROBABILITIES, TARGET

Array = NDArray[Any]
Columns = Mapping[str, Array]
#: Bins of equal width of the calibration error.
CALIBRATION_BINS = 15


def compute_kind_metrics(kind: str, columns: Columns) -> dict[str, float]:
    """Return the metrics of a kind; those that are not defined for these predictions are left out."""
    metrics = _METRICS[kind](columns) if kind in _METRICS else {}
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def classification(columns: Columns) -> dict[str, float]:
    """Accuracy, macro F1, one-against-rest AUC and top-label calibration error (Guo et al., 2017, 15 bins)."""
    from sklearn.metrics import f1_score

    target, prediction = columns[TARGET], columns[PREDICTION]
    correct = target == prediction
    metrics = {"accuracy": correct.mean(), "macro_f1": f1_score(target, prediction, average="macro", zero_division=0)}
    probabilities = columns.get(PROBABILITIES)
    if probabilities is not None:
        metrics |= _area_under_curve(target, probabilities)
        metrics["calibration_error"] = calibration_error(probabilities.max(axis=1), correct)
    return metrics


def _area_under_curve(target: Array, probabilities: Array) -> dict[str, float]:
    """Return the AUC; none where not every class is among the targets, since it is not defined then."""
    from sklearn.metrics import roc_auc_score

    classes = probabilities.shape[1]
    if target.dtype.kind not in "iu" or not np.array_equal(np.unique(target), np.arange(classes)) or classes < 2:
        return {}
    if classes == 2:
        return {"auc": roc_auc_score(target, probabilities[:, 1])}
    # One class against the rest, by hand: roc_auc_score wants rows that sum to 1 more exactly than float32 has them.
    return {"auc": float(np.mean([roc_auc_score(target == each, probabilities[:, each]) for each in range(classes)]))}


def calibration_error(confidence: Array, correct: Array) -> float:
    """Return the mean distance of confidence and accuracy over bins of confidence, weighted by their samples."""
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    sums = np.bincount(bins, weights=confidence.astype(np.float64) - correct, minlength=CALIBRATION_BINS)
    return float(np.abs(sums).sum() / len(confidence))


def regression(columns: Columns) -> dict[str, float]:
    """Root mean squared error, mean absolute error and coefficient of determination."""
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    target, prediction = columns[TARGET], columns[PREDICTION]
    metrics = {
        "rmse": root_mean_squared_error(target, prediction),
        "mae": mean_absolute_error(target, prediction),
    }
    return metrics | ({"r2": r2_score(target, prediction)} if len(target) > 1 else {})


def ranking(columns: Columns) -> dict[str, float]:
    """Normalised discounted cumulative gain and mean reciprocal rank."""
    by_query = [each for each in score_queries(columns) if each is not None]
    if not by_query:
        return {}
    ndcg, reciprocal_rank = np.asarray(by_query).T
    return {"ndcg": ndcg.mean(), "mrr": reciprocal_rank.mean()}


def score_queries(columns: Columns) -> list[tuple[float, float] | None]:
    """Return (NDCG, reciprocal rank) of each query at its first row; None at its others, and without relevant rows."""
    from sklearn.metrics import ndcg_score

    queries, inverse = np.unique(columns["query"], return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(len(queries) + 1))
    found: list[tuple[float, float] | None] = [None] * len(inverse)
    for start, stop in pairwise(starts):
        rows = order[start:stop]
        relevance, score = columns[TARGET][rows].astype(np.float64), columns[PREDICTION][rows].astype(np.float64)
        if not (relevance > 0).any():
            continue
        ndcg = 1.0 if len(rows) == 1 else float(ndcg_score(relevance[None], score[None]))
        # Of equal scores the irrelevant ones go first, so that the order of rows does not count.
        best = score[relevance > 0].max()
        rank = 1 + int((score > best).sum()) + int(((score == best) & (relevance <= 0)).sum())
        found[int(rows[0])] = (ndcg, 1.0 / rank)
    return found


def language_modelling(columns: Columns) -> dict[str, float]:
    """Perplexity and the share of tokens that are predicted right, over all tokens of the split."""
    tokens = int(columns["tokens"].sum())
    if not tokens:
        return {}
    mean = math.fsum(columns["nll"]) / tokens
    metrics = {"perplexity": math.exp(mean) if mean < 700 else math.inf}
    return metrics | ({"token_accuracy": columns["correct"].sum() / tokens} if "correct" in columns else {})


_METRICS: dict[str, Callable[[Columns], dict[str, float]]] = {
    "classification": classification,
    "regression": regression,
    "ranking": ranking,
    "language-modelling": language_modelling,
}


def score_rows(kind: str, columns: Columns, metric: str) -> tuple[str, Any] | None:
    """Return what the score of each row is of, and the scores; None where the format's own default fits.

    ``metric`` chooses among the metrics of the kind that are means over rows.
    """
    bare = metric.rpartition("/")[2]
    if kind == "regression" and bare == "mae":
        return "mae", -np.abs(columns[PREDICTION] - columns[TARGET])
    if kind == "regression":
        return "mse", -np.square(columns[PREDICTION] - columns[TARGET])
    if kind == "ranking":
        place, name = (1, "mrr") if bare == "mrr" else (0, "ndcg")
        return name, [None if each is None else each[place] for each in score_queries(columns)]
    if kind == "language-modelling":
        tokens = np.maximum(columns["tokens"], 1)
        if bare == "token_accuracy" and "correct" in columns:
            return "token_accuracy", columns["correct"] / tokens
        return "nll", -columns["nll"] / tokens
    return None
