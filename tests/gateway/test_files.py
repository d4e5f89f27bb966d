"""The files of runs over HTTP: streamed, by range, verified; and a client that needs no credentials of the store."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, Chunk
from contracts.events.run import Artifact, CheckpointRef, RunAccepted, RunCompleted, RunEvaluated, RunExited, RunQueued
from contracts.spec.run import RunSpec
from services.checkpoint.core.commit import canonical_json
from services.gateway.files import parse_range
from services.gateway.settings import GatewaySettings
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.gateway.conftest import RUN, Running, placed, running
from tests.lives import supported
from trainbus import AsyncClient, TrainbusError, load_model
from trainbus.client.address import StackAddress
from trainbus.client.errors import NotFoundError, StackUnreachableError
from trainbus.client.evaluation_report import read_file, read_report
from trainbus.client.run_files import FileSource, open_file_source
from trainbus.task import TaskError

TASK = """
import torch
from trainbus import Task

class Line(Task):
    def __init__(self, width=1): self.width = width
    def model(self): return torch.nn.Linear(self.width, len(self.classes))
    def decode(self, sample): return sample
    def loss(self, model, batch): return model(batch).mean()
"""
#: Bytes of a chunk.
PIECE = 7
SCRIPT = RunSpec.model_validate({"name": "my script", "command": ["true"], "retention": {"metric": "loss"}})


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class StoredFiles:
    """The objects and facts of a run, as the services leave them."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings, run_id: str = RUN) -> None:
        self.bus, self.objects, self.settings, self.run_id = bus, objects, settings, run_id

    async def put(self, bucket: str, key: str, content: bytes) -> str:
        uri = f"s3://{bucket}/{key}"
        await self.objects.put(uri, content)
        return uri

    async def accept(self, spec: RunSpec = SCRIPT) -> None:
        await self.bus.publish(RunAccepted(run_id=self.run_id, spec=spec, request_id="e1", request_source="test"))
        await self.bus.publish(RunQueued(run_id=self.run_id, next_generation=1))
        await self.bus.publish(placed(1, "n1", run_id=self.run_id).model_copy(update={"spec": spec}))

    async def commit(self, step: int, files: dict[str, bytes], metrics: dict[str, float], generation: int = 1) -> str:
        """Store the files in pieces, commit them and return the manifest's address."""
        listed = []
        for path, content in files.items():
            chunks = []
            for start in range(0, len(content), PIECE):
                part = content[start : start + PIECE]
                name = sha256(part)
                uri = await self.put(self.settings.bucket_models, f"blobs/sha256/{name[:2]}/{name}", part)
                chunks.append(Chunk(sha256=name, size_bytes=len(part), uri=uri))
            listed.append(CheckpointFile(path=path, sha256=sha256(content), size_bytes=len(content), chunks=chunks))
        manifest = canonical_json({"files": [file.model_dump(mode="json") for file in listed]})
        key = f"default/{self.run_id}/checkpoints/epoch_1/step_{step:08d}.g{generation}.json"
        uri = await self.put(self.settings.bucket_models, key, manifest)
        fact = CheckpointCommitted(
            run_id=self.run_id,
            generation=generation,
            checkpoint=CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=0),
            size_bytes=sum(map(len, files.values())),
            metrics=metrics,
            manifest_sha256=sha256(manifest),
        )
        await self.bus.publish(fact)
        return uri

    async def put_artifacts(self, artifacts: dict[str, bytes], folder: str = "artifacts") -> tuple[Artifact, ...]:
        listed = []
        for name, content in artifacts.items():
            uri = await self.put(self.settings.bucket_models, f"{folder}/{name}", content)
            listed.append(Artifact(name=name, uri=uri, sha256=sha256(content), size_bytes=len(content)))
        return tuple(listed)

    async def complete(self, artifacts: dict[str, bytes]) -> None:
        end = RunCompleted(run_id=self.run_id, generation=1, artifacts=await self.put_artifacts(artifacts))
        for fact in supported(end):
            await self.bus.publish(fact)


@pytest.fixture
def stored(bus: Bus, objects: ObjectStore, s3_settings: Settings) -> StoredFiles:
    return StoredFiles(bus, objects, s3_settings)


@pytest.fixture
async def gateway(s3_settings: Settings) -> AsyncIterator[Running]:
    async with running(GatewaySettings(**{**s3_settings.model_dump(), "gateway_port": 0})) as up:
        yield up


@pytest.fixture
async def client(gateway: Running, settings: Settings) -> AsyncIterator[AsyncClient]:
    """A client that knows the bus and the gateway, and no store."""
    address = StackAddress(
        nats_url=settings.nats_url,
        gateway_url=str(gateway.client.base_url),
    )
    async with AsyncClient(address=address) as connected:
        yield connected


def test_a_range_has_bounds() -> None:
    cases = {"bytes=2-4": (2, 5), "bytes=2-": (2, 10), "bytes=-3": (7, 10), "bytes=2-99": (2, 10), "bytes=-99": (0, 10)}
    assert {text: parse_range(text, 10) for text in cases} == cases
    assert [parse_range(text, 10) for text in ("bytes=-", "lines=1-2", "bytes=0-1,3-4")] == [None] * 3


