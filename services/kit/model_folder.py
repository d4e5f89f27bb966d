"""The folder of a Task's model: its weights, its description and its code, every hash verified.

``trainbus fetch`` writes it for a user, serving for its processes; ``trainbus.load_model`` loads it. The fact that
committed a checkpoint names the hash of its manifest, and the manifest names the hash of every file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile
from contracts.manifest import ARTIFACTS_FOLDER, artifacts_of, files_of
from contracts.spec.run import Code, RunSpec
from services.kit.code_package import PackageError
from services.kit.package_files import unpack_package
from services.kit.store.files import hash_file, is_inside
from services.kit.tensor_files import TensorFileError, read_tensors, write_tensors

WEIGHTS, DESCRIPTION, CODE, ARTIFACTS = "model.safetensors", "model.json", "code", ARTIFACTS_FOLDER
#: The files of a Task's checkpoint that its model needs.
MODEL_FILES = re.compile(r"(model|ema)-\d+\.safetensors|digests-\d+\.json|state\.json")
_PARTS = ".parts"


class ModelFolderError(Exception):
    """The model is not what was committed, or cannot be written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class VerifiedManifest:
    """A manifest that is the one that was committed, and the files that it names."""

    commit: CheckpointCommitted
    sha256: str
    files: tuple[CheckpointFile, ...]


class ModelSource(Protocol):
    """Where the files of a checkpoint are read. Nothing that it writes is verified yet."""

    async def write_file(self, file: CheckpointFile, target: Path) -> None:
        """Write a file of the checkpoint."""

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        """Write the code package of a run."""


def verify_manifest(commit: CheckpointCommitted, content: bytes) -> VerifiedManifest:
    """Return the files that a manifest names.

    Raises:
        ModelFolderError: it is not the manifest that was committed.
    """
    uri, sha256 = commit.checkpoint.uri, hashlib.sha256(content).hexdigest()
    if commit.manifest_sha256 not in (None, sha256):
        raise ModelFolderError(
            f"{uri} is not the manifest that was committed (SHA-256 {sha256}, not {commit.manifest_sha256}): "
            f"`trainbus checkpoints verify {commit.run_id} --repair` writes that one again"
        )
    try:
        return VerifiedManifest(commit, sha256, files_of(content))
    except ValueError as error:
        raise ModelFolderError(f"{uri} is {error}") from error


async def write_model_folder(source: ModelSource, manifest: VerifiedManifest, spec: RunSpec, folder: Path) -> None:
    """Write the model of a Task into an existing folder.

    Raises:
        ModelFolderError: a file is not what was committed.
    """
    parts = folder / _PARTS
    wanted = [file for file in manifest.files if MODEL_FILES.fullmatch(file.path)]
    paths = await asyncio.gather(*(write_verified(source, manifest, file, parts) for file in wanted))
    try:
        await asyncio.to_thread(_merge_weights, paths, folder / WEIGHTS)
    except TensorFileError as error:
        raise ModelFolderError(f"{manifest.commit.checkpoint.uri}: {error}") from error
    artifacts = artifacts_of(manifest.files)
    await asyncio.gather(*(write_verified(source, manifest, file, folder) for file in artifacts.values()))
    if spec.code is not None:
        await write_code(source, manifest.commit.run_id, spec.code, folder)
    description = _describe(manifest, spec, json.loads((parts / "state.json").read_bytes())["about"])
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")
    shutil.rmtree(parts)


async def write_verified(source: ModelSource, manifest: VerifiedManifest, file: CheckpointFile, folder: Path) -> Path:
    """Write a file of a checkpoint below a folder; return its path.

    Raises:
        ModelFolderError: it is not what was committed.
    """
    path = folder / file.path
    if not is_inside(path, folder):
        raise ModelFolderError(f"{file.path!r} leaves the folder: this manifest was not written by trainbus")
    path.parent.mkdir(parents=True, exist_ok=True)
    await source.write_file(file, path)
    await verify_hash(path, file.sha256, f"{file.path!r} of {manifest.commit.checkpoint.uri}")
    return path


async def verify_hash(path: Path, sha256: str, what: str) -> None:
    """Remove a file and raise ModelFolderError unless it has that hash."""
    if await asyncio.to_thread(hash_file, path) != sha256:
        path.unlink()
        raise ModelFolderError(
            f"{what} does not have the hash that was committed: `trainbus checkpoints verify --repair`"
        )


def _merge_weights(paths: Sequence[Path], target: Path) -> None:
    """Write all ranks' tensors into one file, in place of a weight its moving average."""
    tensors = read_tensors(path for path in paths if path.name.startswith("model-"))
    averages = read_tensors(path for path in paths if path.name.startswith("ema-"))
    digests: dict[str, str] = {}
    for path in paths:
        if path.name.startswith("digests-"):
            digests |= json.loads(path.read_bytes())
    # A parameter that is tied to another has several names in the model and one average.
    by_digest = {digests.get(f"model/{name}", name): average for name, average in averages.items()}
    merged = {
        name: averages.get(name) or by_digest.get(digests.get(f"model/{name}", name), tensor)
        for name, tensor in tensors.items()
    }
    write_tensors(merged, target)


async def write_code(source: ModelSource, run_id: str, code: Code, folder: Path) -> None:
    """Unpack the code package of a run into ``code`` below a folder.

    Raises:
        ModelFolderError: it is not what was submitted.
    """
    package = folder / ".code.tar.gz"
    await source.write_code(run_id, code, package)
    await verify_hash(package, code.sha256, f"the code package of run {run_id}")
    try:
        await asyncio.to_thread(unpack_package, package, folder / CODE)
    except PackageError as error:
        raise ModelFolderError(str(error)) from error
    package.unlink()


def _describe(manifest: VerifiedManifest, spec: RunSpec, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``trainbus.load_model`` builds the model from, and where it comes from."""
    commit, ref = manifest.commit, manifest.commit.checkpoint
    return {
        "version": 1,
        "task": spec.task,
        "params": about.get("params", spec.params),
        "classes": about.get("classes", []),
        "statistics": about.get("statistics", {}),
        "target": getattr(spec.data, "label_field", None),
        "run_id": commit.run_id,
        "name": spec.name,
        "step": ref.step,
        "epoch": ref.epoch,
        "metrics": commit.metrics,
        "dataset_id": about.get("dataset_id"),
        "checkpoint": ref.uri,
        "manifest_sha256": manifest.sha256,
        "state_digest": commit.state_digest,
        "artifacts": {name: file.sha256 for name, file in artifacts_of(manifest.files).items()},
    }
