"""A ledger as it is stored: a line with the hash of the rest, then compressed JSON."""

from __future__ import annotations

import hashlib
import zlib
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ValidationError

from contracts.state.run import RunState, RunStates
from services.checkpoint.core.ledger import Ledger, StagedParts
from services.checkpoint.core.retention import Holds

#: To be raised whenever the fold changes: a ledger of another version is not read, and the log is folded again.
VERSION: Literal[1] = 1
MAGIC = b"trainbus-checkpoint-ledger"


class LedgerRefused(ValueError):
    """The content is no ledger, or not one of this log."""


class _SavedLedger(BaseModel):
    version: Literal[1]
    #: When the stream was made that it is of.
    stream: str
    sequence: int
    generations: dict[str, int]
    artifacts: set[str]
    ended: dict[str, datetime]
    staged: dict[str, StagedParts]
    committed: dict[str, StagedParts]
    removed: dict[str, StagedParts]
    deleted: dict[str, datetime]
    held: set[str]
    held_by_run: dict[str, set[str]]
    runs: dict[str, RunState]


def encode(ledger: Ledger, stream: str) -> bytes:
    """Return the ledger of a stream as it is stored."""
    saved = _SavedLedger.model_construct(
        version=VERSION,
        stream=stream,
        sequence=ledger.sequence,
        generations=ledger.generations,
        artifacts=ledger.artifacts,
        ended=ledger.ended,
        staged=ledger.staged,
        committed=ledger.committed,
        removed=ledger.removed,
        deleted=ledger.deleted,
        held=ledger.holds.named,
        held_by_run=ledger.holds.by_run,
        runs=dict(ledger.holds.runs),
    )
    body = zlib.compress(saved.model_dump_json().encode(), level=3)
    return b"%b %b\n%b" % (MAGIC, hashlib.sha256(body).hexdigest().encode(), body)


def decode(content: bytes, stream: str) -> Ledger:
    """Return the ledger that ``encode`` was given.

    Raises:
        LedgerRefused: it is damaged, of another version, or of another stream.
    """
    line, _, body = content.partition(b"\n")
    if line != b"%b %b" % (MAGIC, hashlib.sha256(body).hexdigest().encode()):
        raise LedgerRefused("its checksum is wrong")
    try:
        saved = _SavedLedger.model_validate_json(zlib.decompress(body))
    except (ValidationError, zlib.error) as error:
        raise LedgerRefused(f"it cannot be read: {error}") from error
    if saved.stream != stream:
        raise LedgerRefused("it is of another stream")
    return Ledger(
        sequence=saved.sequence,
        generations=saved.generations,
        artifacts=saved.artifacts,
        ended=saved.ended,
        staged=saved.staged,
        committed=saved.committed,
        removed=saved.removed,
        deleted=saved.deleted,
        holds=Holds(named=saved.held, by_run=saved.held_by_run, runs=RunStates(saved.runs)),
    )
