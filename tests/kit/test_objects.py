"""The object store: conditional puts, verified downloads, an outage in the middle."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.kit.bus import TransientError
from services.kit.concurrency import cancel_and_wait
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store import objects as objects_module
from services.kit.store.errors import ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.reader import STALL_S
from services.kit.store.uris import blob_key
from tests.conftest import ACCESS_KEY, SECRET_KEY
from tests.kit.support import until
from trainbus.embedded.servers import S3Server


async def test_a_conditional_put_never_replaces(objects: ObjectStore, s3_settings: Settings) -> None:
    uri = f"s3://{s3_settings.bucket_models}/manifest.json"
    outcomes = await asyncio.gather(
        *(objects.put(uri, str(n).encode(), if_absent=True) for n in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, ObjectExists) for outcome in outcomes) == 7
    assert int(await objects.get(uri)) == outcomes.index(None)


async def test_blobs_are_named_by_their_content(objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x" * 100_000).hexdigest()
    uri = f"s3://{s3_settings.bucket_models}/{blob_key(digest)}"
    await objects.put(uri, b"x" * 100_000)
    assert (await objects.head(uri)).sha256 == digest
    assert await objects.download(uri, tmp_path / "copy", sha256=digest) == digest
    assert (tmp_path / "copy").read_bytes() == b"x" * 100_000


async def test_a_download_with_another_hash_leaves_nothing(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    uri = f"s3://{s3_settings.bucket_models}/thing"
    await objects.put(uri, b"not what was asked for")
    with pytest.raises(ValueError, match="expected"):
        await objects.download(uri, tmp_path / "copy", sha256="0" * 64)
    assert list(tmp_path.glob("*copy*")) == []


async def test_read_into_writes_at_an_offset(objects: ObjectStore, s3_settings: Settings, tmp_path: Path) -> None:
    uri, empty = f"s3://{s3_settings.bucket_models}/part", f"s3://{s3_settings.bucket_models}/empty"
    content = bytes(range(256)) * 10_000
    await objects.put(uri, content)
    await objects.put(empty, b"")
    path = tmp_path / "file"
    path.write_bytes(b"." * 3_000_000)
    assert await objects.read_into(uri, path, 100, len(content)) == hashlib.sha256(content).hexdigest()
    assert await objects.read_into(empty, path, 50, 0) == hashlib.sha256(b"").hexdigest()
    rest = b"." * (3_000_000 - 100 - len(content))
    assert path.read_bytes() == b"." * 100 + content + rest
    assert await objects.hash(uri) == hashlib.sha256(content).hexdigest()
    with pytest.raises(ValueError, match=r"has 2560000 bytes, expected 5$"):
        await objects.read_into(uri, path, 0, 5)
    with pytest.raises(ObjectNotFound):
        await objects.read_into(uri + "-missing", path, 0, 5)


async def test_a_full_disk_fails_at_once_and_names_the_file(objects: ObjectStore, s3_settings: Settings) -> None:
    uri = f"s3://{s3_settings.bucket_models}/thing"
    await objects.put(uri, b"something")
    with pytest.raises(TransientError, match="/dev/full cannot be written: No space left on device"):
        await objects.read_into(uri, Path("/dev/full"), 0, 9)


async def test_a_cancelled_read_leaves_the_reader_usable(
    objects: ObjectStore, s3_settings: Settings, tmp_path: Path
) -> None:
    uri = f"s3://{s3_settings.bucket_models}/large"
    await objects.put(uri, bytes(32 * 2**20))
    path = tmp_path / "file"
    path.touch()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Noticed:
        def __init__(self) -> None:
            self._digest = hashlib.sha256()
            self.hexdigest = self._digest.hexdigest

        def update(self, content: bytes) -> None:
            loop.call_soon_threadsafe(began.set)
            self._digest.update(content)

    reading = asyncio.ensure_future(objects.read_into(uri, path, 0, 32 * 2**20, Noticed))
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await objects.hash(uri) == hashlib.sha256(bytes(32 * 2**20)).hexdigest()


@asynccontextmanager
async def unreliable_store(
    settings: Settings, answers: list[bytes | None], patience_s: float
) -> AsyncIterator[tuple[ObjectStore, asyncio.Event]]:
    """(a client, what is set by each request) of a store that closes every connection behind its answer.

    It gives these, one after the other; None is silence.
    """
    asked, serving = asyncio.Event(), set[asyncio.Future[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        content = answers.pop(0)
        asked.set()
        if content is None:
            await asyncio.Event().wait()
        else:
            writer.write(content)
        writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.ensure_future(answer(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with ObjectStore(settings.model_copy(update={"s3_endpoint": endpoint}), patience_s=patience_s) as objects:
            yield objects, asked
    finally:
        server.close()
        await cancel_and_wait(*serving)


def _answer(content: bytes, announced: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (announced or len(content), content)


async def test_closed_idle_connections_are_replaced_without_a_retry(s3_settings: Settings) -> None:
    """The store may close idle connections at any time."""
    answers: list[bytes | None] = [_answer(b"%d" % n) for n in range(3)]
    async with unreliable_store(s3_settings, answers, patience_s=-1.0) as (objects, _):
        for n in range(3):
            assert await objects.hash("s3://models/thing") == hashlib.sha256(b"%d" % n).hexdigest()


async def test_a_truncated_answer_is_resumed(s3_settings: Settings, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "file").touch()
    answers: list[bytes | None] = [_answer(content[:1_500_000], len(content)), _answer(content)]
    async with unreliable_store(s3_settings, answers, patience_s=60.0) as (objects, _):
        digest = await objects.read_into("s3://models/thing", tmp_path / "file", 0, len(content))
    assert digest == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "file").read_bytes() == content


async def test_a_cancelled_read_does_not_wait_for_the_store(s3_settings: Settings, tmp_path: Path) -> None:
    """The store stays silent; neither the cancelled read nor closing the client waits for it."""
    (tmp_path / "file").touch()
    async with (
        unreliable_store(s3_settings, [None, None], patience_s=60.0) as (objects, asked),
        asyncio.timeout(STALL_S / 2),
    ):
        reading = asyncio.ensure_future(objects.read_into("s3://models/thing", tmp_path / "file", 0, 5))
        await asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        asked.clear()
        left = asyncio.ensure_future(objects.hash("s3://models/thing"))
        await asked.wait()
        left.cancel()


async def test_a_missing_object_raises_object_not_found(objects: ObjectStore, s3_settings: Settings) -> None:
    with pytest.raises(ObjectNotFound):
        await objects.get(f"s3://{s3_settings.bucket_models}/nothing")
    with pytest.raises(ObjectNotFound):
        await objects.head("s3://no-such-bucket/nothing")
    assert [info async for info in objects.list(f"s3://{s3_settings.bucket_models}/")] == []


async def test_listing_pages_through_everything_in_order(objects: ObjectStore, s3_settings: Settings) -> None:
    bucket = s3_settings.bucket_lake
    await asyncio.gather(*(objects.put(f"s3://{bucket}/k/{n:04}", b"") for n in range(1100)))
    keys = [info.key async for info in objects.list(f"s3://{bucket}/k/")]
    assert keys == [f"k/{n:04}" for n in range(1100)]


async def test_calls_wait_for_the_end_of_an_outage(tmp_path: Path, s3_settings: Settings) -> None:
    server = S3Server(tmp_path / "own", free_ports(1)[0], ACCESS_KEY, SECRET_KEY)
    server.start()
    settings = s3_settings.model_copy(update={"s3_endpoint": server.endpoint})
    try:
        async with ObjectStore(settings, patience_s=120) as store:
            await store.ensure_bucket("models")
            await store.put("s3://models/a", b"1")
            server.kill()
            putting = asyncio.create_task(store.put("s3://models/b", b"2"))
            await asyncio.to_thread(server.start)
            await putting
            assert (await store.get("s3://models/a"), await store.get("s3://models/b")) == (b"1", b"2")
            server.kill()
        async with ObjectStore(settings, patience_s=0.5) as store:
            with pytest.raises(TransientError, match="object store"):
                await store.get("s3://models/a")
    finally:
        server.stop()


async def test_a_store_that_hangs_is_noticed_and_so_is_its_return(
    objects: ObjectStore, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(objects_module, "PROBE_TIMEOUT_S", 0.3)
    watching = asyncio.create_task(objects.watch())
    assert s3_server.process is not None
    try:
        # It accepts connections and says nothing: no error ends a request.
        s3_server.process.send_signal(signal.SIGSTOP)
        await until(lambda: not objects.answers, "the silence to be noticed")
        assert REGISTRY.get_sample_value("trainbus_object_store_up") == 0
        s3_server.process.send_signal(signal.SIGCONT)
        await until(lambda: objects.answers, "its return to be noticed")
        assert REGISTRY.get_sample_value("trainbus_object_store_up") == 1
    finally:
        s3_server.process.send_signal(signal.SIGCONT)
        await cancel_and_wait(watching)
