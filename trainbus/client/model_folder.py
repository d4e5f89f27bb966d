"""A run's result as a folder of plain files: its model, its code, its artifacts, and how to load them.

Of a run of a Task ``model.safetensors`` has the weights of all ranks (the moving average where there is one, since that
was evaluated), ``model.json`` says what they are, and ``code`` has the project. Of a script it is what the script kept.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts import streams, subjects
from contracts.best_checkpoint import find_ranking_metric
from contracts.events.checkpoint import CheckpointFile
from contracts.events.run import Artifact, RunCompleted, RunExited
from contracts.spec.run import Code, RunSpec
from services.kit.model_folder import (
    ARTIFACTS,
    DESCRIPTION,
    WEIGHTS,
    ModelFolderError,
    VerifiedManifest,
    write_model_folder,
)
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import (
    BEST,
    LAST,
    CheckpointName,
    StoredCheckpoint,
    find_checkpoint,
    find_run_checkpoint,
    list_checkpoints,
    read_spec,
)
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, TrainbusError
from trainbus.client.run_files import (
    FileSource,
    check_is_empty,
    fetch_artifact,
    fetch_files,
    open_file_source,
    read_manifest,
)
from trainbus.client.run_list import find_run

#: How a file is loaded, by its suffix: the first of these that a folder has is taken for the model.
LOADERS: Mapping[str, tuple[str, str]] = {
    ".safetensors": ("from safetensors.torch import load_file", "load_file({path!r})"),
    ".pt": ("import torch", "torch.load({path!r}, map_location='cpu')"),
    ".pth": ("import torch", "torch.load({path!r}, map_location='cpu')"),
    ".ckpt": ("import torch", "torch.load({path!r}, map_location='cpu')"),
    ".joblib": ("import joblib", "joblib.load({path!r})"),
    ".onnx": ("import onnxruntime", "onnxruntime.InferenceSession({path!r})"),
    ".npz": ("import numpy", "numpy.load({path!r})"),
    ".npy": ("import numpy", "numpy.load({path!r})"),
    ".pkl": ("import pickle", "pickle.load(open({path!r}, 'rb'))"),
    ".pickle": ("import pickle", "pickle.load(open({path!r}, 'rb'))"),
    ".bin": ("import torch", "torch.load({path!r}, map_location='cpu')"),
    ".json": ("import json", "json.load(open({path!r}))"),
}


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """A run's result in a local folder; ``stored`` is None where it kept artifacts alone."""

    run_id: str
    folder: Path
    stored: StoredCheckpoint | None
    #: best or last; '' where the checkpoint was named otherwise.
    mark: str
    paths: tuple[Path, ...]
    #: Lines of Python that load it.
    lines: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of its files."""
        return sum(path.stat().st_size for path in self.paths)


async def fetch_model(
    connection: Connection, address: StackAddress, target: str, folder: Path | None = None
) -> FetchedModel:
    """Write a run's model and its artifacts into a new or empty folder, every hash verified.

    ``target`` names a checkpoint as ``find_checkpoint`` has it. RUN alone means its best one where its checkpoints have
    the metric of the request, else its last one. The folder is named for the run unless it is given.

    Raises:
        UsageError: the folder is not empty.
        NotFoundError: there is no such checkpoint, or the run has kept nothing.
        TrainbusError: a file is missing, or is not what was committed.
    """
    run_id, stored, mark = await _find_result(connection, target)
    spec = await read_spec(connection, run_id)
    end = await _read_end(connection, run_id)
    artifacts: tuple[Artifact, ...] = () if end is None else end.artifacts
    if stored is None and not artifacts:
        raise NotFoundError(_explain_nothing_kept(run_id, spec, end))
    folder = folder or _name_folder(spec, run_id, stored)
    check_is_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        part = Path(temporary) / "files"
        part.mkdir()
        async with open_file_source(address) as source:
            if stored is not None:
                await _write_checkpoint(source, stored, spec, part)
            inner = part / (ARTIFACTS if not (part / ARTIFACTS).exists() else f"run-{ARTIFACTS}")
            for artifact in artifacts:
                await fetch_artifact(source, run_id, artifact, inner)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    paths = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    return FetchedModel(run_id, folder, stored, mark, paths, loading_lines(folder, paths))


async def _find_result(connection: Connection, target: str) -> tuple[str, StoredCheckpoint | None, str]:
    """Return the run, its checkpoint and how that was chosen."""
    if "://" in target or target.startswith("models:/"):
        stored = await find_checkpoint(connection, target)
        return stored.commit.run_id, stored, ""
    name = CheckpointName.parse(target)
    run_id = await find_run(connection, name.run)
    mark = name.mark
    if not mark:
        known = await list_checkpoints(connection, run_id)
        if not known:
            return run_id, None, ""
        mark = BEST if find_ranking_metric(await read_spec(connection, run_id), known) else LAST
    stored = await find_run_checkpoint(connection, run_id, mark)
    return run_id, stored, mark if mark in (BEST, LAST) else ""


async def _read_end(connection: Connection, run_id: str) -> RunCompleted | RunExited | None:
    """Return a run's end: of the run as a whole where it completed, else its last exit; None before that."""
    for fact in (RunCompleted, RunExited):
        subject = subjects.fact("run", run_id, fact.fact)
        if (last := await connection.read_last(streams.FACTS, subject)) is not None:
            found: RunCompleted | RunExited = last.event
            return found
    return None


