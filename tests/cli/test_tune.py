"""``trainbus tune`` takes the options of ``trainbus submit``, and prints what it checks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from contracts.events.train import TuneRequested
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.submission_check import CheckOutcome
from trainbus.commands.main import app

#: ``--rank`` chooses whose output is followed: a study has no output of its own.
NOT_OF_A_STUDY = {"--rank"}
SPACE = ["--space", "lr=0.1,0.2"]


class StudyClient:
    """A client that keeps the studies that are requested."""

    requests: ClassVar[list[TuneRequested]] = []
    address = None

    def __init__(self, data_dir: Path | None) -> None:
        self.connection = self

    async def __aenter__(self) -> StudyClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def publish_request(self, request: TuneRequested, event_id: str | None) -> Any:
        self.requests.append(request)
        return SimpleNamespace(study_id="s1", event_id=event_id or "e1")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("trainbus.client.client.AsyncClient", StudyClient)
    monkeypatch.setattr("trainbus.client.capacity.find_shortage", AsyncMock(return_value=""))
    monkeypatch.setattr("trainbus.client.runs.find_rejection", AsyncMock(return_value=""))
    monkeypatch.setattr(
        "trainbus.client.opened_submission.upload_package", AsyncMock(return_value="s3://models/code.tar.gz")
    )
    StudyClient.requests.clear()
    folder = tmp_path / "search"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "task.py").write_text("class Digits:\n    pass\n")
    return folder


def tune(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)


def requested_run() -> dict[str, Any]:
    (request,) = StudyClient.requests
    assert request.run is not None
    return request.run.model_dump(mode="json", exclude_unset=True)


def options_of(*path: str) -> dict[str, tuple[Any, ...]]:
    """Return each flag of a command with what it takes."""
    found: Any = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]
    return {
        flag: (each.help, each.multiple, each.secondary_opts)
        for each in found.params
        for flag in each.opts
        if flag.startswith("--")
    }


def test_tune_takes_every_option_of_submit() -> None:
    submit, of_study = options_of("submit"), options_of("tune", "run")
    assert submit.keys() - of_study.keys() == NOT_OF_A_STUDY
    shared = submit.keys() - NOT_OF_A_STUDY - {"--follow"}
    assert {flag: of_study[flag] for flag in shared} == {flag: submit[flag] for flag in shared}


def test_project_and_options_are_those_of_submit(project: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_text("x,y\n1,2\n")
    sources = [f"--data=train={data}", f"--data=extra={data}"]
    flags = "--env A=1 --param width=3 --slots 1..2 --metric-pattern loss=loss(.*) --model digits --team research"
    result = tune(project, "--command", "python train.py", *sources, *SPACE, *flags.split(), "--epochs", "4")
    assert result.exit_code == 0, result.output
    run = requested_run()
    assert {name: run[name] for name in ("name", "env", "params", "slots", "metric_patterns", "model", "team")} == {
        "name": "search",
        "env": {"A": "1"},
        "params": {"width": 3},
        "slots": {"min": 1, "max": 2},
        "metric_patterns": {"loss": "loss(.*)"},
        "model": "digits",
        "team": "research",
    }
    assert sorted(run["datasets"]) == ["extra", "train"]
    assert StudyClient.requests[0].epochs == 4


def test_a_file_and_the_flags_of_before_are_taken(project: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.json"
    file.write_text(
        json.dumps({"name": "mine", "space": {"lr": [0.1, 0.2]}, "run": {"command": ["python", "train.py"]}})
    )
    result = tune(file, "--project", project, "--event-id", "e7", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"study_id": "s1", "name": "mine", "event_id": "e7"}
    assert requested_run()["command"] == ["python", "train.py"]


def test_a_project_and_a_task_are_given_once(project: Path) -> None:
    with pytest.raises(UsageError, match="give the project once"):
        tune(project, "--project", project, "--command", "python train.py", *SPACE)
    with pytest.raises(UsageError, match="give the task once"):
        tune(project, "task:Digits", "--task", "task:Digits", *SPACE)
    with pytest.raises(UsageError, match="quote the whole command"):
        tune(project, "task:Digits", "train.py", *SPACE)
    assert StudyClient.requests == []


def test_what_is_checked_and_found_is_printed(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = CheckOutcome("torch is not here", ("lr is not used",))
    monkeypatch.setattr("trainbus.client.submission_check.SubmissionCheck.run", AsyncMock(return_value=found))
    data = tmp_path / "data.csv"
    data.write_text("x,y\n1,2\n")
    result = tune(project, "task:Digits", "--data", data, *SPACE)
    assert result.exit_code == 0, result.output
    checking, note, unchecked = result.stderr.splitlines()
    assert checking.startswith("checking task:Digits before the upload")
    assert (note, unchecked) == ("note: lr is not used", "not all was checked before the upload: torch is not here")
    assert "2 files" in result.stdout


def test_a_script_that_gets_no_parameter_is_told_how_it_could(project: Path) -> None:
    command = "python train.py"
    blind = tune(project, "--command", command, *SPACE)
    assert "nothing in the project reads lr: name it in the command (--lr {lr})" in blind.stderr
    assert "checking" not in blind.stderr
    assert "reads" not in tune(project, "--command", f"{command} --lr {{lr}}", *SPACE).stderr
    (project / "train.py").write_text("import os\nprint(os.environ['TRAINBUS_PARAMS'])\n")
    assert "reads" not in tune(project, "--command", command, *SPACE).stderr


def test_a_rejection_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainbus.client.runs.find_rejection", AsyncMock(return_value="rejected: no metric"))
    with pytest.raises(TrainbusError, match="study s1 was rejected: no metric"):
        tune(project, "--command", "python train.py --lr {lr}", *SPACE)
