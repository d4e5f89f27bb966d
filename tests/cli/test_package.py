"""FragmentationScores: what goes in, the same bytes every time, and what is refused."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from trainbus.client import package as packing
from trainbus.client.errors import TrainbusError
from trainbus.client.package import pack_project


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


#: name -> (files, those that are packed besides task.py and ignore files)
RULES: dict[str, tuple[dict[str, str], set[str]]] = {
    "plain": ({"lib/net.py": "", "data.json": "{}"}, {"lib/net.py", "data.json"}),
    "gitignore": ({".gitignore": "*.ckpt\nout/\n", "a.ckpt": "x", "out/b": "x", "c.py": ""}, {"c.py"}),
    "gitignore below": ({"lib/.gitignore": "/gen.py\n", "lib/gen.py": "", "gen.py": ""}, {"gen.py"}),
    "gitignore takes back": ({".gitignore": "*.txt\n!keep.txt\n", "a.txt": "", "keep.txt": ""}, {"keep.txt"}),
    "trainbusignore beside gitignore": (
        {".gitignore": "a\n", ".trainbusignore": "notebooks/\n!a\n", "a": "", "notebooks/n.ipynb": ""},
        {"a"},
    ),
    "never code": (
        {".git/HEAD": "x", ".venv/x.py": "", "__pycache__/t.pyc": "", ".env": "SECRET=1", "mlruns/0/meta": ""},
        set(),
    ),
    "a virtual environment by another name": ({"python/pyvenv.cfg": "", "python/lib/x.py": ""}, set()),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_packed(name: str, tmp_path: Path) -> None:
    files, expected = RULES[name]
    package = pack_project(write(tmp_path, {"task.py": "", **files}))
    packed = {each for each in package.files if not each.endswith("ignore")}
    assert packed == expected | {"task.py"}


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    files = {"task.py": "x = 1\n", "lib/b.py": "", "lib/a.py": ""}
    one = pack_project(write(tmp_path / "one", files))
    two = write(tmp_path / "two", dict(reversed(files.items())))
    os.utime(two / "task.py", (time.time() - 1e6, time.time() - 1e6))
    assert pack_project(two).body == one.body
    (two / "task.py").write_text("x = 2\n")
    assert pack_project(two).sha256 != one.sha256


def test_the_package_holds_plain_files_without_an_owner(tmp_path: Path) -> None:
    write(tmp_path, {"task.py": "x = 1\n"})
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link.py").symlink_to("task.py")
    with tarfile.open(fileobj=io.BytesIO(pack_project(tmp_path).body)) as tar:
        members = {member.name: member for member in tar.getmembers()}
        content = tar.extractfile("link.py")
        assert content is not None
        assert content.read() == b"x = 1\n"
    assert all(member.isreg() and member.uid == 0 and member.mtime == 0 for member in members.values())
    assert members["run.sh"].mode == 0o755
    assert members["task.py"].mode == 0o644


def test_refusals_say_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainbusError, match="is no folder"):
        pack_project(tmp_path / "nowhere")
    with pytest.raises(TrainbusError, match="no files to pack"):
        pack_project(tmp_path)
    write(tmp_path, {"task.py": "", "weights.bin": "x" * 100})
    monkeypatch.setattr(packing, "MAX_BYTES", 50)
    with pytest.raises(TrainbusError, match=r"(?s)trainbusignore.*weights\.bin"):
        pack_project(tmp_path)
    monkeypatch.setattr(packing, "MAX_BYTES", 1000)
    (tmp_path / "passwd").symlink_to("/etc/hostname")
    with pytest.raises(TrainbusError, match="passwd is a link that leads out"):
        pack_project(tmp_path)


def test_the_commit_is_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    project = write(tmp_path / "project", {"task.py": "x = 1\n"})
    assert (pack_project(project).git_commit, pack_project(project).git_dirty) == (None, None)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert (pack_project(project).git_commit, pack_project(project).git_dirty) == (git("rev-parse", "HEAD"), False)
    write(tmp_path, {"elsewhere.txt": "not of this project"})
    assert pack_project(project).git_dirty is False
    write(project, {"task.py": "x = 2\n"})
    assert pack_project(project).git_dirty is True
