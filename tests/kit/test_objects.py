"""The object store: conditional puts, verified downloads, an outage in the middle."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from services.kit.bus import Transient
from services.kit.objects import Exists, Missing, Objects
from services.kit.settings import Settings
from tests.conftest import ACCESS_KEY, SECRET_KEY
from trainbus.cli.embedded.servers import S3Server, free_ports


async def test_a_conditional_put_never_replaces(objects: Objects, s3_settings: Settings) -> None:
    uri = f"s3://{s3_settings.bucket_models}/manifest.json"
    outcomes = await asyncio.gather(
        *(objects.put(uri, str(n).encode(), if_absent=True) for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, Exists) for outcome in outcomes) == 7
    assert int(await objects.get(uri)) == outcomes.index(None)


async def test_blobs_are_named_by_their_content(objects: Objects, s3_settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    uri, digest = await objects.upload_blob(tmp_path / "a", s3_settings.bucket_models)
    assert digest == hashlib.sha256(b"x" * 100_000).hexdigest()
    assert digest in uri
    assert await objects.download(uri, tmp_path / "copy", sha256=digest) == digest
    assert (tmp_path / "copy").read_bytes() == b"x" * 100_000


async def test_a_download_with_another_hash_leaves_nothing(
    objects: Objects, s3_settings: Settings, tmp_path: Path
) -> None:
    uri = f"s3://{s3_settings.bucket_models}/thing"
    await objects.put(uri, b"not what was asked for")
    with pytest.raises(ValueError, match="expected"):
        await objects.download(uri, tmp_path / "copy", sha256="0" * 64)
    assert list(tmp_path.glob("*copy*")) == []


async def test_missing_is_told_apart(objects: Objects, s3_settings: Settings) -> None:
    with pytest.raises(Missing):
        await objects.get(f"s3://{s3_settings.bucket_models}/nothing")
    with pytest.raises(Missing):
        await objects.head("s3://no-such-bucket/nothing")
    assert [info async for info in objects.list(f"s3://{s3_settings.bucket_models}/")] == []


async def test_listing_pages_through_everything_in_order(objects: Objects, s3_settings: Settings) -> None:
    bucket = s3_settings.bucket_lake
    await asyncio.gather(*(objects.put(f"s3://{bucket}/k/{n:04}", b"") for n in range(1100)))
    keys = [info.key async for info in objects.list(f"s3://{bucket}/k/")]
    assert keys == [f"k/{n:04}" for n in range(1100)]


async def test_an_outage_is_waited_out(tmp_path: Path, s3_settings: Settings) -> None:
    server = S3Server(tmp_path / "own", free_ports(1)[0], ACCESS_KEY, SECRET_KEY)
    server.start()
    settings = s3_settings.model_copy(update={"s3_endpoint": server.endpoint})
    try:
        async with Objects(settings) as store:
            await store.ensure_bucket("models")
            await store.put("s3://models/a", b"1")
            server.kill()
            putting = asyncio.create_task(store.put("s3://models/b", b"2"))
            await asyncio.to_thread(server.start)
            await putting
            assert (await store.get("s3://models/a"), await store.get("s3://models/b")) == (b"1", b"2")
            server.kill()
        async with Objects(settings, patience_s=0.5) as store:
            with pytest.raises(Transient, match="object store"):
                await store.get("s3://models/a")
    finally:
        server.stop()
