"""What a Task needs beside its model's weights: written with each checkpoint, read before the model is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from contracts.manifest import ARTIFACTS_FOLDER
from trainbus.task import Task, TaskError

#: A path whose parts begin with a letter, a digit or an underscore; it is a part of a file's name in the store.
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
MAX_NAME_CHARS = 150
#: Every checkpoint has them, so they are to be small.
MAX_BYTES = 512 * 2**20


def collect_artifacts(task: Task) -> dict[str, bytes]:
    """Return the content of ``task.artifacts()`` by name.

    Raises:
        TaskError: a name or a content is not what it may be, or there is no such file.
    """
    given = task.artifacts()
    method = f"{type(task).__name__}.artifacts()"
    if not isinstance(given, Mapping):
        raise TaskError(f"{method} must return a dict of names and contents, not {type(given).__name__}")
    found: dict[str, bytes] = {}
    for name, content in given.items():
        found |= _read(method, name, content)
    for name in found:
        if not NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
            raise TaskError(f"{method}: {name!r} is no name of a file: use letters, digits, '_', '-', '.' and '/'")
    if (size_bytes := sum(map(len, found.values()))) > MAX_BYTES:
        raise TaskError(
            f"{method}: {size_bytes:,} bytes are too many, each checkpoint has them: {MAX_BYTES:,} at the most"
        )
    return found


def _read(method: str, name: str, content: object) -> dict[str, bytes]:
    match content:
        case bytes():
            return {name: content}
        case str():
            return {name: content.encode()}
        case Path():
            try:
                if not content.is_dir():
                    return {name: content.read_bytes()}
                files = sorted(path for path in content.rglob("*") if path.is_file())
                return {f"{name}/{path.relative_to(content).as_posix()}": path.read_bytes() for path in files}
            except OSError as error:
                raise TaskError(f"{method}[{name!r}]: {error}", is_permanent=False) from error
    raise TaskError(f"{method}[{name!r}] must be bytes, a str or a Path, not {type(content).__name__}")


def load_artifacts(task: Task, folder: Path, expected: Mapping[str, str] | None = None) -> None:
    """Give the artifacts of a checkpoint, or of a fetched model, back to the task; nothing if there are none.

    Args:
        folder: of the checkpoint or the model.
        expected: the SHA-256 of each; None: the files were verified when they were fetched.

    Raises:
        TaskError: a file is missing or is not the one that was committed.
    """
    artifacts = folder / ARTIFACTS_FOLDER
    for name, sha256 in (expected or {}).items():
        try:
            found = hashlib.sha256((artifacts / name).read_bytes()).hexdigest()
        except OSError as error:
            raise TaskError(f"{folder} lacks its artifact {name!r}: fetch the model again ({error})") from error
        if found != sha256:
            raise TaskError(
                f"{ARTIFACTS_FOLDER}/{name} in {folder} is not what was committed: its SHA-256 is {found}, not "
                f"{sha256}. Fetch the model again"
            )
    if artifacts.is_dir() if expected is None else expected:
        task.load_artifacts(artifacts)
