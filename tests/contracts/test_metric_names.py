"""Metrics that a request names and nobody reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from contracts.metric_names import KIND_METRICS, describe_absent_metrics, find_unknown_metric, suggest_metric
from trainbus.evaluation.kind_metrics import compute_kind_metrics

TASK = {"task": "t:T"}
SCRIPT = {"command": ["python", "train.py"]}
VALIDATED = {"train/loss", "validation/loss", "validation/accuracy"}
RETAINED = {"retention": {"metric": "validation/acuracy"}}
EVALUATED = {"evaluation": {"metric": "test/acuracy", "mode": "max"}}
PATTERNS = {"metric_patterns": {"accuracy": "a=(.*)"}}
#: Case -> the request, what its run has reported, and beginnings of what is told.
CASES: dict[str, tuple[dict[str, Any], set[str], dict[str, Any], list[str]]] = {
    "nothing is named": (TASK, VALIDATED, {}, []),
    "a task has not validated yet": ({**TASK, **RETAINED}, {"train/loss"}, {}, []),
    "a task has validated": ({**TASK, **RETAINED}, VALIDATED, {}, ["retention.metric is 'validation/acuracy'"]),
    "a task without validation": ({**TASK, **RETAINED}, {"train/loss"}, {"epoch": 2}, ["retention.metric"]),
    "both": ({**TASK, **RETAINED, **EVALUATED}, VALIDATED, {}, ["retention.metric", "evaluation.metric"]),
    "another split": ({**TASK, "evaluation": {"metric": "test/accuracy"}}, VALIDATED, {}, []),
    "a metric of a kind": ({**TASK, "evaluation": {"metric": "test/auc"}}, VALIDATED, {}, []),
    "it is evaluated": ({**TASK, **EVALUATED}, VALIDATED, {"is_evaluated": True}, []),
    "a command of its own": ({**SCRIPT, "evaluation": {"metric": "f1", "command": ["x"]}}, {"a"}, {"epoch": 3}, []),
    "a script reports": ({**SCRIPT, **EVALUATED}, {"loss"}, {"epoch": 1}, []),
    "a script has reported": ({**SCRIPT, **EVALUATED}, {"loss"}, {"epoch": 2}, ["evaluation.metric"]),
    "each pattern has matched": ({**SCRIPT, **PATTERNS, **RETAINED}, {"accuracy"}, {}, ["retention.metric"]),
    "it ended without any": ({**SCRIPT, **RETAINED}, set(), {"is_ended": True}, ["retention.metric"]),
    "a pattern without a match": (
        {**SCRIPT, **PATTERNS},
        {"loss"},
        {"is_ended": True},
        ["metric_patterns.accuracy has"],
    ),
    "a pattern may match later": ({**SCRIPT, **PATTERNS}, {"loss"}, {"epoch": 2}, []),
    "an evaluation": ({**TASK, **RETAINED, "kind": "evaluate"}, VALIDATED, {"is_ended": True}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_of_absent_metrics(case: str) -> None:
    spec, reported, state, beginnings = CASES[case]
    told = describe_absent_metrics(spec, reported, **state)
    assert len(told) == len(beginnings)
    assert all(text.startswith(beginning) for text, beginning in zip(told, beginnings, strict=True)), told


#: Name -> what is probably meant.
MEANT = {
    "validation/acuracy": "did you mean 'validation/accuracy'? there is: train/loss, validation/accuracy",
    "accuracy": "did you mean 'validation/accuracy'?",
    "test/acuracy": "did you mean 'validation/accuracy'?",
    "nope": "there is: train/loss, validation/accuracy, validation/loss",
}


@pytest.mark.parametrize("name", MEANT)
def test_what_was_meant_is_suggested(name: str) -> None:
    assert suggest_metric(name, VALIDATED).startswith(MEANT[name])


def test_every_metric_of_a_kind_is_known() -> None:
    target, half = np.array([0, 1, 1]), np.array([0.5, 0.25, 1.0])
    columns = {
        "target": target,
        "prediction": target,
        "probabilities": np.stack([1 - half, half], axis=1),
        "query": np.array(["a", "a", "b"]),
        "nll": half,
        "tokens": np.array([1, 1, 1]),
        "correct": target,
    }
    for kind, names in KIND_METRICS.items():
        assert set(compute_kind_metrics(kind, columns)) == set(names)


#: Metrics of training and of evaluation, what is known of a Task, and what is said.
UNKNOWN: list[tuple[list[str], list[str], dict[str, Any], str]] = [
    (["validation/accuracy"], ["test/x"], {}, ""),
    (["accuracy"], [], {}, "did you mean 'validation/accuracy'?"),
    (["test/loss"], [], {}, "did you mean 'validation/loss'?"),
    (["train/los"], [], {}, "did you mean 'train/loss'?"),
    (["validation/accuracy"], [], {"validated": ["loss"]}, "the training reports no 'validation/accuracy'"),
    (["validation/loss"], ["loss"], {"validated": ["loss"], "computed": []}, ""),
    ([], ["test/acuracy"], {"validated": ["loss"], "computed": ["accuracy"]}, "did you mean 'test/accuracy'?"),
    ([], ["test/acuracy"], {"validated": ["loss"]}, ""),
]


@pytest.mark.parametrize(("trained", "measured", "known", "text"), UNKNOWN)
def test_what_a_task_cannot_report(trained: list[str], measured: list[str], known: dict[str, Any], text: str) -> None:
    found = find_unknown_metric(trained, measured, **known)
    assert text in found
    assert bool(text) == bool(found)
