"""What one ingestion has found so far, on disk: memory stays small however long the listing is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Listed(NamedTuple):
    """One object of the source."""

    key: str
    etag: str
    size: int


class Catalog:
    """A SQLite file for one job. It sorts and tells duplicates; it is thrown away with the job."""

    def __init__(self, path: Path) -> None:
        # The job uses it from one thread at a time.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.executescript(
            """
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE;
            CREATE TABLE listing (key TEXT PRIMARY KEY, etag TEXT, size INTEGER) WITHOUT ROWID;
            CREATE TABLE labels (file TEXT PRIMARY KEY, label TEXT) WITHOUT ROWID;
            CREATE TABLE records (key TEXT PRIMARY KEY, line BLOB) WITHOUT ROWID;
            BEGIN;
            """
        )

    def close(self) -> None:
        self._db.close()

    def list_objects(self, objects: Iterable[Listed]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO listing VALUES (?, ?, ?)", objects)

    def objects(self) -> Iterator[Listed]:
        """The listing in the order of keys, whatever order it came in."""
        return (Listed(*row) for row in self._db.execute("SELECT key, etag, size FROM listing ORDER BY key"))

    def find(self, key: str) -> Listed | None:
        row = self._db.execute("SELECT key, etag, size FROM listing WHERE key = ?", (key,)).fetchone()
        return Listed(*row) if row else None

    def add_label(self, file: str, label: str) -> str | None:
        """Note a file's label; return the one that was noted before, if there was."""
        known = self.label(file)
        if known is None:
            self._db.execute("INSERT INTO labels VALUES (?, ?)", (file, label))
        return known

    def forget_label(self, file: str) -> None:
        """Nobody knows the label of this file: it has two."""
        self._db.execute("UPDATE labels SET label = '' WHERE file = ?", (file,))

    def label(self, file: str) -> str | None:
        row = self._db.execute("SELECT label FROM labels WHERE file = ?", (file,)).fetchone()
        return str(row[0]) if row else None

    def labels_without_object(self, prefix: str) -> Iterator[str]:
        """Files that have a label and do not exist, sorted."""
        query = "SELECT file FROM labels WHERE NOT EXISTS (SELECT 1 FROM listing WHERE key = ? || file) ORDER BY file"
        return (str(row[0]) for row in self._db.execute(query, (prefix,)))

    def add_record(self, key: str, line: bytes) -> bool:
        """Keep a record's index line; False if there is one of that key already."""
        return self._db.execute("INSERT OR IGNORE INTO records VALUES (?, ?)", (key, line)).rowcount == 1

    def has_record(self, key: str) -> bool:
        return self._db.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() is not None

    def write_index(self, path: Path) -> None:
        """Write every record's line, in the order of keys."""
        with path.open("wb") as file:
            for (line,) in self._db.execute("SELECT line FROM records ORDER BY key"):
                file.write(line)
