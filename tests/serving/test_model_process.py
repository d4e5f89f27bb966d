"""The model process: samples in, tensors out, without a process."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import pandas
import pytest
import torch
from torch import nn

from contracts.datasets import FieldStatistics
from contracts.model_process import FrameReader, Tensor, decode_answer, decode_predict, encode_answer, encode_predict
from services.serving.core.problems import InputProblem
from services.serving.core.rows import rows_to_samples, to_values
from services.serving.core.signature import infer_inputs, without_labels
from services.serving.process import to_problem
from trainbus import Task
from trainbus.model.predictor import InputError
from trainbus.model.pyfunc import PyfuncModel
from trainbus.model.targets import fill_targets
from trainbus.model.task_predictor import TaskPredictor
from trainbus.task import TaskError


class Wine(Task):
    """A row with its target in it, as rows usually have it."""

    classes = ("red", "white")
    statistics = MappingProxyType({"target": FieldStatistics(count=3, mean=0.5, std=0.5, min=0, max=1)})
    target = "target"

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def decode(self, sample: dict[str, bytes]) -> Any:
        row = super().decode(sample)
        return torch.tensor([float(row["acid"]), float(row["hue"])]), int(row["target"])

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]).argmax(1), batch[1]


def sample(**row: Any) -> dict[str, bytes]:
    return {"json": json.dumps(row).encode()}


@pytest.fixture
def predictor() -> TaskPredictor:
    task = Wine()
    model = task.model()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    return TaskPredictor(model, task, torch.device("cpu"))


class Table:
    """A batch that moves itself, as those of graphs and of tokenizers do."""

    def __init__(self, values: torch.Tensor, device: torch.device | None = None) -> None:
        self.values, self.device = values, device

    def to(self, device: torch.device) -> Table:
        return Table(self.values.to(device), device)


class TableWine(Wine):
    def collate(self, examples: list[Any]) -> Any:
        return {"table": Table(torch.stack([values for values, _ in examples]))}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        assert batch["table"].device is not None, "the batch was not moved to the device"
        return model(batch["table"].values).argmax(1), torch.zeros(len(batch["table"].values))


SAMPLES = [sample(acid=1, hue=0, target=0), sample(acid=0, hue=1, target=1), sample(acid=2, hue=1, target=0)]


def test_predictions_have_the_name_of_their_class(predictor: TaskPredictor) -> None:
    outputs = {each.name: to_values(each) for each in predictor.predict(SAMPLES)}
    assert outputs == {"prediction": [0, 1, 0], "class": ["red", "white", "red"]}


def test_a_batch_that_moves_itself_goes_to_the_device_as_in_training() -> None:
    task, device = TableWine(), torch.device("cpu")
    (output, _) = TaskPredictor(task.model(), task, device).predict(SAMPLES)
    assert output.shape == (3,)
    assert len(PyfuncModel(task.model(), task, device).predict([json.loads(each["json"]) for each in SAMPLES])) == 2


def test_a_row_may_have_the_target_or_not(predictor: TaskPredictor) -> None:
    signature = without_labels(infer_inputs(SAMPLES), predictor.targets)
    assert signature.input_names == ("acid", "hue")
    rows = [{"acid": 1, "hue": 0}, {"acid": 0, "hue": 1, "target": "unknown"}]
    outputs = {each.name: to_values(each) for each in predictor.predict(rows_to_samples(rows, signature))}
    assert outputs["prediction"] == [0, 1]


def test_a_target_gets_a_value_of_the_training_data() -> None:
    task = Wine()
    task.target, task.statistics = ("target", "kind"), {"target": Wine.statistics["target"]}
    assert json.loads(fill_targets(task, sample(acid=1, kind=None))["json"]) == {"acid": 1, "target": 0, "kind": "red"}
    assert fill_targets(task, {"png": b"x"}) == {"cls": b"0", "png": b"x"}


def test_mlflow_predicts_without_the_target() -> None:
    task = Wine()
    model = task.model()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    found = PyfuncModel(model, task, torch.device("cpu")).predict(pandas.DataFrame([{"acid": 0.0, "hue": 1.0}]))
    assert list(found["class"]) == ["white"]


def test_a_label_that_was_added_is_not_said_to_be_in_the_row(predictor: TaskPredictor) -> None:
    signature = without_labels(infer_inputs(SAMPLES), predictor.targets)
    with pytest.raises(InputError) as raised:
        predictor.predict(rows_to_samples([{"acid": 1.0}], signature))
    [problem] = raised.value.problems
    assert to_problem(problem, signature.labels) == InputProblem(
        "rows.0.hue", "the field 'hue' is missing; the row has 'acid'"
    )


def test_mlflow_says_which_field_is_missing(predictor: TaskPredictor) -> None:
    model = PyfuncModel(nn.Linear(2, 2), Wine(), torch.device("cpu"))
    with pytest.raises(TaskError, match=r"^row 1: the field 'hue' is missing; the row has 'acid', 'target'$"):
        model.predict([{"acid": 1, "hue": 1, "target": 0}, {"acid": 1, "target": 0}])
    with pytest.raises(TaskError, match=r"^row 0: the field 'acid' is missing; the row has 'hue'$"):
        model.predict(pandas.DataFrame([{"hue": 1}]))


def test_a_key_that_the_row_has_is_not_said_to_be_missing(
    predictor: TaskPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wine, "decode", lambda self, sample: {}["acid"])
    with pytest.raises(InputError, match="cannot be decoded: KeyError: 'acid'"):
        predictor.predict(SAMPLES[:1])


def test_a_sample_that_cannot_be_decoded_is_named(predictor: TaskPredictor) -> None:
    with pytest.raises(InputError) as raised:
        predictor.predict([SAMPLES[0], sample(acid=1, target=0)])
    assert raised.value.problems == [
        {"row": 1, "field": "hue", "text": "the field 'hue' is missing", "present": ["acid", "target"]}
    ]


def test_frames_survive_any_cut() -> None:
    outputs = (Tensor("p", "INT64", (2,), bytes(16)), Tensor("c", "BYTES", (2,), b"\1\0\0\0a\1\0\0\0b"))
    data = encode_predict(3, SAMPLES) + encode_answer(4, outputs)
    for size in (1, 7, 1000):
        reader = FrameReader()
        frames = [frame for start in range(0, len(data), size) for frame in reader.feed(data[start : start + size])]
        assert decode_predict(frames[0]) == SAMPLES
        assert decode_answer(frames[1]) == outputs
    assert [each.data for each in outputs[1].split([1, 1])] == [b"\1\0\0\0a", b"\1\0\0\0b"]
