"""Which blobs and manifests are no longer needed. Mark and sweep; when in doubt, keep.

What makes it safe, although blobs are shared by content across runs and uploads go on meanwhile:

1. A blob is garbage only if no manifest in the store, no unsettled ``checkpoint_staged`` or listing of one, and no
   artifact in a fact names it, *and* it was last written more than ``grace`` ago. A listing is a blob, too: it stays as
   long as its checkpoint, which is rebuilt from it if the store loses the manifest.
2. The facts and manifests are read after the blobs were listed.
3. An upload that relies on an existing blob older than ``objects.REUSE_AGE_S`` has the store write it again under
   another ETag (``ObjectStore.renew``), so a blob that an upload under way relies on is always younger than ``grace``.
   A blob is deleted only while it has the ETag that it had when it was still old. So of a renewal and a deletion that
   cross, one finds out: the upload sends the blob again, or the collection leaves it.
4. A blob may be needed as the base of differences (xor-zstd). Manifests and staged parts name the bases too, and
   those of a checkpoint that retention removed less than ``grace`` ago stay: an upload may have begun upon them.
5. In every case a checkpoint is verified against the store after it was staged and before it is
   committed: a blob that went too early costs that one checkpoint, never a committed one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from contracts.base import Event
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointRefused,
    CheckpointStaged,
    FileListing,
)
from contracts.events.run import RunCompleted, RunEvaluated, RunExited, RunFact, RunPlaced
from contracts.manifest import files_of
from services.checkpoint.core.retention import Holds

MANIFEST_KEY = re.compile(r"^[^/]+/(?P<run_id>[^/]+)/checkpoints/epoch_-?\d+/step_-?\d+\.g(?P<generation>\d+)\.json$")


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """An object in the store."""

    uri: str
    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(slots=True)
class StagedObjects:
    """What the parts of one step name in the store, directly and by their listings."""

    #: When the newest part was staged, or retention removed the checkpoint.
    time: datetime
    blobs: set[str] = field(default_factory=set)
    listings: set[FileListing] = field(default_factory=set)

    def add(self, part: CheckpointStaged, time: datetime) -> None:
        self.time = time
        self.blobs |= {uri for file in part.files for uri in file.uris}
        if part.listing is not None:
            self.listings.add(part.listing)


@dataclass(slots=True)
class Ledger:
    """Who needs which object, by the facts. A fold over facts in stream order."""

    committed: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    generation: dict[str, int] = field(default_factory=dict)
    artifacts: set[str] = field(default_factory=set)
    #: Runs that are over: what they staged and nobody committed is not committed any more.
    ended: set[str] = field(default_factory=set)
    #: (run, generation, step) -> what its parts name.
    staged: dict[tuple[str, int, int], StagedObjects] = field(default_factory=dict)
    #: Manifest -> what its parts name, while it is committed.
    kept: dict[str, StagedObjects] = field(default_factory=dict)
    #: Manifest -> what its parts named, after retention removed it; forgotten once ``forget_before`` is later.
    removed: dict[str, StagedObjects] = field(default_factory=dict)
    forget_before: datetime | None = None
    #: A run that was accepted while retention decided may have begun with what it then deleted.
    holds: Holds = field(default_factory=Holds)

    def apply(self, event: Event, time: datetime) -> None:
        lived = isinstance(event, RunFact) and event.run_id in self.holds.runs
        self.holds.apply(event)
        if isinstance(event, RunFact) and lived and event.run_id not in self.holds.runs:
            self.ended.add(event.run_id)
        match event:
            case RunPlaced():
                self.generation[event.run_id] = max(event.generation, self.generation.get(event.run_id, 0))
            case CheckpointStaged():
                key = (event.run_id, event.generation, event.step)
                self.staged.setdefault(key, StagedObjects(time)).add(event, time)
            case CheckpointCommitted():
                self.committed.add(event.checkpoint.uri)
                # From here on its manifest names the blobs.
                key = (event.run_id, event.generation, event.checkpoint.step)
                self.kept[event.checkpoint.uri] = self.staged.pop(key, StagedObjects(time))
            case CheckpointRefused():
                self.staged.pop((event.run_id, event.generation, event.step), None)
            case CheckpointDeleted():
                self.deleted.add(event.uri)
                removed = self.kept.pop(event.uri, StagedObjects(time))
                if self.forget_before is None or time > self.forget_before:
                    self.removed[event.uri] = replace(removed, time=time)
            case RunExited() | RunCompleted():
                self.artifacts |= {artifact.uri for artifact in event.artifacts}
            case RunEvaluated():
                self.artifacts |= {artifact.uri for artifact in event.report}

    def pending_blobs(self, newer_than: datetime) -> set[str]:
        """Blobs of parts that may still be committed, or were staged or given up a short while ago.

        Not those that only a listing names: see ``pending_listings``.
        """
        return set[str]().union(*(each.blobs for each in self._pending(newer_than)))

    def pending_listings(self, newer_than: datetime) -> set[FileListing]:
        """Listings of such parts. What they name stays."""
        return set[FileListing]().union(*(each.listings for each in self._pending(newer_than)))

    @property
    def kept_listings(self) -> set[str]:
        """Listings of what is committed: the manifest is rebuilt from them if the store loses it."""
        return {listing.uri for each in self.kept.values() for listing in each.listings}

    def _pending(self, newer_than: datetime) -> list[StagedObjects]:
        waiting = [
            each
            for (run_id, generation, _), each in self.staged.items()
            if each.time > newer_than or (run_id not in self.ended and generation >= self.generation.get(run_id, 0))
        ]
        return waiting + [each for each in self.removed.values() if each.time > newer_than]


def orphan_manifests(
    manifests: Iterable[StoredBlob], ledger: Ledger, now: datetime, grace: timedelta
) -> list[StoredBlob]:
    """Return manifests that no run can restore: retention deleted them, or their commit can never follow."""
    orphans = []
    for manifest in manifests:
        match = MANIFEST_KEY.match(manifest.key)
        if match is None or now - manifest.modified_at <= grace or manifest.uri in ledger.holds:
            continue
        superseded = int(match["generation"]) < ledger.generation.get(match["run_id"], 0)
        if manifest.uri in ledger.deleted or (superseded and manifest.uri not in ledger.committed):
            orphans.append(manifest)
    return orphans


def select_garbage(
    blobs: Iterable[StoredBlob], named: set[str], ledger: Ledger, now: datetime, grace: timedelta
) -> list[StoredBlob]:
    """Return the blobs that nothing names. ``named`` are those of every manifest and pending listing that stays."""
    listings = {listing.uri for listing in ledger.pending_listings(now - grace)} | ledger.kept_listings
    marked = named | ledger.artifacts | ledger.pending_blobs(now - grace) | listings
    return [blob for blob in blobs if blob.uri not in marked and now - blob.modified_at > grace]


def blobs_of(manifest: bytes) -> set[str]:
    """The blobs that a manifest names.

    Raises:
        ValueError: this is no manifest, so the blobs that it needs are unknown.
    """
    return {uri for file in files_of(manifest) for uri in file.uris}
