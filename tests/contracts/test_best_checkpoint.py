"""Which checkpoint of a run is the best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from contracts.best_checkpoint import RankingMetric, find_best, find_judged, find_ranking_metric, rank_checkpoints
from contracts.spec.run import RunSpec


@dataclass(frozen=True)
class Checkpoint:
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "r", "command": ["true"], **fields})


def test_the_best_is_by_the_metric_of_retention() -> None:
    known = [Checkpoint(step, {"validation/loss": loss}) for step, loss in ((10, 0.4), (20, 0.2), (30, 0.3))]
    assert find_best(spec(), known) == known[1]
    assert find_best(spec(retention={"metric": "validation/loss", "mode": "max"}), known) == known[0]


def test_of_equals_the_later_one_goes_first_and_what_is_not_a_number_is_not_ranked() -> None:
    known = [Checkpoint(1, {"a": 2.0}), Checkpoint(2, {"a": 2.0}), Checkpoint(3, {"a": float("nan")}), Checkpoint(4)]
    assert [each.step for each in rank_checkpoints(known, RankingMetric("a", "max"))] == [2, 1]


@pytest.mark.parametrize(("metrics", "name"), [({"test/accuracy": 0.5}, "test/accuracy"), ({"loss": 0.1}, None)])
def test_the_metric_of_the_evaluation_is_the_second_choice(metrics: dict[str, float], name: str | None) -> None:
    evaluated = spec(model="m", evaluation={"metric": "test/accuracy", "mode": "max"})
    found = find_ranking_metric(evaluated, [Checkpoint(1, metrics)])
    assert (found.name if found else None) == name
    assert find_best(None, [Checkpoint(1, metrics)]) is None


#: ``evaluation.checkpoint``, the losses of three checkpoints -> the number of the one that is judged; None: the final.
JUDGED: dict[str, tuple[str | None, list[float | None], int | None]] = {
    "the best where one was measured": (None, [0.4, 0.2, 0.3], 1),
    "the final one where none was": (None, [None, None, None], None),
    "the best": ("best", [0.4, 0.2, 0.3], 1),
    "the final one": ("final", [0.4, 0.2, 0.3], None),
    "one was not measured": (None, [0.4, 0.3, None], 1),
}


@pytest.mark.parametrize("case", JUDGED)
def test_the_checkpoint_that_is_judged(case: str) -> None:
    choice, losses, expected = JUDGED[case]
    known = [
        Checkpoint(step, {} if loss is None else {"validation/loss": loss}) for step, loss in enumerate(losses, start=1)
    ]
    evaluated = spec(model="m", evaluation={"metric": "accuracy", "mode": "max", "checkpoint": choice})
    assert find_judged(evaluated, known) == (None if expected is None else known[expected])


def test_a_run_without_evaluation_is_judged_by_its_best() -> None:
    known = [Checkpoint(1, {"validation/loss": 0.1}), Checkpoint(2, {"validation/loss": 0.2})]
    assert find_judged(spec(), known) == known[0]
    assert find_judged(None, known) is None
