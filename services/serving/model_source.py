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
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted
from contracts.model_process import MLFLOW_FOLDER
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.checkpoint_source import StoreSource
from services.kit.kept_model import write_kept_model
from services.kit.model_folder import (
    ModelFolderError,
    VerifiedManifest,
    verify_manifest,
    write_code,
    write_model_folder,
)
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore

#: The hash of each file of a kept folder.
HASHES = "hashes.json"
#: Where the files that a script kept lie while the MLflow model is looked for among them.
KEPT = ".kept"


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """The folder of a model, the run that made it, and the SHA-256 of its manifest."""

    folder: Path
    spec: RunSpec
    digest: str

    @property
    def mlflow_folder(self) -> Path | None:
        """Where the MLflow model of a script is; None for the model of a Task."""
        return self.folder / MLFLOW_FOLDER if self.spec.task is None else None


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
        if spec.task is None:
            await self._write_mlflow_model(manifest, spec, partial)
        else:
            await write_model_folder(StoreSource(self._objects), manifest, spec, partial)
        await asyncio.to_thread(_write_hashes, partial)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        partial.replace(folder)

    async def _write_mlflow_model(self, manifest: VerifiedManifest, spec: RunSpec, folder: Path) -> None:
        """Write the MLflow model that a script kept, and the script's code, which the model may import."""
        kept, source = folder / KEPT, StoreSource(self._objects)
        kept.mkdir()
        found = await write_kept_model(source, manifest, kept)
        found.rename(folder / MLFLOW_FOLDER)
        await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)
        if spec.code is not None:
            await write_code(source, manifest.commit.run_id, spec.code, folder)

    async def remove_others(self, model: str, kept: set[Path]) -> None:
        """Remove the folders of a model that are not in ``kept``."""
        for folder in (self._folder / model).glob("[!.]*/"):
            if folder not in kept:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


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
