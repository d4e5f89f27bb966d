"""``trainbus task`` prints what a Task may define."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from trainbus.client.errors import NotFoundError
from trainbus.client.task_reference import read_task_members
from trainbus.commands.main import app


def test_all_are_listed() -> None:
    listed = CliRunner().invoke(app, ["task"]).stdout
    assert all(f"{each.signature}\n    {each.summary}\n" in listed for each in read_task_members())


def test_one_is_explained_with_its_example() -> None:
    explained = CliRunner().invoke(app, ["task", "loss()"]).stdout
    assert "return cross_entropy(model(images), labels)" in explained
    assert "Required." in explained


def test_torch_is_not_imported() -> None:
    script = "import sys; from trainbus.commands.main import app; app(['task', 'loss'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_what_a_task_does_not_define_is_refused() -> None:
    with pytest.raises(NotFoundError, match="a Task has no 'training_step'; it may define classes, "):
        CliRunner().invoke(app, ["task", "training_step"], catch_exceptions=False)