def _explain_nothing_kept(run_id: str, spec: RunSpec | None, end: RunCompleted | RunExited | None) -> str:
    text = f"run {run_id} has kept neither a checkpoint nor an artifact"
    if end is not None and end.notice:
        # The node saw what the script did; a general advice is perhaps what it follows already.
        return f"{text}: {end.notice}"
    if spec is not None and spec.command is not None:
        return (
            f"{text}: let the script write into the folder that TRAINBUS_OUTPUT_DIR names, or call "
            "trainbus.checkpoint(path) (docs/scripts.md)"
        )
    return f"{text} yet: `trainbus show {run_id}` has its state"


def _name_folder(spec: RunSpec | None, run_id: str, stored: StoredCheckpoint | None) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.name if spec else "").strip("-.") or run_id
    return Path(name if stored is None else f"{name}-step{stored.step}")


async def _write_checkpoint(source: FileSource, stored: StoredCheckpoint, spec: RunSpec | None, folder: Path) -> None:
    """Write the files of a checkpoint: of a Task its model alone, of a script all that it kept."""
    loaded = await read_manifest(source, stored)
    if spec is None or spec.task is None:
        await fetch_files(source, loaded, folder)
        return
    manifest = VerifiedManifest(stored.commit, loaded.manifest_sha256, loaded.files)
    try:
        await write_model_folder(_CheckpointSource(source, stored), manifest, spec, folder)
    except ModelFolderError as error:
        raise TrainbusError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _CheckpointSource:
    """The files of one checkpoint, from where files of runs are read."""

    source: FileSource
    stored: StoredCheckpoint

    async def write_file(self, file: CheckpointFile, target: Path) -> None:
        await self.source.write_file(self.stored, file, target)

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        await self.source.write_code(run_id, code, target)


def loading_lines(folder: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """Return lines of Python that load what is in a fetched folder."""
    if (folder / DESCRIPTION).is_file() and (folder / WEIGHTS).is_file():
        return ("import trainbus", f"model = trainbus.load_model({str(folder)!r})")
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return ("from transformers import AutoModel", f"model = AutoModel.from_pretrained({str(folder)!r})")
    for suffix, (imported, call) in LOADERS.items():
        found = [path for path in paths if path.suffix == suffix]
        if found:
            path = str(max(found, key=lambda each: each.stat().st_size))
            return (imported, f"model = {call.format(path=path)}")
    return ("from pathlib import Path", f"files = sorted(Path({str(folder)!r}).rglob('*'))")
