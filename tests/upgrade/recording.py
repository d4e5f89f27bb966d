"""A recorded history: every message of the streams, and the read model that the release made of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zstandard

RECORDINGS = Path(__file__).parent
MESSAGES, READ_MODEL = "messages.jsonl.zst", "read_model.sql.zst"


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """One message of one stream, as the server stored it. ``body`` is text: every event is JSON."""

    stream: str
    sequence: int
    stored_at: str
    subject: str
    headers: dict[str, str]
    body: str


def recorded_versions() -> list[str]:
    """Return the releases whose history is on file."""
    return sorted(folder.parent.name for folder in RECORDINGS.glob(f"v*/{MESSAGES}"))


def read_messages(version: str) -> Iterator[RecordedMessage]:
    """Yield the recorded messages, stream by stream, each stream in its order."""
    text = zstandard.ZstdDecompressor().stream_reader((RECORDINGS / version / MESSAGES).read_bytes()).read().decode()
    for line in text.splitlines():
        yield RecordedMessage(**json.loads(line))


def write_messages(version: str, messages: Sequence[RecordedMessage]) -> None:
    """Write ``messages`` as one compressed file of JSON lines."""
    folder = RECORDINGS / version
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(asdict(message), sort_keys=True) + "\n" for message in messages)
    (folder / MESSAGES).write_bytes(zstandard.ZstdCompressor(level=19).compress(text.encode()))


def dump_database(version: str, database: Path) -> None:
    """Write the SQLite file ``database`` as compressed SQL statements."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        text = "\n".join(connection.iterdump())
    (RECORDINGS / version / READ_MODEL).write_bytes(zstandard.ZstdCompressor(level=19).compress(text.encode()))


def load_database(version: str, database: Path) -> None:
    """Make the SQLite file ``database`` as it was recorded."""
    text = zstandard.ZstdDecompressor().stream_reader((RECORDINGS / version / READ_MODEL).read_bytes()).read().decode()
    connection = sqlite3.connect(database)
    connection.executescript(text)
    connection.close()


def read_rows(database: Path, table: str) -> list[dict[str, Any]]:
    """Return every row of a table, in the order of its columns' text."""
    connection = sqlite3.connect(database)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]  # noqa: S608
    connection.close()
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True, default=str))
