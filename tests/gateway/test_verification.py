"""What is verified beside the store: a client that knows no store asks the gateway, and traces a model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contracts.datasets import dataset_uri, shard_uri
from contracts.events.model import ModelPromoted
from contracts.events.run import RunPrepared
from contracts.spec.run import Code, RunSpec
from services.kit.store.objects import ObjectStore
from tests.cli.test_datasets import Made, record
from tests.gateway.conftest import RUN, Running
from tests.gateway.test_files import StoredFiles, client, gateway, sha256, stored  # noqa: F401 - the fixtures
from tests.kit.support import until
from trainbus import AsyncClient, TrainbusError
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
