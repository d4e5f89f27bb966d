"""Models that scripts kept in MLflow's format: saved by MLflow, loaded in the model process, and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.models import infer_signature
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from contracts.events.model import ModelDeployed, ModelDeployFailed
from contracts.model_process import MLFLOW_FOLDER, ModelLaunch
from loadtest.served_models import COLUMNS, draw_rows, label
from services.serving.core.mlflow_signature import parse_signature
from services.serving.core.rows import outputs_to_rows
from services.serving.mlflow_model import read_mlflow_model
from tests.serving.conftest import House
from trainbus.model.predictor import InputError
from trainbus.model.pyfunc_predictor import PyfuncPredictor

ROWS = draw_rows(200, seed=5)
TABLE = pd.DataFrame(ROWS)


def fit() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(C=1e6)).fit(TABLE, [label(row) for row in ROWS])


class Upper(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """Texts in and out, with a table of two outputs."""

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        texts = model_input["text"]
        return pd.DataFrame({"upper": texts.str.upper(), "length": texts.str.len()})


def load(folder: Path) -> PyfuncPredictor:
    return PyfuncPredictor.load(ModelLaunch(folder=folder, socket=folder / "x.sock"))


def ask(predictor: PyfuncPredictor, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    return outputs_to_rows(predictor.predict([{"json": json.dumps(row).encode()} for row in rows]))


def test_a_column_has_the_type_of_the_signature(tmp_path: Path) -> None:
    mlflow.sklearn.save_model(fit(), tmp_path / MLFLOW_FOLDER, input_example=TABLE.head(3), pip_requirements=[])
    signature, samples = read_mlflow_model(tmp_path / MLFLOW_FOLDER)
    assert [each.to_plain() for each in signature.inputs] == [
        {"name": name, "datatype": "FP64", "shape": [-1]} for name in COLUMNS
    ]
    assert [each.name for each in signature.outputs] == ["prediction"]
    assert len(samples) == 3
    predictor = load(tmp_path)
    whole = {"a": 1, "b": 0, "c": 0, "d": 0}  # a client's JSON need not write 1.0
    assert ask(predictor, whole, {"a": 0, "b": 0, "c": 1, "d": 1}) == [{"prediction": 0}, {"prediction": 1}]
    with pytest.raises(InputError) as raised:
        ask(predictor, whole, {"a": 1, "b": 0, "c": 0})
    assert raised.value.problems == [
        {"row": 1, "field": "d", "text": "the field 'd' is missing", "present": ["a", "b", "c"]}
    ]


def test_texts_go_in_and_come_out(tmp_path: Path) -> None:
    example = pd.DataFrame({"text": ["yes"], "times": [2]})
    signature = infer_signature(example, pd.DataFrame({"upper": ["YES"], "length": [3]}))
    mlflow.pyfunc.save_model(tmp_path / MLFLOW_FOLDER, python_model=Upper(), signature=signature, pip_requirements=[])
    predictor = load(tmp_path)
    assert ask(predictor, {"text": "no", "times": 1}) == [{"upper": "NO", "length": 2}]
    with pytest.raises(InputError) as raised:
        ask(predictor, {"text": 5, "times": 1})
    assert [(each["row"], each["field"]) for each in raised.value.problems] == [(0, "text")]
    with pytest.raises(InputError) as raised:
        ask(predictor, {"text": "no", "times": "many"})
    assert raised.value.problems[0]["field"] == "times"


def test_a_tensor_without_a_name_is_the_input(tmp_path: Path) -> None:
    values = TABLE.to_numpy()
    model = LogisticRegression().fit(values, [label(row) for row in ROWS])
    signature = infer_signature(values, model.predict(values))
    mlflow.sklearn.save_model(model, tmp_path / MLFLOW_FOLDER, signature=signature, pip_requirements=[])
    [spec] = read_mlflow_model(tmp_path / MLFLOW_FOLDER)[0].inputs
    assert spec.to_plain() == {"name": "input", "datatype": "FP64", "shape": [-1, 4]}
    assert ask(load(tmp_path), {"input": [1, 0, 0, 0]}) == [{"prediction": 0}]


def test_a_pipeline_of_hugging_face_takes_texts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make integrations")
    (tmp_path / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad")))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=7, **sizes))
    model.eval()
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"))
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    signature = infer_signature("good", pd.DataFrame({"label": ["LABEL_0"], "score": [0.5]}))
    mlflow.transformers.save_model(pipeline, tmp_path / MLFLOW_FOLDER, signature=signature, pip_requirements=[])
    texts = ["good", "bad", "good bad"]
    answers = ask(load(tmp_path), *({"input": text} for text in texts))
    expected = pipeline(texts)
    assert [each["label"] for each in answers] == [each["label"] for each in expected]
    assert [each["score"] for each in answers] == pytest.approx([each["score"] for each in expected])


class Columns(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """The values as the model sees them."""

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> list[str]:
        return [" ".join(map(repr, row)) for row in model_input.itertuples(index=False)]


def test_lists_times_and_bytes_are_converted(tmp_path: Path) -> None:
    example = {"v": [[1.0]], "at": [pd.Timestamp("2026-01-01")], "b": [b"x"], "n": [np.int32(3)]}
    signature = infer_signature(pd.DataFrame(example))
    mlflow.pyfunc.save_model(tmp_path / MLFLOW_FOLDER, python_model=Columns(), signature=signature, pip_requirements=[])
    predictor = load(tmp_path)
    row = {"v": [1, 2], "at": "2026-02-03T04:05:06", "b": "eA==", "n": 4}
    assert ask(predictor, row) == [{"prediction": "[1.0, 2.0] Timestamp('2026-02-03 04:05:06') b'x' 4"}]
    for name, value in (("at", "soon"), ("b", "!"), ("n", 2**40)):
        with pytest.raises(InputError) as raised:
            ask(predictor, row, {**row, name: value})
        assert [(each["row"], each["field"]) for each in raised.value.problems] == [(1, name)]


def test_without_a_signature_rows_are_a_table(tmp_path: Path) -> None:
    mlflow.pyfunc.save_model(tmp_path / MLFLOW_FOLDER, python_model=Upper(), pip_requirements=[])
    signature, samples = read_mlflow_model(tmp_path / MLFLOW_FOLDER)
    assert (signature.inputs, signature.is_table, samples) == ((), True, [])
    assert ask(load(tmp_path), {"text": "a"}, {"text": "bc"}) == [
        {"upper": "A", "length": 1},
        {"upper": "BC", "length": 2},
    ]


@pytest.mark.parametrize("found", [None, "", {"inputs": "x"}, {"inputs": "[{}]"}, {"inputs": "[1]", "outputs": 3}])
def test_a_broken_signature_is_none(found: Any) -> None:
    assert parse_signature(found).inputs == ()


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        (np.array([1, 2]), [{"prediction": 1}, {"prediction": 2}]),
        (np.array([[0.5, 0.5], [1, 0]]), [{"prediction": [0.5, 0.5]}, {"prediction": [1.0, 0.0]}]),
        (pd.Series(["a", "b"]), [{"prediction": "a"}, {"prediction": "b"}]),
        ([{"label": "x", "score": 0.5}, {"label": "y", "score": 1}], None),
        ({"label": ["x", "y"], "score": [0.5, 1.0]}, None),
        (pd.DataFrame({"label": ["x", "y"], "score": [0.5, 1]}), None),
        (pd.DataFrame({0: [1, 2]}), [{"prediction": 1}, {"prediction": 2}]),
        ([[1, 2], [3]], [{"prediction": "[1, 2]"}, {"prediction": "[3]"}]),
    ],
)
def test_what_a_model_returns_becomes_named_outputs(tmp_path: Path, found: Any, rows: Any) -> None:
    class Model:
        def predict(self, data: Any) -> Any:
            return found

        class metadata:
            @staticmethod
            def get_input_schema() -> None:
                return None

    expected = rows or [{"label": "x", "score": 0.5}, {"label": "y", "score": 1.0}]
    assert ask(PyfuncPredictor(Model()), {"n": 1}, {"n": 2}) == expected


def kept_files(folder: Path) -> dict[str, bytes]:
    return {
        f"model/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def sklearn_files(tmp_path: Path) -> dict[str, bytes]:
    mlflow.sklearn.save_model(fit(), tmp_path / "saved", input_example=TABLE.head(3), pip_requirements=[])
    return kept_files(tmp_path / "saved")


@pytest.mark.shell
async def test_a_script_takes_over_from_a_task_and_back(house: House, sklearn_files: dict[str, bytes]) -> None:
    await house.deploy("task")
    house.runs["script"] = await house.store.keep("script", sklearn_files)
    await house.store.evaluate("script")
    second = await house.deploy("script")
    assert (second.replaced_version, second.golden_samples) == (1, 32)
    answer = await house.predict(*ROWS[:3])
    assert answer["version"] == 2
    assert answer["predictions"] == [{"prediction": label(row)} for row in ROWS[:3]]
    assert (await house.models())[0]["golden_samples"] == 32
    tensors = [{"name": name, "shape": [1], "datatype": "FP64", "data": [ROWS[0][name]]} for name in COLUMNS]
    infer = await house.http.post("/v2/models/sums/infer", json={"inputs": tensors})
    assert infer.json()["outputs"] == [
        {"name": "prediction", "datatype": "INT64", "shape": [1], "data": [label(ROWS[0])]}
    ]
    refused = await house.http.post("/predict", json=[{"a": 1, "b": 2, "c": 3}])
    assert (refused.status_code, refused.json()["problems"][0]["field"]) == (422, "rows.0.d")
    third = await house.conclusion(await house.promote("task"))
    assert isinstance(third, ModelDeployed)
    assert (await house.predict(ROWS[0]))["predictions"][0]["class"] in ("low", "high")


@pytest.mark.shell
async def test_a_model_of_other_features_is_warmed_up_with_its_example(house: House, tmp_path: Path) -> None:
    example = pd.DataFrame({"a": [3]})  # the dataset has fractions there
    mlflow.pyfunc.save_model(tmp_path / "saved", python_model=Columns(), input_example=example, pip_requirements=[])
    house.runs["ranks"] = await house.store.keep("ranks", kept_files(tmp_path / "saved"))
    await house.store.evaluate("ranks")
    assert (await house.deploy("ranks")).golden_samples == 0
    assert (await house.predict({"a": 4}))["predictions"] == [{"prediction": "4"}]


@pytest.mark.shell
async def test_a_script_without_an_mlflow_model_is_told_what_to_save(house: House) -> None:
    house.runs["bare"] = await house.store.keep("bare", {"weights.bin": b"1"})
    fact = await house.conclusion(await house.promote("bare"))
    assert isinstance(fact, ModelDeployFailed)
    assert fact.stage == "fetch"
    assert "mlflow.sklearn.save_model(model, trainbus.output_dir() / 'model')" in fact.reason


@pytest.mark.shell
async def test_a_script_whose_answers_differ_from_its_evaluation_is_refused(
    house: House, sklearn_files: dict[str, bytes]
) -> None:
    house.runs["other"] = await house.store.keep("other", sklearn_files)
    wrong = [1 - label(row) for row in draw_rows(house.store.samples)]
    await house.store.evaluate("other", prediction=wrong)
    fact = await house.conclusion(await house.promote("other"))
    assert isinstance(fact, ModelDeployFailed)
    assert (fact.stage, fact.serving_version) == ("golden", None)
