"""What a Task may return from ``predict``, and how it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainbus.evaluation.prediction_columns import make_columns
from trainbus.task import Task, TaskError

PAIR = (torch.tensor([0, 1]), torch.tensor([1, 1]))


def task(kind: Any = None, classes: tuple[str, ...] = ()) -> Task:
    made = Task()
    made.kind, made.classes = kind, classes
    return made


def test_a_pair_and_a_dict_are_columns() -> None:
    columns = make_columns(task(classes=("cat", "dog")), PAIR, ("a", "b"))
    assert {name: list(values) for name, values in columns.items()} == {
        "id": ["a", "b"], "prediction": [0, 1], "target": [1, 1], "class": ["dog", "dog"],
    }  # fmt: skip
    assert "class" not in make_columns(task(classes=("cat",)), PAIR, ("a", "b"))
    numbers = make_columns(task("regression"), PAIR, ("a", "b"))
    assert numbers["prediction"].dtype == "float64"
    half = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
    scored = make_columns(task(), {"score": half, "country": ("de", "fr")}, ("a", "b"))
    assert (list(scored["score"]), scored["country"]) == ([0.5, 1.5], ["de", "fr"])


BAD: dict[str, tuple[Any, Any, str]] = {
    "one tensor": (None, PAIR[0], r"must return a dict of columns, or the pair .*, not a tensor of shape \[2\]"),
    "three": (None, (1, 2, 3), "not 3 values"),
    "no target": (None, {"prediction": PAIR[0]}, "lacks 'target', which a Task needs"),
    "no query": ("ranking", PAIR, "lacks 'query', which a ranking needs"),
    "no tokens": ("language-modelling", {"nll": PAIR[0]}, "lacks 'tokens'"),
    "unknown kind": ("classify", PAIR, "kind is 'classify': it must be one of 'classification', 'regression'"),
    "one for the batch": (None, (torch.tensor(1), PAIR[1]), r"\['prediction'\] has shape \[\]: it must be \[2\]"),
    "too few": (None, (PAIR[0][:1], PAIR[1]), r"\['prediction'\] has shape \[1\]: it must be \[2\]"),
    "logits": (None, (torch.zeros(2, 3), PAIR[1]), r"has shape \[2, 3\]: it must be \[2\]"),
    "flat probabilities": (
        None, {"prediction": PAIR[0], "target": PAIR[1], "probabilities": torch.zeros(2)}, r"\[2, classes\]",
    ),
    "an id": (None, {"prediction": PAIR[0], "target": PAIR[1], "id": ["a", "b"]}, "must not return 'id'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_prediction_is_refused_by_name(case: str) -> None:
    kind, returned, words = BAD[case]
    with pytest.raises(TaskError, match=words):
        make_columns(task(kind), returned, ("a", "b"))
