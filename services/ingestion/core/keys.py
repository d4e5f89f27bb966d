"""Names of records."""

from __future__ import annotations

import re

from contracts.base import short_hash

#: The characters of a key: a path that is safe in a tar. It has no dot, because WebDataset cuts there.
SAFE_KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
#: Leaves room in the 100 bytes of a ustar name for a row number and an extension.
MAX_KEY_CHARS = 75
MAX_PATH_BYTES = 1024
#: Files that tools leave beside data. Names that start with a dot are not data either.
NO_DATA = {"_SUCCESS", "_metadata", "_common_metadata", "Thumbs.db", "desktop.ini"}


class UnsafePath(ValueError):
    """The object's path cannot be a file's path; the message gives the reason."""


def is_data(path: str) -> bool:
    """Whether the object at ``path`` is data, not a folder marker or a file that a tool left."""
    name = path.rsplit("/", 1)[-1]
    return bool(name) and not name.startswith(".") and name not in NO_DATA


def extension(path: str) -> str:
    """Return the lower-case extension without its dot, '' if there is none."""
    stem, dot, found = path.rsplit("/", 1)[-1].rpartition(".")
    return found.lower() if dot and stem else ""


def check_path(path: str) -> None:
    """Raise ``UnsafePath`` for a path that could not lie in a folder."""
    if len(path.encode()) > MAX_PATH_BYTES:
        raise UnsafePath(f"longer than {MAX_PATH_BYTES} bytes")
    if any(segment in ("", ".", "..") for segment in path.split("/")):
        raise UnsafePath("has an empty, '.' or '..' segment")
    if any(ord(c) < 32 or ord(c) == 127 for c in path) or "\\" in path:
        raise UnsafePath("has a control character or a backslash")


def file_key(path: str) -> str:
    """Return the key of the record in the object at ``path`` (relative to the prefix).

    ``3/0001.png`` -> ``3/0001``. A path that is not safe as it is gets safe characters and a hash,
    so two paths have one key only if they differ in nothing but the extension.
    """
    end = extension(path)
    stem = path[: -len(end) - 1] if end else path
    if SAFE_KEY.fullmatch(stem) and len(stem) <= MAX_KEY_CHARS:
        return stem
    return _shorten_path(stem)


def rows_key(path: str) -> str:
    """Return the key prefix of the rows of the object at ``path``; unique for every path."""
    return _shorten_path(path)


def row_key(prefix: str, number: int) -> str:
    """Return the key of a row; it stays the same when rows are appended."""
    return f"{prefix}/{number:09d}"


def _shorten_path(path: str) -> str:
    suffix = "-" + short_hash(path, length=12)
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", path)
    return safe[-(MAX_KEY_CHARS - len(suffix)) :] + suffix
