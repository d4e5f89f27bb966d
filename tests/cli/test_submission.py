"""What ``trainbus submit`` makes of its options, and what it says to wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Unpack

import pytest

from contracts.events.train import TrainRequested
from contracts.spec.data import DataSource
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.package import CodePackage
from trainbus.client.submission import build_request, parse_slots, resolve_source
from trainbus.client.submit_options import SubmitOptions
from trainbus.commands.options import parse_param

PACKAGE = CodePackage(b"", "ab" * 32, ("task.py",), 1, "c0ffee", True)
PROJECT = Path("/somewhere/digits")


def build(task: str | None = None, **options: Unpack[SubmitOptions]) -> TrainRequested:
    return build_request(PROJECT, task, PACKAGE, options)


@pytest.mark.parametrize(("text", "low", "high"), [("2", 2, 2), ("1..4", 1, 4), ("1-4", 1, 4)])
def test_slots(text: str, low: int, high: int) -> None:
    assert parse_slots(text) == {"min": low, "max": high}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("lr=0.1", 0.1), ("name=adam", "adam"), ("on=true", True), ("layers=[1, 2]", [1, 2]), ("x=a=b", "a=b")],
)
def test_params(text: str, expected: Any) -> None:
    assert parse_param(text)[1] == expected


@pytest.mark.parametrize(("command", "words"), [("python 'x", "No closing quotation"), (" ", "the command is empty")])
def test_a_command_that_is_none_is_refused(command: str, words: str) -> None:
    with pytest.raises(TrainbusError, match=words):
        build(command=command)


def test_a_task_with_options() -> None:
    request = build("task:Digits", slots="1..4", epochs=3, data="s3://lake/digits/", priority=5, params={"lr": 0.1})
    assert request.name == "digits"
    assert request.code is not None
    assert request.code.uri == f"s3://code/packages/{PACKAGE.sha256}.tar.gz"
    assert (request.code.git_commit, request.code.git_dirty) == ("c0ffee", True)
    assert (request.slots.min, request.slots.max, request.priority) == (1, 4, 5)
    assert request.params == {"lr": 0.1}
    assert request.training is not None
    assert request.training.epochs == 3
    assert request.data is not None


def test_fine_tuning_is_two_options(tmp_path: Path) -> None:
    request = build("task:A", init_from="s3://models/m.json", init_exclude=("head.*",))
    assert (request.init_from, request.init_exclude) == ("s3://models/m.json", ("head.*",))
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"init_from": "s3://models/other.json", "init_exclude": ["a.*"]}))
    request = build("task:A", request=file)
    assert (request.init_from, request.init_exclude) == ("s3://models/other.json", ("a.*",))
    with pytest.raises(TrainbusError, match="'init_exclude' needs 'init_from'"):
        build("task:A", init_exclude=("head.*",))


def test_exact_mode_is_an_option() -> None:
    request = build("task:A", slots="1..4", logical_ranks=4)
    assert request.training is not None
    assert (request.training.epochs, request.training.logical_ranks) == (1, 4)
    with pytest.raises(TrainbusError, match="ask for fewer slots or more logical ranks"):
        build("task:A", slots="1..6", logical_ranks=4)


def test_options_override_the_request_file(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(
        json.dumps({"name": "base", "task": "task:A", "params": {"lr": 1, "width": 8}, "training": {"max_steps": 5}})
    )
    request = build("task:B", request=file, epochs=2, params={"lr": 0.5})
    assert (request.name, request.task, request.params) == ("base", "task:B", {"lr": 0.5, "width": 8})
    assert request.training is not None
    assert (request.training.epochs, request.training.max_steps) == (2, 5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data": "s3://lake/mine/"}, {"source": "s3://lake/mine/", "format": "text", "window_length": 65}),
        ({"data": "s3://lake/mine/", "data_format": "jsonl"}, {"format": "jsonl", "window_length": 65}),
        ({"data": "a" * 64}, {"dataset_id": "a" * 64}),
    ],
    ids=["another place", "another format", "a dataset"],
)
def test_other_data_is_read_as_the_file_says(tmp_path: Path, options: SubmitOptions, expected: dict[str, Any]) -> None:
    file = tmp_path / "train.json"
    data = {"source": "s3://lake/theirs/", "format": "text", "window_length": 65}
    file.write_text(json.dumps({"task": "task:A", "data": data}))
    request = build(request=file, **options)
    assert request.data is not None
    assert expected.items() <= request.data.model_dump().items()


def test_a_command_replaces_the_task(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"name": "base", "task": "task:A"}))
    request = build(command=("python", "train.py"), request=file)
    assert (request.task, request.command) == (None, ["python", "train.py"])


WRONG: dict[str, tuple[SubmitOptions, str]] = {
    "slots upside down": ({"slots": "4..1"}, "smaller than slots.min"),
    "slots of letters": ({"slots": "many"}, "give a number"),
    "data elsewhere": ({"data": "/no/such/data"}, "give s3://bucket/prefix"),
    "no such file": ({"request": Path("/nowhere.json")}, "no readable JSON"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_option_names_the_change(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(TrainbusError, match=message) as caught:
        build("t:A", **options)
    assert caught.value.exit_code == 2


def test_a_param_without_a_value_is_refused() -> None:
    with pytest.raises(TrainbusError, match="name=value") as caught:
        parse_param("lr")
    assert caught.value.exit_code == 2


def test_an_unknown_field_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"name": "x", "task": "t:A", "training": {"epoch": 3, "epochs": 1}}))
    with pytest.raises(TrainbusError, match=r"training\.epoch"):
        build(request=file)


def test_a_folder_is_resolved_from_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_source("./my data") == (tmp_path / "my data").as_uri()
    assert resolve_source("file:///elsewhere") == "file:///elsewhere"
    assert resolve_source("s3://lake/mine") == "s3://lake/mine"


@pytest.mark.parametrize("text", ["nothing-here", "s3://lake", "https://example.org/data", "file:relative"])
def test_no_address_of_data(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainbusError, match="s3://bucket/prefix"):
        resolve_source(text)


def test_options_add_to_what_the_request_has(tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    base = {"name": "b", "command": ["x"], "env": {"A": "1", "B": "1"}, "metric_patterns": {"loss": "l (.*)"}}
    file.write_text(json.dumps(base))
    request = build(request=file, env={"B": "2"}, metric_patterns={"acc": "a=([0-9.]+)"}, team="research/vision")
    assert request.env == {"A": "1", "B": "2"}
    assert request.metric_patterns == {"loss": "l (.*)", "acc": "a=([0-9.]+)"}
    assert request.team == "research/vision"


def test_the_label_is_a_field_of_the_source() -> None:
    request = build("task:A", data="s3://lake/rows.jsonl", label_field="species")
    assert isinstance(request.data, DataSource)
    assert (request.data.format, request.data.label_field) == ("jsonl", "species")
    with pytest.raises(UsageError, match="give it with a source"):
        build("task:A", data="a" * 64, label_field="species")


@pytest.mark.parametrize(
    ("text", "mode"),
    [("test/accuracy", "max"), ("test/loss", "min"), ("val_rmse", "min"), ("reward:max", "max"), ("auc:min", "min")],
)
def test_the_metric_of_an_evaluation_says_what_is_better(text: str, mode: str) -> None:
    request = build("task:A", model="m", evaluate=text)
    assert request.evaluation is not None
    assert (request.evaluation.metric, request.evaluation.mode) == (text.partition(":")[0], mode)


def test_how_a_script_is_measured_are_options(tmp_path: Path) -> None:
    request = build(
        None,
        command="python train.py",
        model="m",
        evaluate="accuracy",
        evaluate_command="python 'my evaluate.py' --fast",
        evaluate_checkpoint="final",
        evaluate_slots="2..4",
    )
    assert request.evaluation is not None
    assert request.evaluation.command == ["python", "my evaluate.py", "--fast"]
    assert request.evaluation.checkpoint == "final"
    assert request.evaluation.slots is not None
    assert (request.evaluation.slots.min, request.evaluation.slots.max) == (2, 4)


def test_options_change_one_field_of_a_part_of_the_request() -> None:
    body = {"retention": {"last": 7}, "packages": {"source": "node"}}
    request = build("task:A", request=body, retention_metric="validation/accuracy", torch="project")
    assert (request.retention.last, request.retention.metric, request.retention.mode) == (
        7,
        "validation/accuracy",
        "max",
    )
    assert (request.packages.source, request.packages.torch) == ("node", "project")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate": "test/accuracy"}, "'evaluation' needs 'model'"),
        ({"evaluate": "loss:low", "model": "m"}, "test/accuracy:max"),
        ({"retention_metric": "loss:low"}, "retention_metric 'loss:low': give a metric"),
        ({"torch": "mine"}, "packages.torch"),
        ({"evaluate_command": "python e.py", "model": "m"}, "evaluate_command needs evaluate: the metric"),
        ({"evaluate": "a", "evaluate_checkpoint": "last", "model": "m"}, "evaluation.checkpoint"),
        ({"metric_patterns": {"loss": "loss .*"}}, "needs a group around the value"),
        ({"metric_patterns": {"loss": "loss ("}}, "is not a regular expression"),
    ],
)
def test_a_wrong_option_names_its_change(options: SubmitOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("task:A", **options)
