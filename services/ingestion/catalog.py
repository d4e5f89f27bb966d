"""The catalog of one ingestion: objects, labels, records and splits. It is on disk, so that memory stays bounded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from services.ingestion.core.schema import Shape
from services.ingestion.core.splits import Stratum
from services.ingestion.sources import SourceObject


class Record(NamedTuple):
    """A valid record, before duplicates are removed and splits are assigned."""

    key: str
    #: The unit of the split: its records stay together.
    unit: bytes
    label: str | None
    sha256: bytes
    #: Of ``checks.id_field``, if there is one.
    id: bytes | None
    size: int
    #: What it adds to the statistics.
    measures: bytes
    #: Its line of the index, without a split.
    line: bytes


class Catalog:
    """A SQLite file of one job, deleted with the job. It sorts records and finds duplicates."""

    def __init__(self, path: Path) -> None:
        # The job uses it from one thread at a time.
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.executescript(
            """
            PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE;
            CREATE TABLE listing (path TEXT PRIMARY KEY, etag TEXT, size INTEGER, written_us INTEGER) WITHOUT ROWID;
            CREATE TABLE shapes (number INTEGER PRIMARY KEY, shape TEXT UNIQUE, files INTEGER);
            CREATE TABLE shaped (shape INTEGER, path TEXT, PRIMARY KEY (shape, path)) WITHOUT ROWID;
            CREATE TABLE labels (file TEXT PRIMARY KEY, label TEXT, value TEXT) WITHOUT ROWID;
            CREATE TABLE records (key TEXT PRIMARY KEY, unit BLOB, label TEXT, sha256 BLOB, id BLOB, size INTEGER,
                measures BLOB, line BLOB) WITHOUT ROWID;
            CREATE TABLE taken (key TEXT PRIMARY KEY) WITHOUT ROWID;
            CREATE TABLE placed (sha256 BLOB, split TEXT, key TEXT);
            CREATE TABLE strata (label TEXT, unit BLOB, size INTEGER, PRIMARY KEY (label, unit)) WITHOUT ROWID;
            CREATE TABLE assigned (unit BLOB PRIMARY KEY, split TEXT) WITHOUT ROWID;
            BEGIN;
            """
        )

    def close(self) -> None:
        self._db.close()

    # -- listing --------------------------------------------------------------

    def list_objects(self, objects: Iterable[SourceObject]) -> None:
        self._db.executemany("INSERT OR REPLACE INTO listing VALUES (?, ?, ?, ?)", objects)

    def objects(self) -> Iterator[SourceObject]:
        """Yield the listing in the order of paths."""
        return (SourceObject(*row) for row in self._db.execute("SELECT * FROM listing ORDER BY path"))

    def find(self, path: str) -> SourceObject | None:
        row = self._db.execute("SELECT * FROM listing WHERE path = ?", (path,)).fetchone()
        return SourceObject(*row) if row else None

    def size_of_listing(self) -> tuple[int, int]:
        """Return the number and bytes of the objects."""
        count, size = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM listing").fetchone()
        return int(count), int(size)

    # -- schemas --------------------------------------------------------------

    def note_shape(self, path: str, shape: Shape) -> None:
        """Add the shape of a file's records. Call it in the order of paths."""
        text = json.dumps(shape)
        count = "INSERT INTO shapes (shape, files) VALUES (?, 1) ON CONFLICT DO UPDATE SET files = files + 1"
        self._db.execute(count, (text,))
        self._db.execute("INSERT INTO shaped SELECT number, ? FROM shapes WHERE shape = ?", (path, text))

    def shapes(self) -> Iterator[tuple[Shape, int]]:
        """Yield each shape and its number of files, in the order of their first files."""
        found = self._db.execute("SELECT shape, files FROM shapes ORDER BY number")
        return ((json.loads(shape), files) for shape, files in found)

    def files_of(self, shape: Shape) -> Iterator[str]:
        """Yield the files of this shape, in the order of paths."""
        query = "SELECT path FROM shaped WHERE shape = (SELECT number FROM shapes WHERE shape = ?) ORDER BY path"
        return (str(row[0]) for row in self._db.execute(query, (json.dumps(shape),)))

    # -- labels ---------------------------------------------------------------

    def add_label(self, file: str, label: str, value: dict[str, Any]) -> str | None:
        """Store a file's label and the other columns of its row; return the label that was stored before, if any."""
        known = self._db.execute("SELECT label FROM labels WHERE file = ?", (file,)).fetchone()
        if known is None:
            self._db.execute("INSERT INTO labels VALUES (?, ?, ?)", (file, label, json.dumps(value)))
        return str(known[0]) if known else None

    def forget_label(self, file: str) -> None:
        """Clear the label of a file that has two."""
        self._db.execute("UPDATE labels SET label = '' WHERE file = ?", (file,))

    def label(self, file: str) -> tuple[str, dict[str, Any]] | None:
        """Return the label of a file, and the other columns of its row."""
        row = self._db.execute("SELECT label, value FROM labels WHERE file = ?", (file,)).fetchone()
        return (str(row[0]), json.loads(row[1])) if row else None

    def labels_without_object(self) -> Iterator[str]:
        """Yield the files that have a label and do not exist, sorted."""
        query = "SELECT file FROM labels WHERE NOT EXISTS (SELECT 1 FROM listing WHERE path = file) ORDER BY file"
        return (str(row[0]) for row in self._db.execute(query))

    # -- records --------------------------------------------------------------

    def add_record(self, record: Record) -> bool:
        """Add a record; return False if the key exists."""
        return self._db.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", record).rowcount == 1

    def forget_records(self, prefix: str) -> None:
        """Remove the records of the file whose rows' keys begin with ``prefix``."""
        self._db.execute("DELETE FROM records WHERE key > ? AND key < ?", (f"{prefix}/", f"{prefix}0"))

    def records(self) -> Iterator[Record]:
        """Yield the remaining records in the order of keys."""
        return (Record(*row) for row in self._db.execute("SELECT * FROM records ORDER BY key"))

    def take_conflicting_ids(self) -> Iterator[Record]:
        """Remove and return all records that share an id with others of another content, in the order of keys."""
        return self._remove_records(
            """INSERT INTO taken SELECT key FROM records WHERE id IN
                (SELECT id FROM records WHERE id IS NOT NULL GROUP BY id HAVING min(sha256) < max(sha256))"""
        )

    def take_second_copies(self) -> Iterator[Record]:
        """Remove and return all but the first of the records of one id, in the order of keys."""
        return self._remove_records(
            """INSERT INTO taken SELECT key FROM records WHERE id IS NOT NULL
                AND key NOT IN (SELECT min(key) FROM records WHERE id IS NOT NULL GROUP BY id)"""
        )

    def take_conflicting_labels(self) -> Iterator[Record]:
        """Remove and return all records whose content has another label elsewhere, in the order of keys."""
        return self._remove_records(
            """INSERT INTO taken SELECT key FROM records WHERE sha256 IN
                (SELECT sha256 FROM records WHERE label IS NOT NULL GROUP BY sha256 HAVING min(label) < max(label))"""
        )

    def _remove_records(self, insert: str) -> Iterator[Record]:
        self._db.execute("DELETE FROM taken")
        self._db.execute(insert)
        found = self._db.execute("SELECT * FROM records WHERE key IN (SELECT key FROM taken) ORDER BY key")
        for row in found:
            yield Record(*row)
        self._db.execute("DELETE FROM records WHERE key IN (SELECT key FROM taken)")

    # -- splits ---------------------------------------------------------------

    def unit_sizes(self) -> Iterator[tuple[bytes, str | None, int]]:
        """Yield each unit, label and number of records, in the order of units."""
        return self._db.execute("SELECT unit, label, count(*) FROM records GROUP BY unit, label ORDER BY unit, label")

    def add_strata(self, strata: Iterable[Stratum]) -> None:
        """Add the class and size of each unit."""
        self._db.executemany("INSERT INTO strata (unit, label, size) VALUES (?, ?, ?)", strata)

    def class_sizes(self) -> list[tuple[str, int]]:
        """Return each class and its number of records."""
        return self._db.execute("SELECT label, sum(size) FROM strata GROUP BY label ORDER BY label").fetchall()

    def units_of(self, label: str) -> Iterator[tuple[bytes, int]]:
        """Yield the units of one class and their sizes, in the order of units."""
        return self._db.execute("SELECT unit, size FROM strata WHERE label = ? ORDER BY unit", (label,))

    def assign(self, splits: Iterable[tuple[bytes, str]]) -> None:
        """Store the split of each unit."""
        self._db.executemany("INSERT INTO assigned VALUES (?, ?)", splits)

    def assigned(self, unit: bytes) -> str:
        """Return the split assigned to a unit."""
        return str(self._db.execute("SELECT split FROM assigned WHERE unit = ?", (unit,)).fetchone()[0])

    def place(self, sha256: bytes, split: str, key: str) -> None:
        """Store the split and key of a content."""
        self._db.execute("INSERT INTO placed VALUES (?, ?, ?)", (sha256, split, key))

    def leak(self) -> tuple[str, str, str, str] | None:
        """Return two records of the same content in different splits, if any: key and split of each."""
        query = """SELECT key, split, sha256 FROM placed WHERE sha256 IN
                (SELECT sha256 FROM placed GROUP BY sha256 HAVING min(split) < max(split) ORDER BY sha256 LIMIT 1)
            ORDER BY key"""
        found = self._db.execute(query).fetchall()
        if not found:
            return None
        key, split, _ = found[0]
        other, its, _ = next(row for row in found if row[1] != split)
        return key, split, other, its
