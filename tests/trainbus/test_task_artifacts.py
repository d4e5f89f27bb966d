"""What a Task needs beside its weights: in each checkpoint, in the fetched folder, and refused if a byte is another."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, Chunk
from contracts.events.run import CheckpointRef
from contracts.ranks import CheckpointLine
from contracts.spec.run import Code, RunSpec
from contracts.spec.training import Training
from services.kit.model_folder import ModelFolderError, verify_manifest, write_model_folder
from tests.trainbus.support import LINEAR_TASK, journal, linear_dataset
from trainbus.model.saved_model import load_model_and_task
from trainbus.task import Task, TaskError
from trainbus.trainer.checkpoint import check_safe
from trainbus.trainer.checkpoint.task_artifacts import collect_artifacts, load_artifacts
from trainbus.trainer.start_point import StartPoint
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World

LABELLED_TASK = (
    LINEAR_TASK
    + """
    labels = ()

    def artifacts(self):
        return {"labels.txt": "ant\\nbee\\ncow", "tokenizer/merges.bin": bytes(range(256))}

    def load_artifacts(self, folder):
        self.labels = tuple((folder / "labels.txt").read_text().split())
        self.merges = (folder / "tokenizer" / "merges.bin").read_bytes()
"""
)


@pytest.fixture
def labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    code = tmp_path / "code"
    code.mkdir()
    (code / "labelled_task.py").write_text(LABELLED_TASK)
    monkeypatch.syspath_prepend(str(code))
    import importlib

    return importlib.import_module("labelled_task").Linear


@pytest.fixture
def checkpoint(tmp_path: Path, labelled: Any) -> Path:
    """The folder of a checkpoint that a Trainer wrote."""
    task, folder = labelled(), tmp_path / "g1"
    dataset = linear_dataset(tmp_path / "data")
    task.classes = dataset.classes
    training = Training(max_steps=1, global_batch=16)
    settings = TrainerSettings(folder, about={"run_id": "r", "params": {}})
    Trainer(task, TrainingData(task, dataset, training), training, settings, start=StartPoint(World())).fit()
    line = [line for line in journal(folder) if isinstance(line, CheckpointLine)][-1]
    return Path(line.folder)


def commit(folder: Path) -> tuple[CheckpointCommitted, bytes]:
    """The manifest of a checkpoint's folder, and the fact that commits it."""
    files = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256, size_bytes = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
        chunk = Chunk(sha256=sha256, size_bytes=size_bytes, uri=f"s3://models/blobs/sha256/{sha256[:2]}/{sha256}")
        name = path.relative_to(folder).as_posix()
        files.append(CheckpointFile(path=name, sha256=sha256, size_bytes=size_bytes, chunks=(chunk,)))
    manifest = json.dumps({"files": [file.model_dump(mode="json") for file in files]}).encode()
    ref = CheckpointRef(uri="s3://models/x/r/checkpoints/c.json", step=1, epoch=1, samples_consumed=16)
    fact = CheckpointCommitted(
        run_id="r",
        generation=1,
        checkpoint=ref,
        size_bytes=1,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )
    return fact, manifest


class LocalSource:
    """Files of a checkpoint in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def write_file(self, file: CheckpointFile, target: Path) -> None:
        shutil.copyfile(self.folder / file.path, target)

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        raise AssertionError


SPEC = RunSpec.model_validate({"name": "r", "task": "labelled_task:Linear", "code": None})


async def test_artifacts_go_from_the_task_through_a_checkpoint_to_the_loaded_model(
    checkpoint: Path, labelled: Any, tmp_path: Path
) -> None:
    check_safe(checkpoint)
    assert (checkpoint / "artifacts" / "labels.txt").read_text() == "ant\nbee\ncow"
    resumed = labelled()
    load_artifacts(resumed, checkpoint)
    assert (resumed.labels, resumed.merges) == (("ant", "bee", "cow"), bytes(range(256)))
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    await write_model_folder(LocalSource(checkpoint), verify_manifest(*commit(checkpoint)), SPEC, fetched)
    assert sorted(path.name for path in fetched.iterdir()) == ["artifacts", "model.json", "model.safetensors"]
    model, task = load_model_and_task(fetched)
    assert isinstance(model, nn.Module)
    assert vars(task)["labels"] == ("ant", "bee", "cow")


@pytest.mark.parametrize("name", ["labels.txt", "tokenizer/merges.bin"])
async def test_one_flipped_byte_is_refused_when_fetched_and_when_loaded(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    committed = verify_manifest(*commit(checkpoint))
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    await write_model_folder(LocalSource(checkpoint), committed, SPEC, fetched)

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)

    flip(fetched / "artifacts" / name)
    with pytest.raises(TaskError, match=f"artifacts/{name} in .* is not what was committed: its SHA-256 is"):
        load_model_and_task(fetched)
    (fetched / "artifacts" / name).unlink()
    with pytest.raises(TaskError, match=f"lacks its artifact '{name}': fetch the model again"):
        load_model_and_task(fetched)
    flip(checkpoint / "artifacts" / name)
    with pytest.raises(ModelFolderError, match=f"artifacts/{name}.* does not have the hash that was committed"):
        await write_model_folder(LocalSource(checkpoint), committed, SPEC, tmp_path)


class Given(Task):
    """A task with the artifacts of a test."""

    def __init__(self, given: Any) -> None:
        self.given, self.loaded = given, False

    def artifacts(self) -> Any:
        return self.given

    def load_artifacts(self, folder: Path) -> None:
        self.loaded = True


def test_artifacts_are_contents_files_or_folders(tmp_path: Path) -> None:
    (tmp_path / "tokenizer" / "deep").mkdir(parents=True)
    (tmp_path / "tokenizer" / "deep" / "a.json").write_text("{}")
    (tmp_path / "one.txt").write_text("1")
    given = {"text": "ä", "bytes": b"\0", "one.txt": tmp_path / "one.txt", "tokenizer": tmp_path / "tokenizer"}
    assert collect_artifacts(Given(given)) == {
        "text": "ä".encode(),
        "bytes": b"\0",
        "one.txt": b"1",
        "tokenizer/deep/a.json": b"{}",
    }
    assert collect_artifacts(Given({})) == {}


def test_a_task_without_artifacts_is_given_none(tmp_path: Path) -> None:
    task = Given({})
    load_artifacts(task, tmp_path)
    load_artifacts(task, tmp_path, {})
    (tmp_path / "artifacts").mkdir()
    # In a fetched folder these are the run's, as long as the model has none.
    load_artifacts(task, tmp_path, {})
    assert not task.loaded


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "must return a dict of names and contents, not list"),
    "a number": ({"a": 1}, r"\['a'\] must be bytes, a str or a Path, not int"),
    "no file": ({"a": Path("/no/such/file")}, r"\['a'\]: .*No such file"),
    "leads out": ({"../a": b""}, "'../a' is no name of a file"),
    "absolute": ({"/a": b""}, "'/a' is no name of a file"),
    "a space": ({"a b": b""}, "'a b' is no name of a file"),
    "hidden": ({".a": b""}, "'.a' is no name of a file"),
    "too long": ({"a" * 151: b""}, "is no name of a file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_artifact_is_refused_by_name(case: str) -> None:
    given, words = BAD[case]
    with pytest.raises(TaskError, match=rf"Given\.artifacts\(\).*{words}"):
        collect_artifacts(Given(given))
