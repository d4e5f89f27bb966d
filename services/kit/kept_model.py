"""The MLflow model among the files that a script kept in a checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.kit.kept_files import unpack_files
from services.kit.model_folder import ModelFolderError, ModelSource, VerifiedManifest, write_verified

MLMODEL = "MLmodel"


class NoMlflowModelError(ModelFolderError):
    """A script kept no MLflow model; the text says what to save."""


async def write_kept_model(source: ModelSource, manifest: VerifiedManifest, folder: Path) -> Path:
    """Write what a script kept into an existing folder; return the folder of the MLflow model in it.

    Raises:
        NoMlflowModelError: there is none.
        ModelFolderError: a file is not what was committed.
    """
    for file in manifest.files:
        await write_verified(source, manifest, file, folder)
    try:
        await asyncio.to_thread(unpack_files, folder)
    except ValueError as error:
        raise ModelFolderError(f"{manifest.commit.checkpoint.uri}: {error}") from error
    found = await asyncio.to_thread(find_mlflow_model, folder)
    if found is None:
        raise NoMlflowModelError(
            "the script kept no MLflow model: save one below TRAINBUS_OUTPUT_DIR, as in "
            "mlflow.sklearn.save_model(model, trainbus.output_dir() / 'model')"
        )
    return found


def find_mlflow_model(folder: Path) -> Path | None:
    """Return the folder nearest to the top that has an MLmodel; None if there is none."""
    found = sorted(folder.rglob(MLMODEL), key=lambda path: (len(path.parts), path))
    return found[0].parent if found else None
