"""Fetches the model of a promotion: every hash against the manifest, that of the manifest against the log.

A folder is kept under the hash of its manifest. After a restart it is used again, its hashes verified, so that the
champions answer also while the object store is away.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from contracts import subjects
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted
from contracts.spec.run import Code, RunSpec
from services.kit.bus import Bus
from services.kit.chunks import restore_file
from services.kit.model_folder import ModelFolderError, verify_manifest, write_model_folder
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore

#: The hash of each file of a kept folder.
HASHES = "hashes.json"


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """The folder of a model, the run that made it, and the SHA-256 of its manifest."""

    folder: Path
    spec: RunSpec
    digest: str


class ModelSource:
    """Fetches models, and keeps those that are served."""

    def __init__(self, bus: Bus, objects: ObjectStore, folder: Path) -> None:
        self._bus, self._objects, self._folder = bus, objects, folder

    async def fetch(self, promotion: ModelPromoted) -> FetchedModel:
        """Return the model of a promotion.

        Raises:
            ModelFolderError: the log does not have it, or it is not what was committed.
            TransientError: the object store does not answer.
        """
        accepted = await self._bus.get_last_message(subjects.fact("run", promotion.run_id, RunAccepted.fact))
        commit = await self._find_commit(promotion)
        if accepted is None or commit is None:
            raise ModelFolderError(
                f"the log has no commit of {promotion.checkpoint_uri} by run {promotion.run_id}: promote another run"
            )
        spec: RunSpec = accepted.event.spec
        if spec.task is None:
            raise ModelFolderError(
                f"run {promotion.run_id} is a script: serving runs models of a Task (docs/serving.md); "
                f"`trainbus fetch {promotion.run_id}` brings what it kept"
            )
        name = (commit.manifest_sha256 or commit.state_digest or "")[:16]
        folder = self._folder / promotion.model / (name or f"{commit.run_id}-{commit.checkpoint.step}")
        if not await asyncio.to_thread(_is_intact, folder):
            try:
                await self._write(commit, spec, folder)
            except (ObjectNotFound, ObjectCorrupted) as error:
                raise ModelFolderError(f"{error}: `trainbus checkpoints verify {commit.run_id} --repair`") from error
        return FetchedModel(folder, spec, commit.manifest_sha256 or "")

    async def _find_commit(self, promotion: ModelPromoted) -> CheckpointCommitted | None:
        subject = subjects.fact("run", promotion.run_id, CheckpointCommitted.fact)
        commits = [each.event for each in await self._bus.read_history(subject)]
        return next((each for each in commits if each.checkpoint.uri == promotion.checkpoint_uri), None)

    async def _write(self, commit: CheckpointCommitted, spec: RunSpec, folder: Path) -> None:
        partial = folder.with_name(f".{folder.name}.partial")
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir(parents=True)
        manifest = verify_manifest(commit, await self._objects.get(commit.checkpoint.uri))
        await write_model_folder(_Checkpoint(self._objects), manifest, spec, partial)
        await asyncio.to_thread(_write_hashes, partial)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        partial.replace(folder)

    async def remove_others(self, model: str, kept: set[Path]) -> None:
        """Remove the folders of a model that are not in ``kept``."""
        for folder in (self._folder / model).glob("[!.]*/"):
            if folder not in kept:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The files of a checkpoint in the object store."""

    objects: ObjectStore

    async def write_file(self, file: CheckpointFile, target: Path) -> None:
        await restore_file(self.objects, file, target)

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        await self.objects.download(code.uri, target)


def _write_hashes(folder: Path) -> None:
    hashes = {str(path.relative_to(folder)): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / HASHES).write_text(json.dumps(hashes, indent=1))


def _is_intact(folder: Path) -> bool:
    """Whether a kept folder has what it had when it was fetched."""
    try:
        hashes: dict[str, str] = json.loads((folder / HASHES).read_bytes())
        return all(hash_file(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, ValueError):
        return False
