"""``trainbus init`` writes a project, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainbus.client.errors import UsageError
from trainbus.client.package import pack_project
from trainbus.client.project_stub import KINDS, SOURCES, write_stub
from trainbus.commands.main import app


def test_every_stub_has_a_kind() -> None:
    assert {path.stem for path in SOURCES.glob("*.py")} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stub_is_written(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "my project"
    result = CliRunner().invoke(app, ["init", str(folder), "--kind", kind], catch_exceptions=False)
    assert {path.name for path in folder.iterdir()} == {KINDS[kind].file, "README.md", "requirements.txt", ".gitignore"}
    assert f"trainbus submit '{folder}' " in result.stdout
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# my project\n")
    assert "trainbus submit . " in readme


def test_what_lies_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    (tmp_path / ".gitignore").write_text("mine")
    with pytest.raises(UsageError, match=r"already has task\.py, \.gitignore; nothing was written"):
        write_stub(tmp_path, "regression")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "task.py"]
    assert (tmp_path / "task.py").read_text() == "mine"


def test_a_kind_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="classification, regression, text, script"):
        write_stub(tmp_path, "audio")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        write_stub(tmp_path / "file", "text")


def test_data_and_outputs_are_not_uploaded(tmp_path: Path) -> None:
    write_stub(tmp_path, "script")
    for name in ("data", "outputs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "large.bin").write_text("large")
    assert not [name for name in pack_project(tmp_path).files if name.endswith("large.bin")]
