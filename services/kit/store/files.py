"""Local files: written at any offset, hashed whole."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol, Self

#: Bytes of a file that a thread hashes at a time: with less, changing threads would cost more than hashing.
READ_BYTES = 4 * 2**20


def is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path``, its links followed, lies in ``folder``."""
    return path.resolve().is_relative_to(folder.resolve())


def write_at(handle: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset``; the system may accept less at a time."""
    view = memoryview(content)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def hash_file(path: Path) -> str:
    """Return the lower-case hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Hasher(Protocol):
    """An object of ``hashlib``, or one like it."""

    def update(self, content: memoryview, /) -> Any: ...
    def hexdigest(self) -> str: ...


class FileSink:
    """Hashes content and writes it into an existing file, from ``offset`` on; use it as a context manager."""

    def __init__(self, path: Path, offset: int, digest: Hasher | None = None) -> None:
        self._path, self._offset, self._digest = path, offset, digest

    def __enter__(self) -> Self:
        self._handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def __call__(self, content: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(content)
        write_at(self._handle, content, self._offset)
        self._offset += len(content)
