"""Garbage: shards, packs and ingestions without a reference. Mark and sweep; when in doubt, keep.

Why it is safe while datasets are being made:

1. A shard is garbage only if no manifest and no young journal names it, and it was last written more than ``grace``
   before the collection began.
2. Manifests are read after the journals. So one of them names the shards of a dataset that is completed meanwhile. That
   shards are listed after both does no harm: a job that relies on one that old had it renewed, or has worked for longer
   than ``grace`` less ``objects.REUSE_AGE_S`` (42 hours), and then rule 3 makes it find what is gone.
3. A job that reuses a shard older than ``objects.REUSE_AGE_S`` renews it under another ETag, and a shard is deleted
   only while it has the ETag that it had when it was still old. Before the job writes the manifest, it checks every
   shard and makes missing ones again, so no manifest names a shard that is gone.
4. An ingestion is kept while a manifest has its fingerprint, since its index is needed to compare two datasets.
   Its packs are needed only to make datasets of it. They are deleted ``keep_packs`` after it and its dataset were made,
   unless an open job makes another.
5. An ingestion without a manifest is deleted when all its objects are older than ``grace``. ``done.json`` is deleted
   first, so that the rest never looks complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from contracts.datasets import Manifest
from contracts.events.dataset import ShardFile

INGESTION_KEY = re.compile(r"^ingestions/(?P<fingerprint>[0-9a-f]{64})/(?P<name>.+)$")
JOURNAL = re.compile(r"^shards-[0-9a-f]{16}\.json$")
PACK = re.compile(r"^pack-\d+$")
DONE = "done.json"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the store."""

    uri: str
    key: str
    size_bytes: int
    modified_at: datetime

    @property
    def fingerprint(self) -> str:
        """The ingestion that it belongs to; '' if it belongs to none."""
        match = INGESTION_KEY.match(self.key)
        return match["fingerprint"] if match else ""


@dataclass(frozen=True, slots=True)
class NamedIngestions:
    """Fingerprints of the ingestions that are needed."""

    #: Those that manifests were made of, and those that open jobs make datasets of.
    fingerprints: frozenset[str]
    working: frozenset[str] = frozenset()


def hashes_of_manifest(manifest: Manifest) -> Iterator[str]:
    """Iterate over the hashes of a manifest's shards and indexes."""
    for split in manifest.splits.values():
        for shard in split.shards:
            yield from (shard.sha256, shard.index_sha256)


def hashes_of_journal(journal: Mapping[str, ShardFile]) -> Iterator[str]:
    """Iterate over the hashes of a journal's shards and indexes."""
    for shard in journal.values():
        yield from (shard.sha256, shard.index_sha256)


def read_journal(content: bytes) -> dict[str, ShardFile]:
    """Return the shards that a journal names.

    Raises:
        ValueError: the content is not a journal.
    """
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("a journal is a JSON object")
    return {str(name): ShardFile.model_validate(shard) for name, shard in found.items()}


def is_young_journal(stored: StoredObject, now: datetime, grace: timedelta) -> bool:
    match = INGESTION_KEY.match(stored.key)
    return match is not None and JOURNAL.match(match["name"]) is not None and now - stored.modified_at <= grace


def garbage_of_ingestion(
    objects: list[StoredObject],
    named: NamedIngestions,
    now: datetime,
    grace: timedelta,
    keep_packs: timedelta,
) -> list[StoredObject]:
    """Return which objects of one ingestion can be deleted, in the order in which they must be."""
    fingerprint = objects[0].fingerprint
    names = {stored.uri: stored.key.rpartition("/")[2] for stored in objects}
    youngest = max(stored.modified_at for stored in objects)
    if fingerprint not in named.fingerprints:
        # done.json (False) comes before all others (True).
        return sorted(objects, key=lambda s: (names[s.uri] != DONE, s.key)) if now - youngest > grace else []
    stale = [stored for stored in objects if JOURNAL.match(names[stored.uri]) and now - stored.modified_at > grace]
    if now - youngest > keep_packs and fingerprint not in named.working:
        stale += [stored for stored in objects if PACK.match(names[stored.uri])]
    return stale
