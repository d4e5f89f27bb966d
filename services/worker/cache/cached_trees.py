"""Trees of read-only files on this node, each named by the hash of what it was made from, and evicted as a whole.

``<name>/`` has the files and ``<name>.json`` says how many there are. A tree is renamed into place when it is whole.
Since it is not flushed to the disk, one from before the machine started is made anew. Users get hard links: what they
add or remove in their folders is theirs, and a file that one of them wrote to is found by its time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from services.worker.local_files import link_or_copy, write_atomically

log = structlog.get_logger(__name__)


class TreeRecord(BaseModel):
    """What a tree has."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    files: int
    size_bytes: int
    #: The time of every file, in seconds since the epoch.
    file_time_s: int


class DamagedTreeError(Exception):
    """A tree no longer has what was put into it."""


class CachedTrees:
    """The trees in one folder, which has nothing else but hidden files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """Return the path of a tree."""
        return self.folder / name

    def names(self) -> list[str]:
        """Return the names of all trees that are whole and trusted."""
        return sorted(path.stem for path in self._records() if _is_trusted(path))

    def record_path(self, name: str) -> Path:
        """Return the path of a tree's record, whose time is that of its last use."""
        return self.folder / f"{name}.json"

    def use(self, name: str) -> TreeRecord | None:
        """Return what a tree has, and note its use; None if it is not here or not trusted."""
        path = self.record_path(name)
        try:
            if not _is_trusted(path):
                return None
            record = TreeRecord.model_validate_json(path.read_bytes())
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.error("a cached tree cannot be used", path=str(path), error=repr(error))
            return None
        return record

    def add(self, name: str, built: Path, record: TreeRecord) -> None:
        """Move a tree into place, in the place of one that could not be used."""
        self.remove(name)
        built.rename(self.path(name))
        write_atomically(self.record_path(name), record.model_dump_json())

    def remove(self, name: str) -> None:
        """Remove a tree; a user that has links to its files keeps them."""
        self.record_path(name).unlink(missing_ok=True)
        shutil.rmtree(self.path(name), ignore_errors=True)

    def list_trees(self) -> Iterator[tuple[Path, float, int]]:
        """Yield the path, the time of the last use and the bytes of each tree."""
        for path in self._records():
            try:
                record = TreeRecord.model_validate_json(path.read_bytes())
                yield path.with_suffix(""), path.stat().st_mtime, record.size_bytes
            except (OSError, ValidationError):
                yield path.with_suffix(""), 0.0, 0

    def link(self, name: str, record: TreeRecord, target: Path) -> None:
        """Make ``target`` a folder with all files of a tree.

        Raises:
            DamagedTreeError: a file is missing, or was written to.
            OSError: there is no room.
        """
        files = size_bytes = 0
        for source, relative in _walk(self.path(name)):
            if source.is_dir():
                (target / relative).mkdir(parents=True, exist_ok=True)
                continue
            stat = source.stat()
            files, size_bytes = files + 1, size_bytes + stat.st_size
            if int(stat.st_mtime) != record.file_time_s:
                raise DamagedTreeError(f"{relative} was written to")
            link_or_copy(Path(source.path), target / relative)
        if (files, size_bytes) != (record.files, record.size_bytes):
            raise DamagedTreeError(f"it has {files:,} files of {size_bytes:,} bytes, not {record.files:,}")

    def _records(self) -> list[Path]:
        return [path for path in self.folder.glob("*.json") if not path.name.startswith(".")]


def _is_trusted(record: Path) -> bool:
    """Whether a tree was made, or used, since the machine started."""
    try:
        return record.stat().st_mtime >= float(psutil.boot_time())
    except FileNotFoundError:
        return False


def _walk(folder: Path, relative: str = "") -> Iterator[tuple[os.DirEntry[str], str]]:
    """Yield the folders and files below ``folder``, a folder before what is in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{relative}{entry.name}"
            yield entry, path
            if entry.is_dir():
                yield from _walk(Path(entry.path), f"{path}/")
