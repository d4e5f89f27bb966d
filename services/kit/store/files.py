"""Local files: written at any offset, hashed whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

#: Bytes of a file that a thread hashes at a time: with less, changing threads would cost more than hashing.
READ_BYTES = 4 * 2**20


def is_inside(path: Path, folder: Path) -> bool:
    """Whether ``path``, its links followed, lies in ``folder``."""
    return path.resolve().is_relative_to(folder.resolve())


def write_at(file: BinaryIO, content: bytes | memoryview, offset: int) -> None:
    """Write all of ``content`` at ``offset`` of a file of the caller's own; the system may accept less at a time."""
    file.seek(offset)
    view = memoryview(content).cast("B") if len(content) else memoryview(b"")
    while view:
        view = view[file.write(view) :]


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
        # Not os.pwrite, which Windows lacks; no buffer, so that a full disk is noticed at the write.
        self._file = self._path.open("r+b", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __call__(self, content: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(content)
        write_at(self._file, content, self._offset)
        self._offset += len(content)
