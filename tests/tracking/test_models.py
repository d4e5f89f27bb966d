"""Promoted models in MLflow: loaded as a user loads them, from a process that has only MLflow's address."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from contracts.dvc import TrackedFile, hash_folder, pointer_content, pointers_prefix
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, Chunk
from contracts.events.model import ModelPromoted
from contracts.events.run import CheckpointRef, RunStarted
from contracts.spec.run import RunSpec
from services.checkpoint.core.commit import canonical_json
from services.kit.bus import Bus
from services.kit.kept_files import KeptLayout, list_files, pack_files
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store
from tests.tracking.conftest import Story, World, command_spec, copy_database, task_spec
from tests.tracking.test_server import START_S, MlflowServer

pytestmark = pytest.mark.shell

TASK = """
import json
import torch
from trainbus import Task

class Line(Task):
    def __init__(self, width=1): self.width = width
    def model(self): return torch.nn.Linear(self.width, len(self.classes))
    def decode(self, sample):
        row = json.loads(sample["json"])
        return torch.tensor([float(row[name]) for name in ("a", "b")]), int(sample["cls"])
    def loss(self, model, batch): return model(batch[0]).mean()
    def predict(self, model, batch): return model(batch[0]).argmax(1), batch[1]
"""
WEIGHTS = {"weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "bias": torch.zeros(2)}
LOAD = """
import json, sys
import mlflow, numpy, pandas
uri = "models:/m@champion"
model = mlflow.pytorch.load_model(uri)
function = mlflow.pyfunc.load_model(uri)
rows = pandas.DataFrame([{"a": 2, "b": 1}, {"a": 1, "b": 3}])
print(json.dumps({
    "weight": model.weight.tolist(),
    "training": model.training,
    "raw": function.predict(numpy.eye(2, dtype="float32")).tolist(),
    "rows": function.predict(rows).to_dict("list"),
    "requirements": open(mlflow.pyfunc.get_model_dependencies(uri)).read().splitlines(),
    "step": function.metadata.metadata["trainbus.step"],
}))
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class StoredModel:
    """The code and the checkpoint of a run, as the services leave them."""

    def __init__(self, world: World, objects: ObjectStore) -> None:
        self.world, self.objects, self.settings = world, objects, world.settings

    async def task_story(self, run_id: str = "r1", files: dict[str, str] | None = None, **fields: Any) -> Story:
        """Publish an accepted run of a Task."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in {"task.py": TASK, **(files or {})}.items():
                member = tarfile.TarInfo(name)
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
        content = packed.getvalue()
        uri = f"s3://{self.settings.bucket_code}/packages/{sha256(content)}.tar.gz"
        await self.objects.put(uri, content)
        code = {"uri": uri, "sha256": sha256(content)}
        spec = task_spec(task="task:Line", code=code, params={"width": 2}, model="m", **fields)
        return await self._accept(run_id, spec)

    async def script_story(self, run_id: str = "r1") -> Story:
        return await self._accept(run_id, command_spec(model="m"))

    async def _accept(self, run_id: str, spec: RunSpec) -> Story:
        story = self.world.story(run_id, spec)
        await story.accepted()
        await story.placed(1)
        environment = {"torch": torch.__version__, "python": "3.11"}
        await story.publish(RunStarted(run_id=run_id, generation=1, node_id="n1", environment=environment))
        return story

    async def commit_task(self, story: Story, step: int = 5) -> str:
        about = {"params": {"width": 2}, "classes": ["low", "high"], "statistics": {}, "dataset_id": "d"}
        state = json.dumps({"about": about}).encode()
        return await self.commit(story, {"model-0.safetensors": save(WEIGHTS), "state.json": state}, step)

    async def commit(self, story: Story, files: dict[str, bytes], step: int = 5) -> str:
        listed = []
        for path, content in files.items():
            name = sha256(content)
            uri = f"s3://{self.settings.bucket_models}/blobs/sha256/{name[:2]}/{name}"
            await self.objects.put(uri, content)
            chunk = Chunk(sha256=name, size_bytes=len(content), uri=uri)
            listed.append(CheckpointFile(path=path, sha256=name, size_bytes=len(content), chunks=(chunk,)))
        manifest = canonical_json({"files": [file.model_dump(mode="json") for file in listed]})
        uri = f"s3://{self.settings.bucket_models}/default/{story.run_id}/checkpoints/epoch_1/step_{step}.g1.json"
        await self.objects.put(uri, manifest)
        reference = CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=0)
        await story.publish(
            CheckpointCommitted(
                run_id=story.run_id,
                generation=1,
                checkpoint=reference,
                size_bytes=sum(map(len, files.values())),
                manifest_sha256=sha256(manifest),
            )
        )
        return uri

    async def promote(self, story: Story, uri: str, version: int = 1, **more: Any) -> None:
        fact = ModelPromoted(model="m", version=version, run_id=story.run_id, checkpoint_uri=uri, **more)
        await story.publish(fact)
        await self.world.settled()

    def champion(self) -> Any:
        return self.world.client.get_model_version_by_alias("m", "champion")


@pytest.fixture
def server(tmp_path: Path, template: Path) -> Iterator[MlflowServer]:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(template.read_bytes())
    with closing(sqlite3.connect(folder / "mlflow.db")) as database, database:
        # As a server makes it: the files go through the server.
        database.execute("UPDATE experiments SET artifact_location = 'mlflow-artifacts:/0'")
    started = MlflowServer(folder, free_ports(1)[0])
    started.spawn()
    started.wait_ready(START_S)
    yield started
    if started.process is not None:
        started.kill()


@pytest.fixture
def embedded_settings(s3_settings: Settings, template: Path) -> TrackingSettings:
    copy_database(template, s3_settings.data_dir)
    return TrackingSettings(**s3_settings.model_dump() | {"retry_first_s": 0.02, "retry_max_s": 0.1})


async def start(bus: Bus, settings: TrackingSettings, running: Any, objects: ObjectStore) -> StoredModel:
    store = Store(settings.tracking_uri, settings.artifact_location)
    await running(settings, store)
    return StoredModel(World(bus, settings, store), objects)


def load(tracking_uri: str, folder: Path, program: str = LOAD) -> Any:
    """Run a program of a user, who has MLflow's address and no credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINBUS", "AWS", "MLFLOW"))}
    environment = {**kept, "MLFLOW_TRACKING_URI": tracking_uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_loaded(found: dict[str, Any]) -> None:
    assert found["weight"] == [[1.0, 0.0], [0.0, 1.0]]
    assert found["training"] is False
    assert found["raw"] == [[1.0, 0.0], [0.0, 1.0]]
    assert found["rows"] == {"prediction": [0, 1], "class": ["low", "high"]}
    names = {line.partition("==")[0] for line in found["requirements"]}
    assert {"mlflow", "torch", "trainbus", "safetensors", "emoji"} <= names
    assert found["step"] == 5


async def test_a_promoted_task_loads_from_an_embedded_mlflow(
    bus: Bus,
    embedded_settings: TrackingSettings,
    objects: ObjectStore,
    running: Callable[..., Awaitable[Any]],
    tmp_path: Path,
) -> None:
    stored = await start(bus, embedded_settings, running, objects)
    story = await stored.task_story(files={"requirements.txt": "emoji==2.1\n# a comment\ntorch==1.0\n"})
    uri = await stored.commit_task(story)
    await stored.promote(story, uri)
    champion = stored.champion()
    assert champion.tags["trainbus.model_files"] == "logged"
    assert champion.tags["trainbus.checkpoint_uri"] == uri
    check_loaded(load(embedded_settings.tracking_uri, tmp_path))
    # Once: every fact that comes again, and a rollback to it, change nothing in the files.
    (model,) = stored.world.client.search_logged_models(["0"])
    assert (model.status, model.source_run_id) == ("READY", stored.world.pages()[0].info.run_id)
    await story.again()
    await stored.promote(story, uri, version=2, rollback=True)
    assert [each.model_id for each in stored.world.client.search_logged_models(["0"])] == [model.model_id]
    versions = stored.world.client.search_model_versions("name = 'm'")
    assert {int(each.version): each.source for each in versions} == dict.fromkeys((1, 2), champion.source)
    assert stored.champion().version == 2
    assert list((embedded_settings.data_dir / "tracking-models").iterdir()) == []


async def test_a_version_is_tagged_with_the_hash_that_dvc_gives_its_checkpoint(
    bus: Bus, embedded_settings: TrackingSettings, objects: ObjectStore, running: Callable[..., Awaitable[Any]]
) -> None:
    stored = await start(bus, embedded_settings, running, objects)
    story = await stored.task_story(checkpoints={"dvc": True})
    uri = await stored.commit_task(story)
    of_nodes = [TrackedFile(f"rank{number}/state.json", sha256(b"%d" % number)[:32], 3) for number in range(2)]
    for number, file in enumerate(of_nodes, 1):
        await objects.put(f"{pointers_prefix(uri)}n{number}.dvc", pointer_content([file]))
    await stored.promote(story, uri)
    assert stored.champion().tags["trainbus.dvc_md5"] == hash_folder(of_nodes)


@pytest.mark.e2e
async def test_a_promoted_task_loads_over_a_server_that_serves_artifacts(
    bus: Bus,
    s3_settings: Settings,
    server: MlflowServer,
    objects: ObjectStore,
    running: Callable[..., Awaitable[Any]],
    tmp_path: Path,
) -> None:
    settings = TrackingSettings(**s3_settings.model_dump() | {"mlflow_tracking_uri": server.url})
    stored = await start(bus, settings, running, objects)
    story = await stored.task_story(files={"requirements.txt": "emoji==2.1\n"})
    uri = await stored.commit_task(story)
    await stored.promote(story, uri)
    # Version 2 is in no log; version 3 brings the first one back, with its files.
    await stored.promote(story, uri, version=3, rollback=True)
    client = stored.world.client
    (model,) = client.search_logged_models(["0", *(each.experiment_id for each in client.search_experiments())])
    versions = client.search_model_versions("name = 'm'")
    assert {int(each.version): each.source for each in versions} == dict.fromkeys((1, 3), model.artifact_location)
    assert int(stored.champion().version) == 3
    check_loaded(load(server.url, tmp_path))


async def test_a_script_that_keeps_an_mlflow_model_has_it_in_the_registry(
    bus: Bus,
    embedded_settings: TrackingSettings,
    objects: ObjectStore,
    running: Callable[..., Awaitable[Any]],
    tmp_path: Path,
) -> None:
    import mlflow.sklearn
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    folder = str(tmp_path / "outputs" / "model")
    mlflow.sklearn.save_model(model, folder, pip_requirements=["scikit-learn"])
    pack_files(dict(list_files(tmp_path / "outputs")), KeptLayout(), tmp_path / "kept")
    stored = await start(bus, embedded_settings, running, objects)
    story = await stored.script_story()
    kept = {name: path.read_bytes() for name, path in list_files(tmp_path / "kept")}
    await stored.promote(story, await stored.commit(story, kept))
    program = """
import json, mlflow
print(json.dumps(mlflow.pyfunc.load_model("models:/m@champion").predict([[-1.0], [2.0]]).tolist()))
"""
    assert load(embedded_settings.tracking_uri, tmp_path, program) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "files", "reason"),
    [
        ({"model_max_bytes": 10}, None, "TRAINBUS_MODEL_MAX_BYTES (10)"),
        ({}, {"model.pkl": b"x"}, "the script kept no MLflow model"),
    ],
)
async def test_a_model_that_is_left_out_says_why(
    bus: Bus,
    embedded_settings: TrackingSettings,
    objects: ObjectStore,
    running: Callable[..., Awaitable[Any]],
    changes: dict[str, Any],
    files: dict[str, bytes] | None,
    reason: str,
) -> None:
    settings = embedded_settings.model_copy(update=changes)
    stored = await start(bus, settings, running, objects)
    story = await (stored.task_story() if files is None else stored.script_story())
    uri = await (stored.commit_task(story) if files is None else stored.commit(story, files))
    await stored.promote(story, uri)
    champion = stored.champion()
    assert champion.source == uri
    assert champion.tags["trainbus.model_files"].startswith("left out: ")
    assert reason in champion.tags["trainbus.model_files"]


async def test_a_file_that_is_not_what_was_committed_is_not_put_into_mlflow(
    bus: Bus, embedded_settings: TrackingSettings, objects: ObjectStore, running: Callable[..., Awaitable[Any]]
) -> None:
    stored = await start(bus, embedded_settings, running, objects)
    story = await stored.task_story()
    uri = await stored.commit_task(story)
    await objects.put(uri, (await objects.get(uri)).replace(b"state.json", b"state_json"))
    await stored.promote(story, uri)
    assert "not the manifest that was committed" in stored.champion().tags["trainbus.model_files"]
