"""Every command and every flag of the command line is the one that is recorded in ``commands.txt``."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import AsyncMock

import pytest
import typer
from typer.testing import CliRunner

from contracts.events.train import TrainRequested
from trainbus.client.client import AsyncClient, Client
from trainbus.client.errors import TrainbusError
from trainbus.client.submission import SubmittedRun
from trainbus.commands.catalogue import COMMANDS_BY_MODULE, load_commands
from trainbus.commands.main import app

RECORD = Path(__file__).with_name("commands.txt")


def list_commands(group: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each command: its flags, and its arguments in capitals."""
    for name, command in sorted(group.commands.items()):
        options = [" ".join([*each.opts, *each.secondary_opts]) for each in command.params if each.opts[0][:1] == "-"]
        arguments = [each.name.upper() for each in command.params if each.opts[0][:1] != "-"]
        yield " ".join([f"{path}{name}:", *arguments, *sorted(options)])
        yield from list_commands(command, f"{path}{name} ") if hasattr(command, "commands") else ()


def test_commands_and_flags_are_those_of_the_record() -> None:
    assert "\n".join(list_commands(typer.main.get_command(app))) == RECORD.read_text().strip()


@pytest.mark.parametrize("module", COMMANDS_BY_MODULE)
def test_the_catalogue_has_the_commands_of_each_module(module: str) -> None:
    assert tuple(load_commands(module)) == COMMANDS_BY_MODULE[module]


def test_a_command_is_imported_without_the_others() -> None:
    script = "import sys; from trainbus.commands.main import app; app(['nodes', '--help'], standalone_mode=False)"
    listing = "print([name for name in sys.modules if name in ('contracts.base', 'trainbus.commands.stack')])"
    done = subprocess.run([sys.executable, "-c", f"{script}; {listing}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["submit"], ["tune", "run"]], ids=" ".join)
def test_the_first_line_comes_before_the_imports_of_the_client(words: list[str], tmp_path: Path) -> None:
    command = [*words, str(tmp_path), "task:T", "--data-dir", str(tmp_path / "none")]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainbus", *command], capture_output=True, text=True, check=False
    )
    before, first_line, after = done.stderr.partition("checking task:T before the upload")
    assert first_line
    imported = {line.rpartition("|")[2].strip() for line in before.splitlines()}
    assert imported & {"httpx", "contracts.base", "trainbus.client.client"} == set()
    assert "trainbus.client.client" in after


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"trainbus {importlib.metadata.version('trainbus')}\n")


@pytest.mark.parametrize("name", [name for name in vars(AsyncClient) if not name.startswith("_")])
def test_the_sync_client_has_every_method_of_the_async_one(name: str) -> None:
    if name != "connection":
        assert getattr(Client, name).__doc__


class RecordingClient:
    """A client that records what is submitted."""

    submissions: ClassVar[list[dict[str, Any]]] = []
    connection = None

    def __init__(self, data_dir: Path | None) -> None:
        self.data_dir = data_dir

    async def __aenter__(self) -> RecordingClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def submit(self, project: Path | None, task: str | None, **options: Any) -> SubmittedRun:
        given = {name: value for name, value in options.items() if value}
        self.submissions.append({"data_dir": self.data_dir, "project": project, "task": task, **given})
        return SubmittedRun("r1", "digits", "e1", TrainRequested(name="digits", command=["true"]))


def test_the_flags_of_submit_are_the_clients_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainbus.client.client.AsyncClient", RecordingClient)
    monkeypatch.setattr("trainbus.client.capacity.find_shortage", AsyncMock(return_value=""))
    monkeypatch.setattr("trainbus.client.runs.find_rejection", AsyncMock(return_value=""))
    flags = "--slots 1..4 --epochs 3 --format jsonl --id e1 --param lr=0.1 --param name=adam --init-exclude head.*"
    command = ["submit", "examples/digits", "task:Digits", "--data-dir", "d", "--json", *flags.split()]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(result.stdout)["run_id"] == "r1"
    assert RecordingClient.submissions == [
        {
            "data_dir": Path("d"),
            "project": Path("examples/digits"),
            "task": "task:Digits",
            "slots": "1..4",
            "epochs": 3,
            "data_format": "jsonl",
            "event_id": "e1",
            "params": {"lr": 0.1, "name": "adam"},
            "init_exclude": ["head.*"],
        }
    ]
    assert CliRunner().invoke(app, [*command, "--epochs", "0"]).exit_code == 2
    monkeypatch.setattr(
        "trainbus.client.runs.find_rejection", AsyncMock(return_value="rejected: the team has no quota")
    )
    refused = CliRunner().invoke(app, command)
    assert json.loads(refused.stdout)["run_id"] == "r1"
    assert isinstance(refused.exception, TrainbusError)
    assert str(refused.exception) == "run r1 was rejected: the team has no quota"