async def test_files_are_streamed_whole_and_by_range(gateway: Running, stored: StoredFiles) -> None:
    await stored.accept()
    content = bytes(range(100))
    await stored.commit(10, {"a/ckpt.pt": content, "empty": b""}, {"loss": 0.5})
    await stored.commit(20, {"ckpt.pt": b"later"}, {"loss": 0.7})
    await gateway.client.get("/training-runs/none")  # waits for all of the above
    best = await gateway.get(f"/training-runs/{RUN}/checkpoints/best/files")
    assert (best["checkpoint"]["step"], [each["path"] for each in best["files"]]) == (10, ["a/ckpt.pt", "empty"])
    url = best["files"][0]["url"]
    whole = await gateway.client.get(url)
    assert (whole.content, whole.headers["etag"]) == (content, f'"{sha256(content)}"')
    assert (await gateway.client.get(best["files"][1]["url"])).content == b""
    for start, stop in ((0, 1), (6, 8), (13, 100), (99, 100)):
        part = await gateway.client.get(url, headers={"Range": f"bytes={start}-{stop - 1}"})
        assert (part.status_code, part.content) == (206, content[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/100"
    assert (await gateway.client.get(url, headers={"Range": "bytes=100-"})).status_code == 416
    last = await gateway.get(f"/training-runs/{RUN}/checkpoints/last/files")
    assert last["checkpoint"]["step"] == 20
    for path, words in {"30/files": "it has steps 10, 20", "10/files/other": "it has a/ckpt.pt"}.items():
        missing = await gateway.client.get(f"/training-runs/{RUN}/checkpoints/{path}")
        assert (missing.status_code, words in missing.json()["detail"]) == (404, True)
    assert (await gateway.client.get(f"/training-runs/{RUN}/checkpoints/worst/files")).status_code == 422


async def test_what_is_damaged_is_not_sent(gateway: Running, stored: StoredFiles) -> None:
    await stored.accept()
    uri = await stored.commit(10, {"ckpt.pt": b"0123456"}, {})
    blob = sha256(b"0123456")
    key = f"s3://{stored.settings.bucket_models}/blobs/sha256/{blob[:2]}/{blob}"
    await stored.objects.delete(key)
    missing = await gateway.client.get(f"/training-runs/{RUN}/checkpoints/10/files/ckpt.pt")
    assert missing.status_code == 404
    await stored.objects.put(uri, b'{"files": []}')
    for route in ("manifest", "files"):
        other = await gateway.client.get(f"/training-runs/{RUN}/checkpoints/10/{route}")
        assert (other.status_code, "not the manifest that was committed" in other.json()["detail"]) == (502, True)


async def test_a_script_is_fetched_as_it_left_its_files(
    client: AsyncClient, stored: StoredFiles, tmp_path: Path
) -> None:
    await stored.accept()
    weights = io.BytesIO()
    torch.save({"w": torch.ones(3)}, weights)
    await stored.commit(10, {"out/ckpt.pt": weights.getvalue(), "log.txt": b"x"}, {"loss": 0.5})
    await stored.commit(20, {"out/ckpt.pt": b"worse"}, {"loss": 0.7})
    await stored.complete({"plot.png": b"png"})
    fetched = await client.fetch_model("my script", tmp_path / "got")
    assert (fetched.mark, fetched.stored.step if fetched.stored else None) == ("best", 10)
    relative = [str(path.relative_to(tmp_path / "got")) for path in fetched.paths]
    assert relative == ["artifacts/plot.png", "log.txt", "out/ckpt.pt"]
    scope: dict[str, Any] = {}
    exec("\n".join(fetched.lines), scope)  # noqa: S102
    assert torch.equal(scope["model"]["w"], torch.ones(3))
    with pytest.raises(TrainbusError, match="not an empty folder"):
        await client.fetch_model("my script", tmp_path / "got")


async def test_the_same_step_of_two_generations_is_two_checkpoints(
    client: AsyncClient, stored: StoredFiles, tmp_path: Path
) -> None:
    await stored.accept()
    first = await stored.commit(10, {"ckpt.pt": b"first"}, {})
    second = await stored.commit(10, {"ckpt.pt": b"second"}, {}, generation=2)
    for name, content in {first: b"first", second: b"second", f"{RUN}@10": b"second"}.items():
        folder = tmp_path / content.decode() / str(len(name))
        await client.fetch(name, folder)
        assert (folder / "ckpt.pt").read_bytes() == content


async def test_artifacts_are_there_once_the_ranks_have_ended(
    client: AsyncClient, stored: StoredFiles, tmp_path: Path
) -> None:
    """What the run staged is not committed yet, which may take as long as the store is behind."""
    await stored.accept()
    artifacts = await stored.put_artifacts({"plot.png": b"png"})
    exited = RunExited(run_id=RUN, generation=1, node_id="n1", outcome="succeeded", artifacts=artifacts)
    await stored.bus.publish(exited)
    await client.fetch_model(RUN, tmp_path / "got")
    assert (tmp_path / "got" / "artifacts" / "plot.png").read_bytes() == b"png"


async def test_the_report_of_an_evaluation_is_read_through_the_gateway(
    client: AsyncClient, gateway: Running, stored: StoredFiles
) -> None:
    await stored.accept()
    await stored.complete({"report.json": b"the run's own"})
    report = await stored.put_artifacts({"report.json": b'{"metric": "loss"}', "report.html": b"page"}, "evaluation")
    await stored.bus.publish(RunEvaluated(run_id=RUN, evaluation_run_id="e1", metrics={"loss": 0.5}, report=report))
    found = await read_report(client.connection, client.address, RUN)
    assert found.content == {"metric": "loss"}
    assert await read_file(client.address, RUN, found.files["report.html"]) == b"page"
    missing = await gateway.client.get(f"/training-runs/{RUN}/report/other")
    assert (missing.status_code, "it has report.json, report.html" in missing.json()["detail"]) == (404, True)
    await stored.objects.put(report[1].uri, b"PAGE")
    with pytest.raises(TrainbusError, match="not the report that was written"):
        await read_file(client.address, RUN, found.files["report.html"])
    await stored.objects.delete(report[1].uri)
    with pytest.raises(NotFoundError, match="is not in the object store"):
        await read_file(client.address, RUN, found.files["report.html"])


async def test_a_run_that_kept_nothing_says_what_to_do(client: AsyncClient, stored: StoredFiles) -> None:
    await stored.accept()
    with pytest.raises(NotFoundError, match="TRAINBUS_OUTPUT_DIR"):
        await client.fetch_model(RUN)


async def test_a_task_is_fetched_as_a_model_that_loads(
    client: AsyncClient, stored: StoredFiles, tmp_path: Path
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        entry = tarfile.TarInfo("line_task.py")
        entry.size = len(TASK)
        tar.addfile(entry, io.BytesIO(TASK.encode()))
    code = {"uri": await stored.put(stored.settings.bucket_code, "c.tar.gz", archive.getvalue())}
    code["sha256"] = sha256(archive.getvalue())
    fields = {"name": "line", "task": "line_task:Line", "params": {"width": 2}, "code": code, "training": {"epochs": 1}}
    await stored.accept(RunSpec.model_validate(fields))
    files = {
        "model-0.safetensors": save({"weight": torch.zeros(3, 2)}),
        "model-1.safetensors": save({"bias": torch.arange(3.0)}),
        "ema-0.safetensors": save({"weight": torch.full((3, 2), 0.5)}),
        "optimizer-0.safetensors": save({"weight": torch.ones(1)}),
        "state.json": json.dumps({"about": {"params": {"width": 2}, "classes": ["a", "b", "c"]}}).encode(),
    }
    await stored.commit(10, files, {})
    fetched = await client.fetch_model(f"{RUN}@last", tmp_path / "got")
    names = [str(path.relative_to(tmp_path / "got")) for path in fetched.paths]
    assert names == ["code/line_task.py", "model.json", "model.safetensors"]
    scope: dict[str, Any] = {}
    exec("\n".join(fetched.lines), scope)  # noqa: S102
    assert torch.equal(scope["model"].weight, torch.full((3, 2), 0.5))
    assert torch.equal(load_file(tmp_path / "got/model.safetensors")["bias"], torch.arange(3.0))
    with pytest.raises(TaskError, match="trainbus fetch"):
        load_model(tmp_path)


async def test_without_a_gateway_nothing_is_fetched() -> None:
    with pytest.raises(StackUnreachableError, match="set TRAINBUS_GATEWAY_URL"):
        async with open_file_source(StackAddress(nats_url="nats://n")):
            pass


async def test_a_broken_connection_goes_on_where_it_was(tmp_path: Path) -> None:
    content = bytes(range(200))
    asked: list[str | None] = []

    class Cut(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield content[:50]
            raise httpx.ReadError("cut")

    def answer(request: httpx.Request) -> httpx.Response:
        wanted = request.headers.get("Range")
        asked.append(wanted)
        if wanted is None:
            return httpx.Response(200, headers={"ETag": '"e"'}, stream=Cut())
        return httpx.Response(206, headers={"ETag": '"e"'}, content=content[50:])

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as http:
        artifact = Artifact(name="a b", uri="s3://models/y", sha256=sha256(content), size_bytes=200)
        await FileSource(http).write_artifact(RUN, artifact, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == content
    assert asked == [None, "bytes=50-"]


async def test_a_gateway_that_restarts_is_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()

    def answer(request: httpx.Request) -> httpx.Response:
        if time.monotonic() - began < 1.0:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=b"whole")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as http:
        artifact = Artifact(name="a", uri="s3://models/y", sha256=sha256(b"whole"), size_bytes=5)
        await FileSource(http).write_artifact(RUN, artifact, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"whole"
