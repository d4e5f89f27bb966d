"""Names of records, and the split each of them falls into."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from contracts.base import short_hash
from contracts.events.train import Split

#: What a key may look like: a path that is safe in a tar and has no dot, since WebDataset cuts there.
SAFE_KEY = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
#: Leaves room in the 100 bytes of a ustar name for a row number and an extension.
MAX_KEY_CHARS = 75
MAX_PATH_BYTES = 1024
#: What tools leave beside data. Names that start with a dot are no data either.
NO_DATA = {"_SUCCESS", "_metadata", "_common_metadata", "Thumbs.db", "desktop.ini"}

_TWO_TO_64 = 2**64


class UnsafePath(ValueError):
    """The object's path cannot be a file's path; the text says why."""


def is_data(path: str) -> bool:
    """Whether the object at ``path`` is meant as data: no folder marker, no tool's litter."""
    name = path.rsplit("/", 1)[-1]
    return bool(name) and not name.startswith(".") and name not in NO_DATA


def extension(path: str) -> str:
    """The lower-case extension without its dot, '' if there is none."""
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
    """The key of the one record that the object at ``path`` (relative to the prefix) is.

    ``3/0001.png`` -> ``3/0001``. A path that is not safe as it is gets safe characters and a hash,
    so two paths have one key only if they differ in nothing but the extension.
    """
    end = extension(path)
    stem = path[: -len(end) - 1] if end else path
    if SAFE_KEY.fullmatch(stem) and len(stem) <= MAX_KEY_CHARS:
        return stem
    return _hashed(stem)


def rows_key(path: str) -> str:
    """The key that the rows of the object at ``path`` begin with; different for every path."""
    return _hashed(path)


def row_key(prefix: str, number: int) -> str:
    """The key of one row: stable as rows are added behind it."""
    return f"{prefix}/{number:09d}"


def _hashed(path: str) -> str:
    suffix = "-" + short_hash(path, length=12)
    safe = re.sub(r"[^A-Za-z0-9_-]+", "_", path)
    return safe[-(MAX_KEY_CHARS - len(suffix)) :] + suffix


@dataclass(frozen=True, slots=True)
class Splitter:
    """Assigns keys to splits by hash: a key's split depends on nothing but the key and the settings."""

    seed: int
    train_below: int
    validation_below: int

    @classmethod
    def of(cls, split: Split) -> Splitter:
        # The last split with a share takes what rounding leaves over, so that a share of 0 stays empty.
        train = _TWO_TO_64 if split.validation == 0 and split.test == 0 else round(split.train * _TWO_TO_64)
        validation = _TWO_TO_64 if split.test == 0 else round((split.train + split.validation) * _TWO_TO_64)
        return cls(split.seed, train, validation)

    def split_of(self, key: str) -> str:
        digest = hashlib.sha256(f"{self.seed}\0{key}".encode()).digest()
        place = int.from_bytes(digest[:8], "big")
        if place < self.train_below:
            return "train"
        return "validation" if place < self.validation_below else "test"
