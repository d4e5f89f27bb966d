"""The one metric of a run that lists show."""

from __future__ import annotations

import pytest

from contracts.main_metric import choose_main_metric


@pytest.mark.parametrize(
    ("metrics", "evaluation", "evaluated_by", "expected"),
    [
        ({}, {}, None, None),
        ({"loss": 0.5, "accuracy": 0.9}, {}, None, ("accuracy", 0.9)),
        ({"train/lr": 0.1, "train/loss": 0.5}, {}, None, ("train/loss", 0.5)),
        ({"tokens": 7.0}, {}, "test/loss", ("tokens", 7.0)),
        ({"accuracy": 0.9}, {"test/loss": 0.3, "test/accuracy": 0.8}, "test/accuracy", ("test/accuracy", 0.8)),
        ({"accuracy": 0.9}, {"test/loss": 0.3}, "test/accuracy", ("test/loss", 0.3)),
    ],
)
def test_the_metric_that_matters(
    metrics: dict[str, float],
    evaluation: dict[str, float],
    evaluated_by: str | None,
    expected: tuple[str, float] | None,
) -> None:
    assert choose_main_metric(metrics, evaluation, evaluated_by) == expected
