"""How far a scrub is, beside its job, and what it remembers of what it has read."""

from __future__ import annotations

import json
from collections import OrderedDict
from contextlib import suppress

from nats.js.errors import KeyNotFoundError

from contracts import topology
from contracts.events.checkpoint import CheckpointCommitted
from services.checkpoint.keeper import read_deleted_uris
from services.kit.bus import Bus

#: Blobs that a scrub remembers, some 200 bytes each. One that was forgotten is read again for its next checkpoint.
MAX_SEEN_BLOBS = 250_000
#: Runs whose deletions are remembered. Commits of a run are close together in the log.
MAX_RUNS = 32


class ScrubProgress:
    """The place in the log of the last checkpoint that a scrub has read, kept in the bucket of jobs."""

    def __init__(self, bus: Bus, key: str, done: int, until: int) -> None:
        self._bus, self._key = bus, key
        #: Places in the log: of the last commit that was read, and of the last one to be read.
        self.done, self.until = done, until

    @classmethod
    async def open(cls, bus: Bus, job_id: str, until: int) -> ScrubProgress:
        """Return the progress of a job; one that has none yet reads up to ``until``."""
        key, done = f"scrubbed.{job_id}", 0
        bucket = await bus.open_bucket(topology.JOBS)
        # What cannot be read is as good as none: the scrub begins anew.
        with suppress(KeyNotFoundError, ValueError, KeyError, TypeError):
            saved = json.loads((await bucket.get(key)).value or b"{}")
            done, until = int(saved["done"]), int(saved["until"])
        return cls(bus, key, done, until)

    async def save(self, done: int) -> None:
        """Note that the commit at this place was read."""
        self.done = done
        bucket = await self._bus.open_bucket(topology.JOBS)
        await bucket.put(self._key, json.dumps({"done": done, "until": self.until}).encode())

    async def remove(self) -> None:
        """Forget the progress: the scrub is over."""
        await (await self._bus.open_bucket(topology.JOBS)).delete(self._key)


class SeenBlobs:
    """Which blobs a scrub has read, the latest of them: checkpoints share blobs."""

    def __init__(self) -> None:
        self._is_intact: OrderedDict[bytes, bool] = OrderedDict()
        self.count = self.rotten = 0

    def find(self, sha256: str) -> bool | None:
        """Return whether a blob was intact; None if it was not read, or is forgotten."""
        key = bytes.fromhex(sha256)
        if key in self._is_intact:
            self._is_intact.move_to_end(key)
        return self._is_intact.get(key)

    def add(self, sha256: str, is_intact: bool) -> None:
        """Note what was found."""
        self.count += 1
        self.rotten += not is_intact
        self._is_intact[bytes.fromhex(sha256)] = is_intact
        while len(self._is_intact) > MAX_SEEN_BLOBS:
            self._is_intact.popitem(last=False)


class RunDeletions:
    """Which checkpoints retention had removed when a run was first looked at."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._uris: OrderedDict[str, set[str]] = OrderedDict()

    async def has(self, commit: CheckpointCommitted) -> bool:
        """Return whether a checkpoint was removed. One that is removed later may not be in the store all the same."""
        if commit.run_id not in self._uris:
            self._uris[commit.run_id] = await read_deleted_uris(self._bus, commit.run_id)
        self._uris.move_to_end(commit.run_id)
        while len(self._uris) > MAX_RUNS:
            self._uris.popitem(last=False)
        return commit.checkpoint.uri in self._uris[commit.run_id]
