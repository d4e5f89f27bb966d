"""Which blobs and manifests are no longer needed. Mark and sweep; when in doubt, keep.

What makes it safe, although blobs are shared by content across runs and uploads go on meanwhile:

1. A blob is garbage only if no manifest in the store, no unsettled ``checkpoint_staged`` or listing of one, and no
   artifact in a fact names it, *and* it was last written before the cutoff. A listing is a blob, too: it stays as
   long as its checkpoint, which is rebuilt from it if the store loses the manifest.
2. The cutoff is ``grace`` (48 h) before the collection begins, and an upload relies on a blob only while it is younger
   than ``objects.REUSE_AGE_S`` (6 h); an older one it renews. So a blob from before the cutoff can be named by what the
   collection did not read only if an upload relied on it more than 42 hours before the collection began, and its facts
   came after that. ``grace`` leaves room for the slowest upload; the order of reading and listing does not matter.
   What a script's nodes without rank 0 have uploaded is named by no fact until rank 0's node stages it. That node has
   those blobs renewed every 6 h, and relies on them as on its own.
3. An upload that relies on an older blob has the store write it again under another ETag (``ObjectStore.renew``), and
   a blob is deleted only while it has the ETag that it had when it was still old. So of a renewal and a deletion that
   cross, one finds out: the upload sends the blob again, or the collection leaves it.
4. A blob may be needed as the base of differences (xor-zstd). Manifests and staged parts name the bases too, and
   those of a checkpoint that retention removed less than ``grace`` ago stay: an upload may have begun upon them.
5. In every case a checkpoint is verified against the store after it was staged and before it is
   committed: a blob that went too early costs that one checkpoint, never a committed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from contracts.manifest import MANIFEST_URI, files_of
from services.checkpoint.core.ledger import Ledger


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest in the store."""

    uri: str
    modified_at: datetime


def orphan_manifests(manifests: Iterable[StoredManifest], ledger: Ledger, cutoff: datetime) -> list[StoredManifest]:
    """Return manifests from before the cutoff that no run can restore.

    Retention deleted them, or their commit can never follow.
    """
    orphans = []
    for manifest in manifests:
        match = MANIFEST_URI.fullmatch(manifest.uri)
        if match is None or manifest.modified_at >= cutoff or manifest.uri in ledger.holds:
            continue
        is_superseded = ledger.is_superseded(match["run_id"], int(match["generation"]))
        if manifest.uri in ledger.deleted or (is_superseded and manifest.uri not in ledger.committed):
            orphans.append(manifest)
    return orphans


def blobs_of(manifest: bytes) -> set[str]:
    """The blobs that a manifest names.

    Raises:
        ValueError: this is no manifest, so the blobs that it needs are unknown.
    """
    return {uri for file in files_of(manifest) for uri in file.uris}
