"""A log of facts as the scheduler folds it: entries in the order of their sequence, from a stream or from a file.

A file has one JSON object a line, with ``type``, ``sequence``, ``time`` and ``data`` as a CloudEvent has them. ``time``
is when the fact was stored: it is what the fold reckons with.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from contracts import subjects
from contracts.base import Event, Fact
from contracts.earlier_events import model_of, read_data
from contracts.envelope import EnvelopeError, RawMessage, decode, type_for_subject
from services.scheduler.core.fold import apply, seen
from services.scheduler.core.state.cluster import Cluster

#: What the scheduler folds, and what tells the policies in force and the capacity that was wanted.
FOLLOWED = tuple(
    subjects.fact(aggregate, subjects.WILDCARD, subjects.WILDCARD)
    for aggregate in ("run", "node", "policy", "capacity")
)


class LogError(ValueError):
    """The log cannot be read; the text says where and why."""


class Entry(NamedTuple):
    """A fact and its place. ``fact`` is None for what cannot be read: its place counts all the same."""

    fact: Fact | None
    sequence: int
    time: datetime
    subject: str


def fold_entry(cluster: Cluster, entry: Entry) -> None:
    """Fold an entry in, as the live scheduler does."""
    if entry.fact is not None:
        apply(cluster, entry.fact, entry.sequence, entry.time)
    seen(cluster, entry.subject, entry.sequence)


def entry_of(raw: RawMessage) -> Entry:
    """Return the log entry of a message of the stream of facts; one that cannot be decoded has no fact."""
    try:
        event: Event | None = decode(raw)[1]
    except EnvelopeError:
        event = None
    fact = event if isinstance(event, Fact) else None
    return Entry(fact, raw.sequence, raw.stored_at or datetime.fromtimestamp(0, UTC), raw.subject)


# -- files ------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Entry]:
    """Every entry of a file, which may be gzipped.

    Raises:
        LogError: a line is no entry, or comes before the one it follows.
    """
    if path.suffix == ".gz":
        with gzip.open(path, "rt") as lines:
            yield from parse(lines, str(path))
    else:
        with path.open() as plain:
            yield from parse(plain, str(path))


def parse(lines: Iterable[str], name: str = "log") -> Iterator[Entry]:
    """The entries on these lines; empty lines are passed over."""
    last = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = _entry(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise LogError(f"{name}, line {number}: no fact of a log: {_text(error)}") from error
        if entry.sequence <= last:
            raise LogError(f"{name}, line {number}: sequence {entry.sequence} does not come after {last}")
        last = entry.sequence
        yield entry


def line_of(fact: Fact, sequence: int, time: datetime) -> str:
    """The line that stands for a fact in a file, without its end."""
    return json.dumps(
        {
            "specversion": "1.0",
            "id": fact.event_id,
            "type": fact.type,
            "sequence": sequence,
            "time": time.astimezone(UTC).isoformat(timespec="microseconds"),
            "natssubject": fact.subject,
            "data": fact.to_plain(),
        },
        separators=(",", ":"),
    )


def _entry(line: dict[str, Any]) -> Entry:
    subject = str(line.get("natssubject") or line.get("subject") or "")
    kind = str(line.get("type") or type_for_subject(subject))
    model = model_of(kind)
    time = datetime.fromisoformat(line["time"])
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    fact: Any = None
    if model is not None and issubclass(model, Fact):
        fact = read_data(kind, line["data"], extra="ignore")
        subject = fact.subject
    return Entry(fact, int(line["sequence"]), time, subject)


def _text(error: Exception) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)
