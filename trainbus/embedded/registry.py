"""The stacks of this user: one small file for each in the user's state folder, so that any folder finds them.

A supervisor writes the file of its stack when it starts and deletes it when it stops. A killed one leaves its file;
readers ignore it, since nobody holds the lock of that data folder any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_state_path

from trainbus.embedded.launch import StackInfo, read_stack
from trainbus.embedded.layout import DEFAULT_DATA_DIR, write_json

APPLICATION = "trainbus"


@dataclass(frozen=True, slots=True)
class RegisteredStack:
    """A stack that runs on this machine, and the name that ``--stack`` knows it by."""

    name: str
    info: StackInfo

    @property
    def data_dir(self) -> Path:
        return self.info.data_dir


def registry_dir() -> Path:
    """Return the folder of the stacks' files: ``$XDG_STATE_HOME/trainbus/stacks`` on Linux."""
    return user_state_path(APPLICATION, appauthor=False) / "stacks"


def default_name(data_dir: Path) -> str:
    """Return the name of the folder that a stack is for: the one above ``.trainbus``, else the data folder."""
    folder = data_dir.resolve()
    return (folder.parent if folder.name == DEFAULT_DATA_DIR.name else folder).name or APPLICATION


def list_stacks() -> list[RegisteredStack]:
    """Return the stacks that run, in the order of their names."""
    return sorted((stack for _, stack in _read_files() if stack is not None), key=lambda each: each.name)


def register(data_dir: Path, name: str | None = None) -> str:
    """Write the file of a stack and return its name: the given one, else its folder's, with a number if that is taken.

    Files that killed stacks left are deleted.
    """
    registry_dir().mkdir(parents=True, exist_ok=True)
    taken = set()
    for path, stack in _read_files():
        if stack is None:
            path.unlink(missing_ok=True)
        elif stack.data_dir != data_dir.resolve():
            taken.add(stack.name)
    wanted = name or default_name(data_dir)
    free, number = wanted, 2
    while free in taken:
        free, number = f"{wanted}-{number}", number + 1
    write_json(_path(data_dir), {"name": free, "data_dir": str(data_dir.resolve())})
    return free


def unregister(data_dir: Path) -> None:
    """Delete the file of a stack."""
    _path(data_dir).unlink(missing_ok=True)


def _path(data_dir: Path) -> Path:
    # One stack runs on a data folder, so its path is the key.
    return registry_dir() / f"{hashlib.sha256(str(data_dir.resolve()).encode()).hexdigest()[:16]}.json"


def _read_files() -> list[tuple[Path, RegisteredStack | None]]:
    """Return each file with its stack, None for one that no longer runs."""
    found: list[tuple[Path, RegisteredStack | None]] = []
    for path in registry_dir().glob("*.json"):
        stack = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            info = read_stack(Path(content["data_dir"]))
            stack = RegisteredStack(str(content["name"]), info) if info is not None else None
        found.append((path, stack))
    return found
