"""What is verified beside the store: a client that knows no store asks the gateway, and traces a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from contracts.base import run_id_for
from contracts.datasets import dataset_uri, shard_uri
from contracts.envelope import MESSAGE_ID_HEADER, Envelope
from contracts.events.model import ModelPromoted
from contracts.events.run import RunPrepared, RunPromoted
from contracts.events.train import TrainRequested
from contracts.spec.run import Code, RunSpec
from services.kit.bus import Bus, TransientError
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.reader import ObjectReader
from services.kit.store.uris import split_uri
from tests.cli.test_datasets import Made, record
from tests.gateway.conftest import RUN, Running
from tests.gateway.test_files import StoredFiles, client, gateway, sha256, stored  # noqa: F401 - the fixtures
from tests.kit.support import until
from trainbus import AsyncClient, TrainbusError
from trainbus.client.errors import NotFoundError, StackUnreachableError
from trainbus.commands import checkpoints
from trainbus.commands.trace import trace


async def test_rotten_checkpoints_are_named(
    stored: StoredFiles,  # noqa: F811
    client: AsyncClient,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    await stored.accept()
    first = await stored.commit(10, {"a": b"one", "b": b"both"}, {"loss": 1.0})
    second = await stored.commit(20, {"a": b"two", "b": b"both"}, {"loss": 2.0})
    seen: list[tuple[int, int]] = []
    whole = await client.connection.await_result("/checkpoints/verify", lambda *each: seen.append(each))
    assert whole == {"checkpoints": 2, "rotten": {}, "runs": []}
    assert seen[-1] == (10, 10), "what two share is read once"
    blob = f"s3://{stored.settings.bucket_models}/blobs/sha256/{sha256(b'two')[:2]}/{sha256(b'two')}"
    await stored.objects.delete(blob)
    await checkpoints.verify(client, f"{RUN}@best", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"checkpoints": 1, "rotten": {}}
    with pytest.raises(TrainbusError, match="1 of 2 checkpoints are rotten"):
        await checkpoints.verify(client, RUN, as_json=True)
    assert json.loads(capsys.readouterr().out)["rotten"] == {second: [blob]}
    await stored.objects.delete(first)
    with pytest.raises(TrainbusError, match="2 of 2 checkpoints are rotten"):
        await checkpoints.verify(client, None, as_json=False)
    assert f"rotten: {first}\n  its manifest\n" in capsys.readouterr().out
    with pytest.raises(TrainbusError, match="no checkpoint of step 30; it has steps 10, 20"):
        await checkpoints.verify(client, f"{RUN}@30")


async def test_who_leaves_has_stopped_the_verification(
    stored: StoredFiles,  # noqa: F811
    gateway: Running,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def endless(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("stopped")

    monkeypatch.setattr("services.gateway.files.verify_checkpoints", endless)
    await stored.accept()
    async with gateway.client.stream("POST", f"/training-runs/{RUN}/checkpoints/verify") as answer:
        assert await anext(answer.aiter_lines()) == ": at work"
        assert ended == []
    await until(lambda: ended == ["stopped"], "the work ends with its reader")


async def test_a_model_is_traced_to_its_sources(
    stored: StoredFiles,  # noqa: F811
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lake, settings = f"s3://{stored.settings.bucket_lake}/digits", stored.settings
    for name in "abcd":
        await objects.put(f"{lake}/{name}", name.encode())
    etags = {name: (await objects.head(f"{lake}/{name}")).etag for name in "abcd"}
    records: Any = [{**record(name), "uri": f"{lake}/{name}", "etag": etag} for name, etag in etags.items()]
    made = Made(settings.bucket_datasets, records, source=lake)
    await made.store(objects)
    code = Code(uri=await stored.put(settings.bucket_code, "c.tar.gz", b"code"), sha256=sha256(b"code"))
    await stored.accept(RunSpec.model_validate({"name": "mine", "command": ["true"], "code": code.model_dump()}))
    manifest = dataset_uri(made.bucket, made.dataset_id)
    prepared = RunPrepared(run_id=RUN, dataset_id=made.dataset_id, manifest_uri=manifest, train_samples=4)
    uri = await stored.commit(10, {"model": b"weights"}, {"loss": 1.0})
    promotion = ModelPromoted(model="digits", version=1, run_id=RUN, checkpoint_uri=uri)
    for fact in (made.ingested("i1"), made.sharded("i1"), prepared, promotion):
        await stored.bus.publish(fact)

    async def verified() -> dict[str, bool | None]:
        assert await trace(client, "digits", as_json=True) in (0, 1)
        found = json.loads(capsys.readouterr().out)
        return {link["name"]: link["verified"] for link in found["links"]}

    # This run was published without a request.
    whole = await verified()
    assert whole == {
        "version": None,
        "checkpoint": True,
        "weights": True,
        "run": None,
        "request": False,
        "code": True,
        "dataset": True,
        "sources": True,
    }
    shard = made.manifest.splits["train"].shards[0]
    await objects.put(f"{lake}/b", b"other")
    await objects.put(shard_uri(made.bucket, shard.sha256), b"rotten")
    await objects.put(code.uri, b"other")
    await objects.delete(f"s3://{settings.bucket_models}/blobs/sha256/{sha256(b'weights')[:2]}/{sha256(b'weights')}")
    assert await verified() == whole | dict.fromkeys(("weights", "code", "dataset", "sources"), False)
    await objects.delete(uri)
    await objects.delete(code.uri)
    await objects.delete(manifest)
    bad = dict.fromkeys(("checkpoint", "code", "dataset", "sources"), False)
    del whole["weights"]
    assert await verified() == whole | bad


class AnsweringServer(ThreadingHTTPServer):
    """A serving server that says of itself what a test says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AnsweringHandler)
        #: Path -> headers of the answer.
        self.answers: dict[str, dict[str, str]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class AnsweringHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, AnsweringServer)
        headers = self.server.answers.get(self.path)
        self.send_response(404 if headers is None else 200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def serving() -> Iterator[AnsweringServer]:
    with AnsweringServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class TracedModel:
    """A promoted version with every link of its chain, which a test changes one byte of."""

    SOURCE, REQUEST_ID = "test", "e1"

    def __init__(self, bus: Bus, objects: ObjectStore, settings: Settings) -> None:
        self.bus, self.objects, self.settings = bus, objects, settings
        self.run_id = run_id_for(self.SOURCE, self.REQUEST_ID)
        #: Link -> the objects that it consists of.
        self.objects_of: dict[str, str] = {}

    async def publish(self) -> dict[str, str]:
        """Publish and store everything; return what a server says that has loaded the weights."""
        files, objects = StoredFiles(self.bus, self.objects, self.settings, self.run_id), self.objects
        lake = f"s3://{self.settings.bucket_lake}/digits"
        for name in "ab":
            await objects.put(f"{lake}/{name}", name.encode())
        records: Any = [
            {**record(name), "uri": f"{lake}/{name}", "etag": (await objects.head(f"{lake}/{name}")).etag}
            for name in "ab"
        ]
        made = Made(self.settings.bucket_datasets, records, source=lake)
        await made.store(objects)
        code = Code(uri=await files.put(self.settings.bucket_code, "c.tar.gz", b"code"), sha256=sha256(b"code"))
        request = TrainRequested.model_validate({"name": "mine", "command": ["true"], "code": code.model_dump()})
        envelope = Envelope(self.REQUEST_ID, self.SOURCE, request.type, datetime(2026, 1, 1, tzinfo=UTC))
        await self.bus.publish_event(request, request.subject, envelope)
        await files.accept(request.run_spec)
        contents = {"model-0.safetensors": b"weights", "artifacts/labels.json": b"labels"}
        uri = await files.commit(10, contents, {"loss": 1.0})
        manifest = dataset_uri(made.bucket, made.dataset_id)
        prepared = RunPrepared(run_id=self.run_id, dataset_id=made.dataset_id, manifest_uri=manifest, train_samples=2)
        promotion = ModelPromoted(model="digits", version=1, run_id=self.run_id, checkpoint_uri=uri)
        for fact in (made.ingested("i1"), made.sharded("i1"), prepared, promotion):
            await self.bus.publish(fact)
        blobs = f"s3://{self.settings.bucket_models}/blobs/sha256"
        self.objects_of = {
            "manifest": uri,
            "weights blob": f"{blobs}/{sha256(b'weights')[:2]}/{sha256(b'weights')}",
            "artifact": f"{blobs}/{sha256(b'labels')[:2]}/{sha256(b'labels')}",
            "code package": code.uri,
            "dataset manifest": manifest,
            "shard": shard_uri(made.bucket, made.manifest.splits["train"].shards[0].sha256),
            "source object": f"{lake}/b",
        }
        digest = sha256(await objects.get(uri))
        return {"Trainbus-Version": "1", "Trainbus-Run": self.run_id, "Trainbus-Digest": digest}

    async def replace_request(self, old: bytes, new: bytes) -> None:
        """Put another body in the place of the stored request's, as nobody can who only publishes."""
        jetstream = self.bus.js
        message = await jetstream.get_last_msg("REQUESTS", TrainRequested.subject_filter())
        assert message.seq is not None
        assert message.data is not None
        assert message.headers is not None
        await jetstream.delete_msg("REQUESTS", message.seq)
        headers = {name: value for name, value in message.headers.items() if name != MESSAGE_ID_HEADER}
        await jetstream.publish(TrainRequested.subject_filter(), message.data.replace(old, new), headers=headers)


#: What one byte is changed of -> the link that is named.
CHANGED_LINKS = {
    "manifest": "checkpoint",
    "weights blob": "weights",
    "artifact": "artifacts",
    "code package": "code",
    "dataset manifest": "dataset",
    "shard": "dataset",
    "source object": "sources",
}


async def test_one_changed_byte_at_any_link_is_named(
    bus: Bus,
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    s3_settings: Settings,
    serving: AnsweringServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = TracedModel(bus, objects, s3_settings)
    headers = await model.publish()
    serving.answers["/v2/models/digits"] = headers

    async def find_failed(target: str = "digits") -> set[str]:
        code = await trace(client, target, serving.url, as_json=True)
        links = json.loads(capsys.readouterr().out)["links"]
        failed = {link["name"] for link in links if link["verified"] is False}
        assert code == bool(failed)
        return failed

    assert await find_failed() == set()
    for what, link in CHANGED_LINKS.items():
        content = await objects.get(model.objects_of[what])
        bucket, key = split_uri(model.objects_of[what])
        # Around the store's own check: a blob's name is its hash.
        await objects._client.put_object(Bucket=bucket, Key=key, Body=content[:-1] + bytes([content[-1] ^ 1]))
        assert link in await find_failed(), what
        await objects.put(model.objects_of[what], content)
        assert await find_failed() == set(), what
    for name, value in headers.items():
        serving.answers["/v2/models/digits"] = headers | {name: value[:-1] + chr(ord(value[-1]) ^ 1)}
        assert await find_failed() == {"served"}, name
    # A version that answers nothing, and a server that says nothing of itself.
    assert await find_failed("digits@1") == {"served"}
    serving.answers["/v2/models/digits"] = {}
    assert await find_failed() == set()
    await model.replace_request(b'"mine"', b'"mind"')
    assert await find_failed() == {"request"}


async def test_a_run_is_traced_as_the_version_that_it_became(
    bus: Bus,
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    s3_settings: Settings,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = TracedModel(bus, objects, s3_settings)
    await model.publish()
    for target in (model.run_id, "mine"):
        with pytest.raises(NotFoundError, match=f"run {model.run_id} is no version of a model"):
            await trace(client, target)
    await bus.publish(RunPromoted(run_id=model.run_id, model="digits", version=1, reason="better"))
    for target in (model.run_id, "mine"):
        assert await trace(client, target) == 0
        assert "· version    digits version 1, promoted" in capsys.readouterr().out
    for target in ("other", "mine@1"):
        with pytest.raises(NotFoundError, match=r"there is no model '(other|mine)'; there are digits"):
            await trace(client, target)


async def test_an_object_that_the_store_finds_damaged_is_named(
    bus: Bus,
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    s3_settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SeaweedFS answers 500 to a read of rotten bytes, as if it were away."""
    model = TracedModel(bus, objects, s3_settings)
    await model.publish()
    damaged: list[str] = []
    read = ObjectReader.get

    async def read_unless_damaged(reader: ObjectReader, uri: str, **versions: Any) -> bytes:
        if uri in damaged:
            raise TransientError(f"object store: {uri}: status 500")
        return await read(reader, uri, **versions)

    monkeypatch.setattr(ObjectReader, "get", read_unless_damaged)
    for what in ("code package", "dataset manifest", "manifest"):
        damaged[:] = [model.objects_of[what]]
        assert await trace(client, "digits", as_json=True) == 1
        links = json.loads(capsys.readouterr().out)["links"]
        (text,) = (f"{each['what']} {each['detail']}" for each in links if each["name"] == CHANGED_LINKS[what])
        assert f"{damaged[0]} cannot be read: the store finds it damaged" in text
        assert text.count(damaged[0]) == 1, "named once"
    whole = await client.connection.await_result("/checkpoints/verify", lambda *_: None)
    assert whole["rotten"] == {damaged[0]: damaged}


async def test_damaged_files_are_named(
    bus: Bus,
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    s3_settings: Settings,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = TracedModel(bus, objects, s3_settings)
    await model.publish()
    for what in ("artifact", "weights blob"):
        await objects.delete(model.objects_of[what])
    assert await trace(client, "digits") == 1
    lines = capsys.readouterr().out.splitlines()
    repair = f"`trainbus checkpoints verify {model.run_id} --repair` looks for another copy"
    assert f"✗ artifacts  labels.json: missing or damaged: artifacts/labels.json; {repair}" in lines
    weights = next(line for line in lines if line.startswith("✗ weights"))
    assert weights.endswith(f": missing or damaged: model-0.safetensors; {repair}")


async def test_a_server_that_must_answer_and_does_not(
    bus: Bus,
    client: AsyncClient,  # noqa: F811
    objects: ObjectStore,
    s3_settings: Settings,
) -> None:
    await TracedModel(bus, objects, s3_settings).publish()
    with pytest.raises(StackUnreachableError, match=r"the serving server at http://127\.0\.0\.1:1 does not answer"):
        await trace(client, "digits", "http://127.0.0.1:1", as_json=True)
