"""Files on this node, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path``; a reader sees the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None without the file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(source, partial)
        partial.replace(target)


def relative_path(name: str) -> PurePosixPath:
    """Return a path that a manifest names.

    Raises:
        ValueError: it leads out of its folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return path
