"""Builds the folder of a promoted model as MLflow loads it, from the checkpoint in the store, every hash verified."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from contracts import subjects
from contracts.events.checkpoint import CheckpointCommitted
from contracts.manifest import artifacts_of
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.checkpoint_source import StoreSource
from services.kit.kept_model import NoMlflowModelError, write_kept_model
from services.kit.model_folder import (
    MODEL_FILES,
    ModelFolderError,
    VerifiedManifest,
    verify_manifest,
    write_model_folder,
)
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.tracking.core.fold import Run
from services.tracking.model_files import write_model_files
from services.tracking.settings import TrackingSettings


class ModelLeftOut(Exception):
    """The model's files are not put into MLflow; the text says why, and where they are."""


class ModelBuilder:
    """Builds one model at a time, on this machine's disk."""

    def __init__(self, bus: Bus, settings: TrackingSettings) -> None:
        self._bus, self._settings = bus, settings

    @asynccontextmanager
    async def build(self, run: Run, uri: str, model_id: str, mlflow_run_id: str | None) -> AsyncIterator[Path]:
        """Yield a folder with an MLflow model; it is removed afterwards.

        Raises:
            ModelLeftOut: it is too large, not in the store, or of a script that kept no MLflow model.
        """
        if run.accepted is None:
            raise ModelLeftOut(f"run {run.run_id} was not accepted on this bus, so it is not known how its model loads")
        spec = run.accepted.spec
        scratch = self._settings.data_dir / "tracking-models"
        scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{run.run_id}-", dir=scratch) as name:
            folder = Path(name) / "model"
            folder.mkdir()
            async with ObjectStore(self._settings) as objects:
                try:
                    manifest = await self._read_manifest(objects, run.run_id, uri)
                    self._check_size(manifest, spec)
                    if spec.task is None:
                        found = await write_kept_model(StoreSource(objects), manifest, folder)
                    else:
                        # The model's own artifacts are part of it; those of the run are on its page.
                        await write_model_folder(StoreSource(objects), manifest, spec, folder)
                        found = folder
                except NoMlflowModelError as error:
                    raise ModelLeftOut(str(error)) from error
                except (ModelFolderError, ObjectNotFound, ObjectCorrupted) as error:
                    raise ModelLeftOut(f"the checkpoint is not whole: {error}") from error
            if spec.task is not None:
                environment = _read_environment(run)
                await asyncio.to_thread(write_model_files, found, model_id, mlflow_run_id, environment)
            yield found

    async def _read_manifest(self, objects: ObjectStore, run_id: str, uri: str) -> VerifiedManifest:
        commits = await self._bus.read_history(subjects.fact("run", run_id, CheckpointCommitted.fact))
        for received in commits:
            if isinstance(received.event, CheckpointCommitted) and received.event.checkpoint.uri == uri:
                return verify_manifest(received.event, await objects.get(uri))
        raise ModelLeftOut(f"run {run_id} has committed no checkpoint {uri}")

    def _check_size(self, manifest: VerifiedManifest, spec: RunSpec) -> None:
        files = manifest.files
        if spec.task is not None:
            weights = (file for file in files if MODEL_FILES.fullmatch(file.path))
            files = (*weights, *artifacts_of(files).values())
        size_bytes = sum(file.size_bytes for file in files)
        if size_bytes > self._settings.model_max_bytes:
            raise ModelLeftOut(
                f"the model has {size_bytes:,} bytes, more than TRAINBUS_MODEL_MAX_BYTES "
                f"({self._settings.model_max_bytes:,}): fetch it with `trainbus fetch {manifest.commit.run_id}`"
            )


def _read_environment(run: Run) -> Mapping[str, str]:
    """Return what the newest generation reported of its ranks."""
    return run.starts[max(run.starts)].environment if run.starts else {}
