"""Snapshots of the folded log, so that a scheduler need not fold years of facts at its start.

A snapshot is a cache. It is used only if it is of this version of the format, of this very stream, and whole; otherwise
the log is folded from its beginning. Every instance reads them from an object bucket beside the log. A child process
(``snapshot_process.py``) makes them: it starts from the last one, folds what came since and ends.
The leader never waits for one.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime

import nats.errors
import structlog
import zstandard
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from contracts import topology
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler.core.state import codec
from services.scheduler.core.state.cluster import Cluster

log = structlog.get_logger(__name__)

MAGIC = b"trainbus-scheduler-snapshot/1\n"
#: To be raised whenever a cluster is saved in another way, or the same facts add up to another one: a snapshot of
#: another version is not read, and the log is folded again. ``tests/scheduler/snapshot_format.py`` detects both.
FORMAT_VERSION = 6
#: Snapshots that are kept: of this version, and of others, to which an operator may go back.
SNAPSHOTS_KEPT, OTHER_SNAPSHOTS_KEPT = 2, 2
#: A snapshot is due after this many facts, and this many seconds after the last one.
DUE_FACTS = 20_000
DUE_S = 30.0
#: How long reading or writing one may take, and making one.
TRANSFER_S = 30.0
CREATE_TIMEOUT_S = 1800.0
CHECK_INTERVAL_S = 2.0


class SnapshotRefused(ValueError):
    """The content is no snapshot, or cannot be used here."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a snapshot, after the magic bytes."""

    version: int
    #: When the stream was made that it is of.
    stream: str
    sequence: int
    #: Of the compressed sections that follow.
    sha256: str
    #: (name, bytes) of each section.
    sections: list[tuple[str, int]]


def encode(cluster: Cluster, stream: str) -> bytes:
    """A snapshot as it is stored."""
    sections = codec.save(cluster)
    body = zstandard.ZstdCompressor(level=3).compress(b"".join(sections.values()))
    sizes = [(name, len(content)) for name, content in sections.items()]
    header = Header(FORMAT_VERSION, stream, cluster.sequence, hashlib.sha256(body).hexdigest(), sizes)
    return MAGIC + json.dumps(asdict(header)).encode() + b"\n" + body


