"""The stub of a project: a Task or script that trains as it is written, and what belongs beside it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from trainbus.client.errors import UsageError

SOURCES = Path(__file__).parents[1] / "stubs"
REQUIREMENTS = """\
# Packages that the project needs and a node does not have, one a line: transformers==5.20.0
# torch and numpy are there.
"""
GITIGNORE = """\
# What is named here is not uploaded either; .trainbusignore names more for the upload alone.
__pycache__/
.trainbus/
data/
outputs/
"""


@dataclass(frozen=True, slots=True)
class StubKind:
    """What a stub trains on, and what submits it."""

    #: The file that holds its code.
    file: str
    #: Arguments of ``trainbus submit`` after the folder.
    arguments: tuple[str, ...]
    #: What DATA stands for in them.
    data: str
    #: What to change first.
    change: str


KINDS: Mapping[str, StubKind] = MappingProxyType(
    {
        "classification": StubKind(
            "task.py",
            ("task:Classifier", "--data", "DATA", "--epochs", "10"),
            "a folder that has one folder of images for each class",
            "the network in `model` and the variations in `augment`",
        ),
        "regression": StubKind(
            "task.py",
            ("task:Regressor", "--data", "DATA", "--epochs", "10"),
            "a csv, jsonl or Parquet file, or a folder of them",
            "`FEATURES` and `TARGET`, the columns of your table",
        ),
        "text": StubKind(
            "task.py",
            ("task:LanguageModel", "--data", "DATA", "--format", "text", "--epochs", "10"),
            "a folder of .txt files",
            "the network in `NextByte`",
        ),
        "script": StubKind(
            "train.py",
            ("--command", "python train.py --epochs 10", "--data", "DATA"),
            "a csv, jsonl or Parquet file, or a folder of them",
            "`FEATURES` and `TARGET`, the columns of your table, and the loop",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ProjectStub:
    """A stub that was written."""

    folder: Path
    files: tuple[str, ...]
    #: The command that trains it, but for DATA.
    submit: str
    kind: StubKind


def write_stub(folder: Path, kind: str) -> ProjectStub:
    """Write the stub of a project into a folder, which is made if it is not there.

    Args:
        kind: one of ``KINDS``.

    Raises:
        UsageError: there is no such kind, or a file of the stub is there; nothing was written.
    """
    found = KINDS.get(kind)
    if found is None:
        raise UsageError(f"there is no kind {kind!r} of stubs: {', '.join(KINDS)}")
    submit = shlex.join(["trainbus", "submit", str(folder), *found.arguments, "--follow"])
    contents = {
        found.file: (SOURCES / f"{kind}.py").read_text("utf-8"),
        "README.md": _write_readme(folder, found),
        "requirements.txt": REQUIREMENTS,
        ".gitignore": GITIGNORE,
    }
    present = [name for name in contents if (folder / name).exists()]
    if present:
        raise UsageError(f"{folder} already has {', '.join(present)}; nothing was written: name another folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content, "utf-8", newline="\n")
    return ProjectStub(folder, tuple(contents), submit, found)


def _write_readme(folder: Path, kind: StubKind) -> str:
    submit_here = shlex.join(["trainbus", "submit", ".", *kind.arguments, "--follow"])
    return f"""\
# {folder.resolve().name}

Change {kind.change} in `{kind.file}`, then train in this folder:

```sh
trainbus up -d    # once, if no stack runs
{submit_here}
```

`DATA` is {kind.data}; or `s3://bucket/prefix`, or the id of a dataset.
`trainbus task` lists all that a Task may define.
"""
