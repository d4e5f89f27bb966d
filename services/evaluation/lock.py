"""The second lock on a promotion: the manifest in the store must be the one that was committed."""

from __future__ import annotations

import hashlib

from contracts import subjects
from contracts.events.checkpoint import CheckpointCommitted
from services.kit.bus import Bus
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore


async def problem(bus: Bus, objects: ObjectStore, run_id: str, uri: str) -> str:
    """Why a run's checkpoint must not be promoted, in words; '' if its manifest is as it was committed.

    The manifest names every byte of the checkpoint by its hash, and the fact that committed it names the manifest.
    """
    try:
        manifest = await objects.get(uri)
    except ObjectNotFound:
        return f"the checkpoint of run {run_id} is no longer in the store ({uri}): promote another run"
    commits = await bus.read_history(subjects.fact("run", run_id, CheckpointCommitted.fact))
    there = [each.event.manifest_sha256 for each in commits if each.event.checkpoint.uri == uri]
    expected = [sha256 for sha256 in there if sha256 is not None]
    found = hashlib.sha256(manifest).hexdigest()
    if not expected or found in expected:
        return ""
    return (
        f"the manifest {uri} is not the one that was committed: its SHA-256 is {found}, {expected[-1]} was committed; "
        f"`trainbus checkpoints verify {run_id} --repair` writes the committed one again"
    )
