"""Answers against the evaluation's: every output that both have, with a tolerance by its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contracts.model_process import Tensor
from services.serving.core.golden import compare_answers
from services.serving.core.rows import outputs_to_rows
from trainbus.model.predictor import to_tensor


def compare(expected: list[dict[str, Any]], *outputs: Tensor) -> tuple[int, int]:
    """Return how many samples were compared, and how many answers differ."""
    keys = [f"s{number}" for number in range(len(expected))]
    by_key = dict(zip(keys, expected, strict=True))
    found = compare_answers(keys, by_key, outputs_to_rows(outputs), outputs, 1e-3)
    return found.samples, len(found.mismatches)


@pytest.mark.parametrize(
    ("expected", "output", "mismatches"),
    [
        ([0, 1], to_tensor("y", torch.tensor([0, 1])), 0),
        ([0, 1], to_tensor("y", torch.tensor([0, 2])), 1),
        (["a", "b"], to_tensor("y", ["a", "c"]), 1),
        ([1.0, 2.0], to_tensor("y", torch.tensor([1.0005, 2.0])), 0),
        ([1.0, 2.0], to_tensor("y", torch.tensor([1.01, 2.0])), 1),
        ([1e-6, 2e-6], to_tensor("y", torch.tensor([1e-6, 3e-6])), 1),
        ([1.0, 2.0], to_tensor("y", torch.tensor([[1.0], [2.0]])), 0),
        ([1.0, 3.0], to_tensor("y", torch.tensor([1.004, 3.0], dtype=torch.float16)), 0),
        ([1.0, 3.0], to_tensor("y", torch.tensor([1.004, 3.0], dtype=torch.bfloat16)), 0),
        ([[0.2, 0.8], [0.5, 0.5]], to_tensor("y", torch.tensor([[0.2, 0.8], [0.5, 0.5]])), 0),
        ([[0.2, 0.8], [0.5, 0.5]], to_tensor("y", torch.tensor([[0.2, 0.8], [0.6, 0.4]])), 1),
        ([0, 1], to_tensor("y", torch.tensor([[0, 1, 2], [0, 1, 2]])), 2),
        ([float("nan"), 1.0], to_tensor("y", torch.tensor([float("nan"), 1.0])), 0),
    ],
)
def test_an_output_is_compared_by_its_type(expected: list[Any], output: Tensor, mismatches: int) -> None:
    assert compare([{"y": value} for value in expected], output) == (2, mismatches)


def test_outputs_that_the_evaluation_did_not_keep_are_not_compared() -> None:
    assert compare([{"prediction": 1}], to_tensor("score", torch.tensor([0.5]))) == (0, 0)


def test_a_prediction_by_name_is_compared_with_the_class() -> None:
    outputs = (to_tensor("prediction", torch.tensor([1])), to_tensor("class", ["white"]))
    assert compare([{"prediction": "white"}], *outputs) == (1, 0)
    assert compare([{"prediction": "red"}], *outputs) == (1, 1)