def decode(content: bytes, stream: str) -> Cluster:
    """What ``encode`` was given.

    Raises:
        SnapshotRefused: it is broken, of another version or of another stream.
    """
    if not content.startswith(MAGIC):
        raise SnapshotRefused("it does not begin as one")
    line, _, body = content[len(MAGIC) :].partition(b"\n")
    try:
        header = Header(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise SnapshotRefused(f"its header cannot be read: {error}") from error
    if header.version != FORMAT_VERSION:
        raise SnapshotRefused(f"it is of version {header.version}")
    if header.stream != stream:
        raise SnapshotRefused("it is of another stream")
    if hashlib.sha256(body).hexdigest() != header.sha256:
        raise SnapshotRefused("its checksum is wrong")
    try:
        whole, at, sections = memoryview(zstandard.ZstdDecompressor().decompress(body)), 0, {}
        for name, size in header.sections:
            sections[name] = whole[at : at + size]
            at += size
        cluster = codec.restore(sections)
    except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
        raise SnapshotRefused(f"it cannot be read: {error}") from error
    if cluster.sequence != header.sequence:
        raise SnapshotRefused("it is not of the sequence that it names")
    return cluster


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection: a hundred thousand new objects are all kept."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class SnapshotStore:
    """The bucket of snapshots."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def newest(self) -> Cluster | None:
        """The cluster of the newest snapshot that can be used; None if there is none."""
        try:
            async with asyncio.timeout(TRANSFER_S):
                store, stream, last = await self._store(), *await self._stream()
                for name in (await self._names(store))[0]:
                    if _sequence_of(name) <= last and (found := await self._read(store, name, stream)) is not None:
                        return found
        except (TimeoutError, nats.errors.Error, APIError, JetStreamError) as error:
            log.warning("no snapshot read, folding the log", error=repr(error))
        return None

    async def write(self, cluster: Cluster) -> str:
        """Save the cluster, and remove what is older than it need be."""
        store, (stream, _) = await self._store(), await self._stream()
        name = name_of(cluster.sequence)
        content = await asyncio.to_thread(encode, cluster, stream)
        async with asyncio.timeout(TRANSFER_S):
            await store.put(name, content)
            await self._prune(store)
        log.info("snapshot taken", name=name, size_bytes=len(content), runs=cluster.runs.total)
        return name

    async def _read(self, store: ObjectStore, name: str, stream: str) -> Cluster | None:
        try:
            # Into a buffer of ours: the client adds chunk to chunk, and copies everything each time.
            content = io.BytesIO()
            # The client waits for ever for chunks that are removed under its hands.
            async with asyncio.timeout(TRANSFER_S / 3):
                await store.get(name, writeinto=content)
            with _no_collections():
                return decode(content.getvalue(), stream)
        except (SnapshotRefused, JetStreamError, TimeoutError) as error:
            # Perhaps it was being removed, or a disk has failed: there is one before it, or the log.
            log.warning("snapshot refused", name=name, reason=repr(error))
            return None

    async def _prune(self, store: ObjectStore) -> None:
        own, others = await self._names(store)
        for name in own[SNAPSHOTS_KEPT:] + others[OTHER_SNAPSHOTS_KEPT:]:
            with suppress(JetStreamError):
                await store.delete(name)

    async def _names(self, store: ObjectStore) -> tuple[list[str], list[str]]:
        """Return the names of the snapshots of this version, and of those of others; the newest first."""
        try:
            entries = await store.list(ignore_deletes=True)
        except NotFoundError:
            entries = []
        names = [entry.name for entry in entries if entry.name and not entry.deleted and _sequence_of(entry.name) >= 0]
        names.sort(key=_sequence_of, reverse=True)
        own = [name for name in names if name.startswith(f"{FORMAT_VERSION}/")]
        return own, [name for name in names if name not in own]

    async def _store(self) -> ObjectStore:
        return await self.bus.js.object_store(topology.SNAPSHOTS.name)

    async def _stream(self) -> tuple[str, int]:
        """(when the stream of facts was made, its last sequence)."""
        info = await self.bus.js.stream_info(topology.FACTS.name)
        created = info.created
        return created.isoformat() if isinstance(created, datetime) else str(created), info.state.last_seq


def name_of(sequence: int) -> str:
    """Return the name of this version's snapshot of the sequence."""
    return f"{FORMAT_VERSION}/{sequence:020}"


def _sequence_of(name: str) -> int:
    """Return the sequence of the snapshot of this name; -1 if it is no snapshot's name."""
    sequence = name.partition("/")[2]
    return int(sequence) if sequence.isdigit() else -1


class SnapshotTaker:
    """Starts a child process for each snapshot while this instance leads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._taken = 0
        self._taken_at = time.monotonic()

    def recalled(self, sequence: int) -> None:
        """Note that there is a snapshot of this sequence."""
        self._taken = max(self._taken, sequence)

    def due(self, sequence: int) -> bool:
        return sequence - self._taken >= DUE_FACTS and time.monotonic() - self._taken_at >= DUE_S

    async def take_while(self, cluster: Cluster) -> None:
        """Take a snapshot whenever one is due, until cancelled. Errors are logged; the next attempt follows later."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self.due(cluster.sequence):
                self._taken_at, upto = time.monotonic(), cluster.sequence
                if await self._run_child():
                    self._taken = upto

    async def _run_child(self) -> bool:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.scheduler.snapshot_process", env=environment(self._settings)
            )
        except OSError as error:
            log.warning("no snapshot taken", error=repr(error))
            return False
        try:
            async with asyncio.timeout(CREATE_TIMEOUT_S):
                return await child.wait() == 0
        except TimeoutError:
            log.warning("no snapshot taken", error=f"it took longer than {CREATE_TIMEOUT_S:.0f} s")
            return False
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()


def environment(settings: Settings) -> dict[str, str]:
    """What a process needs to find the same bus."""
    password = settings.nats_password.get_secret_value() if settings.nats_password else ""
    own = {
        "TRAINBUS_NATS_URL": settings.nats_url,
        "TRAINBUS_NATS_USER": settings.nats_user or "",
        "TRAINBUS_NATS_PASSWORD": password,
        "TRAINBUS_INSTANCE": f"{settings.instance}-snapshot",
        "TRAINBUS_LOG_LEVEL": settings.log_level,
        "TRAINBUS_LOG_FORMAT": settings.log_format,
    }
    return {**os.environ, **{name: value for name, value in own.items() if value}}
