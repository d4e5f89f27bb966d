"""Answers against the evaluation's: every output that both have, with a tolerance by its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contracts.events.model import ModelDeployFailed
from contracts.model_process import Tensor
from loadtest.served_models import TASK, draw_rows, label
from services.serving.core.golden import compare_answers
from services.serving.core.rows import outputs_to_rows, rows_to_samples, samples_to_rows
from services.serving.core.signature import infer_inputs, without_labels
from tests.serving.conftest import House
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


@pytest.mark.parametrize(
    "sample",
    [{"png": b"\x89PNG", "cls": b"1"}, {"json": b'{"a": 1}', "png": b"x", "cls": b"0"}, {"json": b'{"a": 1, "t": 2}'}],
)
def test_a_sample_goes_through_the_door_as_a_client_sends_it(sample: dict[str, bytes]) -> None:
    signature = without_labels(infer_inputs([sample]), ("t",))
    [found] = rows_to_samples(samples_to_rows([sample], signature), signature)
    expected = {name: content for name, content in sample.items() if name != "cls"}
    assert found == (expected if "png" in sample else {"json": b'{"a": 1}'})


PREDICT = "        return (1 - found"


@pytest.mark.shell
async def test_probabilities_that_differ_are_found(house: House) -> None:
    answer = '{"prediction": found, "target": labels, "probabilities": model(numbers).softmax(1)}'
    probabilities = TASK.replace(PREDICT, f"        return {answer}\n{PREDICT}")
    house.store.use_code(await house.store.write_code({"sums_task.py": probabilities.encode()}))
    rows = draw_rows(house.store.samples)
    kept = [[1.0 - label(row), float(label(row))] for row in rows]  # as sure as no softmax is
    house.runs["sure"] = await house.store.train("sure", kept={"probabilities": kept})
    fact = await house.conclusion(await house.promote("sure"))
    assert isinstance(fact, ModelDeployFailed)
    assert fact.stage == "golden"
    assert "gets probabilities [" in fact.reason


@pytest.mark.shell
async def test_that_nothing_was_compared_is_shown(house: House) -> None:
    serve = TASK + '\n    def serve(self, model, batch):\n        return {"score": model(batch[0])}\n'
    house.store.use_code(await house.store.write_code({"sums_task.py": serve.encode()}))
    assert (await house.deploy("other")).golden_samples == 0
    assert (await house.models())[0]["golden_samples"] == 0
