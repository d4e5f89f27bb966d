"""Names of metrics that a person gives: those that nobody reports are told, with what was probably meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

#: Known names that a text lists.
MAX_LISTED_NAMES = 12
#: What evaluation computes for a ``Task.kind`` from all predictions; training does not report it.
KIND_METRICS = {
    "classification": ("accuracy", "macro_f1", "auc", "calibration_error"),
    "regression": ("rmse", "mae", "r2"),
    "ranking": ("ndcg", "mrr"),
    "language-modelling": ("perplexity", "token_accuracy"),
}
#: What evaluation measures of a Task that predicts: the median time of an answer to one sample. It is a figure of the
#: machine too, so no comparison of results includes it.
LATENCY_MS = "latency_ms"
#: What the training of any Task reports besides its validation.
TRAIN_METRICS = ("train/loss", "train/grad_norm", "train/lr", "train/samples_per_s", "train/data_wait_s")
#: Beginnings of the names of all metrics that the training of a Task reports.
TASK_PREFIXES = ("train/", "validation/")


def strip_split(name: str) -> str:
    """Return the name of a metric without the split that it is measured on."""
    return name.rpartition("/")[2]


def suggest_metric(name: str, known: Collection[str]) -> str:
    """Return what was probably meant, and what there is: ``did you mean 'loss'? there is: accuracy, loss``."""
    names = sorted(known)
    same = [each for each in names if strip_split(each) == strip_split(name)]
    similar = same or difflib.get_close_matches(name, names, 1)
    if not similar:
        bare = {strip_split(each): each for each in names}
        similar = [bare[each] for each in difflib.get_close_matches(strip_split(name), bare, 1)]
    listed = ", ".join(names[:MAX_LISTED_NAMES]) + (", ..." if len(names) > MAX_LISTED_NAMES else "")
    question = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{question}there is: {listed or 'none'}"


def find_unknown_metric(
    trained: Iterable[str],
    measured: Iterable[str],
    *,
    validated: Collection[str] | None = None,
    computed: Collection[str] | None = None,
) -> str:
    """Return what is wrong with metrics that a Task is to report in training, and in its evaluation; '' if nothing is.

    ``validated``: what ``Task.metrics`` returns, ``computed``: what evaluation measures besides; None: not known yet.
    """
    known = {*TRAIN_METRICS, *(f"validation/{name}" for name in validated or ())}
    for name in trained:
        if not name.startswith(TASK_PREFIXES):
            return (
                f"the training of a Task reports no {name!r}: its metrics begin with {' or '.join(TASK_PREFIXES)}; did "
                f"you mean 'validation/{strip_split(name)}'?"
            )
        if name not in known and (validated is not None or name.startswith("train/")):
            return f"the training reports no {name!r}: {suggest_metric(name, known)}"
    if validated is None or computed is None:
        return ""
    tested = {f"test/{name}" for name in (*validated, *computed)}
    for name in measured:
        if strip_split(name) not in map(strip_split, tested):
            return f"the evaluation measures no {name!r}: {suggest_metric(name, tested)}"
    return ""


def describe_absent_metrics(
    spec: Mapping[str, Any],
    reported: Collection[str],
    *,
    epoch: int = 0,
    is_ended: bool = False,
    is_evaluated: bool = False,
) -> list[str]:
    """Return a sentence for each metric that a request names and its run does not report, or has no line for.

    Nothing before the first epoch is over: a metric may come at its end. ``spec`` is a RunSpec as stored, without
    defaults; ``epoch`` is the present one.
    """
    if spec.get("kind", "train") != "train" or not (is_ended or _has_reported_epoch(spec, reported, epoch)):
        return []
    unmatched = [name for name in spec.get("metric_patterns") or () if name not in reported] if is_ended else []
    return [f"metric_patterns.{name} has matched no line of its output" for name in unmatched] + [
        f"{field} is {name!r}, which the run does not report: {suggest_metric(name, reported)}. {consequence}"
        for field, name, consequence in _find_absent(spec, reported, is_evaluated=is_evaluated)
    ]


def _has_reported_epoch(spec: Mapping[str, Any], reported: Collection[str], epoch: int) -> bool:
    """Return whether what is reported once an epoch has been reported."""
    if not reported:
        return False
    if spec.get("task") is not None and any(name.startswith("validation/") for name in reported):
        return True
    patterns = spec.get("metric_patterns") or {}
    return epoch >= 2 or (bool(patterns) and set(patterns) <= set(reported))


def _find_absent(
    spec: Mapping[str, Any], reported: Collection[str], *, is_evaluated: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield (field of the request, metric, what follows from its absence)."""
    retained = (spec.get("retention") or {}).get("metric")
    if retained is not None and retained not in reported:
        yield "retention.metric", retained, "No checkpoint is the best by it"
    evaluation = spec.get("evaluation") or {}
    measured: str | None = evaluation.get("metric")
    # A command of its own measures what it likes, and the metrics of a kind need all predictions.
    if measured is None or is_evaluated or evaluation.get("command") is not None:
        return
    if strip_split(measured) in map(strip_split, reported):
        return
    if spec.get("task") is None:
        yield "evaluation.metric", measured, "Unless its evaluation reports it, the run is not promoted"
    elif not any(strip_split(measured) in names for names in KIND_METRICS.values()):
        yield "evaluation.metric", measured, "Unless Task.summarize returns it, the run is not promoted"
