"""Files on this node, written whole or not at all; and what a full disk costs: checkpoints and reports, but no run."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from contracts.disk_space import DISK_FULL, SPARE

#: Bytes of a block, as ``st_blocks`` counts them.
BLOCK_BYTES = 512
#: What is held for one small file.
SPARE_BYTES = 4096
#: Seconds between two messages about one full disk.
MESSAGE_INTERVAL_S = 600.0
#: When the log last had one, by the device's number.
_logged_at: dict[int, float] = {}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path``; a reader sees the old content or the new.

    On a full disk, JSON is written over the old content, where that has enough blocks: a reader at the same time may
    find half of each. What is new takes the space that ``hold_space`` holds for it.

    Raises:
        OSError: also where a full disk has no space (``DISK_FULL``); the old content stays.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        _replace(path, data)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _log_full_disk(path)
        if not _overwrite(path, data) and not take_held_space(path, data):
            raise


def write_if_space(path: Path, content: str | bytes) -> bool:
    """Replace ``path`` with what runs can do without; return False where a full disk has no space."""
    is_written = False
    with suppress_full_disk():
        write_atomically(path, content)
        is_written = True
    return is_written


def hold_space(path: Path) -> None:
    """Hold disk space for a small file that is written later, so that a full disk does not prevent it.

    Raises:
        OSError: there is none.
    """
    _spare_of(path).write_bytes(b" " * SPARE_BYTES)


def take_held_space(path: Path, data: bytes) -> bool:
    """Write a file into the space that ``hold_space`` holds for it; return whether that was enough."""
    spare = _spare_of(path)
    try:
        with spare.open("r+b", buffering=0) as file:
            if len(data) > os.fstat(file.fileno()).st_size:
                return False
            # Before anything is freed: others would take it.
            if os.pwrite(file.fileno(), data, 0) < len(data):
                return False
            file.truncate(len(data))
        spare.replace(path)
    except OSError:
        return False
    return True


def release_space(folder: Path) -> None:
    """Give back the space that is held in the folder."""
    for path in folder.glob(f"*{SPARE}"):
        path.unlink(missing_ok=True)


@contextmanager
def suppress_full_disk() -> Iterator[None]:
    """Suppress the errors of a full disk in the block: it costs what is written there, and no run."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def _overwrite(path: Path, data: bytes) -> bool:
    """Write JSON over a file in the blocks that it has; return whether it has enough of them."""
    if path.suffix != ".json":
        return False
    try:
        with path.open("r+b", buffering=0) as file:
            before = file.read()
            if len(data) > os.fstat(file.fileno()).st_blocks * BLOCK_BYTES:
                return False
            # In one call, which the end of this process does not interrupt within a page; blanks may follow JSON.
            if os.pwrite(file.fileno(), data.ljust(len(before)), 0) >= len(data):
                return True
            os.pwrite(file.fileno(), before, 0)
    except OSError:
        pass
    return False


def _spare_of(path: Path) -> Path:
    return path.with_name(path.name + SPARE)


def _log_full_disk(path: Path) -> None:
    import structlog  # not by the guard of the ranks, which is to start quickly

    with suppress(OSError):
        device, now = os.stat(path.parent).st_dev, time.monotonic()
        if now - _logged_at.get(device, -MESSAGE_INTERVAL_S) >= MESSAGE_INTERVAL_S:
            _logged_at[device] = now
            structlog.get_logger(__name__).error(
                "the disk is full: runs go on, without checkpoints and without what they report",
                path=str(path),
                next_step="free space there, or give the node a larger disk (TRAINBUS_DATA_DIR, TRAINBUS_CACHE_DIR)",
            )


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
        try:
            shutil.copyfile(source, partial)
            partial.replace(target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def relative_path(name: str) -> PurePosixPath:
    """Return a path that a manifest names.

    Raises:
        ValueError: it leads out of its folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return path
