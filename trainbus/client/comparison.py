"""Runs side by side: what was asked for differently, and what came of it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.best_checkpoint import ranking_metrics
from contracts.metric_names import LATENCY_MS, suggest_metric
from trainbus.client.errors import UsageError
from trainbus.client.runs import MetricPoint
from trainbus.client.views import RunView

#: Fields of a request that name or describe a run; a difference in them says nothing about its result.
DESCRIPTIVE = ("name", "tags", "user", "team", "experiment")
#: Ends of the names of metrics that are better when they are lower.
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer", "ms")
#: Metrics about the training itself, which are compared only on request.
OPERATIONAL = ("train/lr", "train/samples_per_s", "train/data_wait_s", "train/grad_norm", f"test/{LATENCY_MS}")


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric of one run."""

    last: float
    best: float
    best_step: int | None
    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a comparison. ``label`` is the name as it was given."""

    label: str
    run_id: str
    state: str
    #: None: a script has reported none.
    step: int | None
    metrics: dict[str, MetricSummary]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side, in the order in which they were named."""

    runs: tuple[ComparedRun, ...]
    #: Dotted field of the request -> its value in each run, None where it is not set; only fields that differ.
    differences: dict[str, tuple[Any, ...]]
    #: Metric -> min or max, which is better; those that the runs have.
    modes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a comparison reads of one run. ``checkpoint`` is (step, metrics) where one was named."""

    label: str
    view: RunView
    series: Mapping[str, Sequence[MetricPoint]]
    checkpoint: tuple[int, Mapping[str, float]] | None = None


def compare_runs(results: Sequence[RunResult], metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs. ``metrics``: only these; default: all but those about the training's speed and rates.

    Raises:
        UsageError: no run has one of the metrics.
    """
    modes = {name: _mode(name, results) for name in _names(results, metrics)}
    compared = tuple(
        ComparedRun(
            result.label,
            result.view.run_id,
            result.view.state,
            result.view.known_step if result.checkpoint is None else result.checkpoint[0],
            {name: found for name, mode in modes.items() if (found := _summarize(result, name, mode)) is not None},
        )
        for result in results
    )
    flat = [_flatten(_request(result.view)) for result in results]
    names = sorted({name for each in flat for name in each})
    values = {name: tuple(each.get(name) for each in flat) for name in names}
    differences = {name: found for name, found in values.items() if any(each != found[0] for each in found)}
    return Comparison(compared, differences, modes)


def _names(results: Sequence[RunResult], wanted: Sequence[str]) -> list[str]:
    """Return the metrics to compare: those that more runs have first."""
    counts: dict[str, int] = {}
    for result in results:
        for name in {*result.series, *result.view.metrics, *result.view.evaluation}:
            counts[name] = counts.get(name, 0) + 1
    if unknown := [name for name in wanted if name not in counts]:
        raise UsageError(f"none of the runs has a metric {unknown[0]!r}: {suggest_metric(unknown[0], counts)}")
    if wanted:
        return list(wanted)
    return sorted((name for name in counts if name not in OPERATIONAL), key=lambda name: (-counts[name], name))


def _mode(name: str, results: Sequence[RunResult]) -> str:
    for result in results:
        for metric in ranking_metrics(result.view.spec):
            if metric.name == name:
                return metric.mode
    return "min" if name.rpartition("/")[2].rpartition("_")[2] in LOWER_IS_BETTER else "max"


def _summarize(result: RunResult, name: str, mode: str) -> MetricSummary | None:
    points = tuple((point.step, point.value) for point in result.series.get(name, ()))
    choose = min if mode == "min" else max
    best_step, best = choose(points, key=lambda point: point[1]) if points else (None, None)
    known = {**result.view.metrics, **result.view.evaluation}
    if result.checkpoint is not None:
        last = result.checkpoint[1].get(name)
    else:
        last = known.get(name, points[-1][1] if points else None)
    if last is None:
        last = best
    if last is None:
        return None
    return MetricSummary(last, last if best is None else best, best_step, points)


def _request(view: RunView) -> dict[str, Any]:
    if view.spec is None:
        return {}
    body = view.spec.model_dump(mode="json", exclude_defaults=True, exclude={*DESCRIPTIVE})
    # People put secrets into the environment: only whether a value differs is shown.
    env: dict[str, str] = body.get("env") or {}
    body["env"] = {name: f"({hashlib.sha256(value.encode()).hexdigest()[:4]})" for name, value in env.items()}
    if view.dataset_id is not None:
        body["data"] = view.dataset_id[:12]
    if (code := body.pop("code", None)) is not None:
        body["code"] = code["sha256"][:12]
    return body


def _flatten(body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in body.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
