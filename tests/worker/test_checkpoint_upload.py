"""Checkpoints are chunked, uploaded once and restored."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from contracts.events.checkpoint import CheckpointFile, CheckpointRotten, CheckpointStaged
from contracts.events.run import RunExited
from services.kit.bus import Bus
from services.kit.chunks import restore_file
from services.kit.settings import Settings
from services.kit.store.errors import ObjectCorrupted
from services.kit.store.objects import ObjectStore, blob_sha256
from services.worker.cache.file_cache import FileCache
from services.worker.cache.node_cache import NodeCache
from services.worker.checkpoints.blob_repair import repair_blobs
from services.worker.checkpoints.dvc import pointer_key, write_pointer
from services.worker.checkpoints.uploader import CheckpointUploader, KnownBlobs, UploadError, file_ranges, find_bases
from services.worker.core import checkpoint_chunks as core
from services.worker.core.checkpoint_chunks import DeltaBases
from tests.contracts.test_dvc import DVC_3_67_1
from tests.worker.conftest import World

MIB = 2**20


def tensors(names: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """Random float32 tensors of the given sizes in bytes."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(size // 4, dtype=np.float32) for name, size in names.items()}


def pieces_of(path: Path) -> list[tuple[str, str, int]]:
    """(key, hash, bytes) of each piece."""
    content = path.read_bytes()
    with path.open("rb") as file:
        cut = file_ranges(file.fileno(), len(content))
    return [(p.key, hashlib.sha256(content[p.start : p.start + p.size_bytes]).hexdigest(), p.size_bytes) for p in cut]


@pytest.fixture
def cache(tmp_path: Path, objects: ObjectStore) -> NodeCache:
    return NodeCache(FileCache(tmp_path / "cache", objects), objects, 2**30)


# -- cutting -------------------------------------------------------------------


def test_file_is_chunked_at_its_tensors(tmp_path: Path) -> None:
    names = {"a.large": 12 * MIB, "b.bias": 1000, "c.bias": 2000, "d.weight": MIB}
    save_file(tensors(names), tmp_path / "x.safetensors")
    cut = [(key, size) for key, _, size in pieces_of(tmp_path / "x.safetensors")]
    assert cut[1:] == [
        ("a.large@0", 8 * MIB),
        ("a.large@8388608", 4 * MIB),
        ("b.bias..c.bias", 3000),
        ("d.weight@0", MIB),
    ]


def test_change_of_a_tensor_changes_only_its_chunks(tmp_path: Path) -> None:
    """One tensor's new values are one new piece; tensors that come or go leave the others' pieces as they are."""
    names = {f"layer.{n:04d}.weight": (n % 7 + 1) * 40_000 for n in range(300)}
    state = tensors(names)
    save_file(state, tmp_path / "before.safetensors")
    before = {digest for _, digest, _ in pieces_of(tmp_path / "before.safetensors")}

    state["layer.0005.weight"] = state["layer.0005.weight"] + 1
    save_file(state, tmp_path / "after.safetensors")
    new = [size for _, digest, size in pieces_of(tmp_path / "after.safetensors") if digest not in before]
    assert len(new) == 1

    for name in list(state)[100:110]:
        del state[name]
    save_file(state, tmp_path / "fewer.safetensors")
    fewer = pieces_of(tmp_path / "fewer.safetensors")
    new_bytes = sum(size for _, digest, size in fewer if digest not in before)
    # The header, the changed tensor's piece and what stood at the gap.
    assert new_bytes < 5 * MIB < sum(size for _, _, size in fewer) / 5


@given(st.binary(max_size=200), st.integers(0, 40 * MIB))
def test_invalid_header_is_chunked_without_gaps(header: bytes, size_bytes: int) -> None:
    """For every header the pieces fill the file in order and none is large."""
    head = len(header).to_bytes(8, "little") + header
    size_bytes = max(size_bytes, len(head))
    length = core.header_length(head[:9], size_bytes)
    cut = core.chunk_ranges(size_bytes, head[:length])
    at = 0
    for piece in cut:
        assert piece.start == at
        at += piece.size_bytes
    assert at == size_bytes
    assert max(piece.size_bytes for piece in cut) <= core.CHUNK_BYTES


@pytest.mark.parametrize(
    "described",
    [
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},  # a gap
        {"a": {"dtype": "F32", "data_offsets": [0, 4]}, "b": {"dtype": "F32", "data_offsets": [0, 4]}},  # an overlap
        {"a": {"dtype": "F32", "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "data_offsets": ["0", "4"]}},
        {"a": {"dtype": [], "data_offsets": [0, 4]}},
        {"a": [0, 4]},
        {"a": {"dtype": "F32", "data_offsets": [0, 2**70]}},
        [],
    ],
)
def test_inconsistent_header_is_ignored(described: Any) -> None:
    body = json.dumps(described).encode()
    header = len(body).to_bytes(8, "little") + body
    cut = core.chunk_ranges(len(header) + 4, header)
    assert [(piece.start, piece.size_bytes, piece.key) for piece in cut] == [(0, len(header) + 4, "")]


# -- there and back ------------------------------------------------------------


async def test_upload_sends_new_chunks_only_and_restores_all(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings
) -> None:
    bucket = s3_settings.bucket_models
    names = {f"block.{n:02d}.weight": 1_500_000 for n in range(20)} | {"head": 20 * MIB, "tail.bias": 400}
    state = tensors(names)
    state["zeros.a"] = state["zeros.b"] = np.zeros(MIB, np.float32)
    path = tmp_path / "model-0.safetensors"
    save_file(state, path)
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "empty").touch()
    named = {"model-0.safetensors": path, "state.json": tmp_path / "state.json", "empty": tmp_path / "empty"}
    known = KnownBlobs()

    first = CheckpointUploader(objects, bucket, cache, known)
    files = await first.upload(named)
    size_bytes = sum(file.size_bytes for file in files)
    # Equal pieces went once.
    assert size_bytes - 5 * MIB < first.sent_bytes <= size_bytes - 4 * MIB

    # Another rank, a new life of the agent: the store is queried, and only what is too small to query for is sent.
    again = CheckpointUploader(
        objects, bucket, NodeCache(FileCache(tmp_path / "other", objects), objects, 2**30), KnownBlobs()
    )
    assert await again.upload(named) == files
    assert again.sent_bytes < 70_000

    state["block.07.weight"] = state["block.07.weight"] * 2
    (tmp_path / "next").mkdir()
    save_file(state, tmp_path / "next" / "model-0.safetensors")
    second = CheckpointUploader(objects, bucket, cache, known)
    changed = await second.upload({"model-0.safetensors": tmp_path / "next" / "model-0.safetensors"})
    assert second.sent_bytes < 1_500_000 + 10_000

    # A node with nothing gets it all; one with the first checkpoint takes only what is new from the store.
    fetched: list[int] = []
    for local, expected in ((None, changed[0].size_bytes), (cache, 0)):
        target = tmp_path / "restored" / str(expected)
        await restore_file(objects, changed[0], target, local=local, on_bytes=fetched.append)
        assert hashlib.sha256(target.read_bytes()).hexdigest() == changed[0].sha256
    np.testing.assert_array_equal(load_file(target)["block.07.weight"], state["block.07.weight"])
    empty = next(file for file in files if file.path == "empty")
    await restore_file(objects, empty, tmp_path / "restored" / "empty")
    assert (tmp_path / "restored" / "empty").read_bytes() == b""


async def test_resume_reads_local_chunks_from_the_node(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces survive the agent, are found in whole files, and are fetched where the file is gone."""
    state = tensors({"a": MIB, "b": MIB, "c": MIB})
    path = tmp_path / "model-0.safetensors"
    save_file(state, path)
    (file,) = await CheckpointUploader(objects, s3_settings.bucket_models, cache, KnownBlobs()).upload(
        {"model-0.safetensors": path}
    )
    # The same tensors in another division: no file is the same, every tensor is.
    save_file({"b": state["b"], "c": state["c"]}, tmp_path / "half.safetensors")
    half_path = tmp_path / "half.safetensors"
    other = NodeCache(FileCache(tmp_path / "other", objects), objects, 2**30)
    (half,) = await CheckpointUploader(objects, s3_settings.bucket_models, other, KnownBlobs()).upload(
        {"half.safetensors": half_path}
    )
    uri = f"s3://{s3_settings.bucket_models}/manifest.json"
    manifest = {"step": 1, "epoch": 1, "samples_consumed": 8, "files": [half.model_dump(mode="json")]}
    await objects.put(uri, json.dumps(manifest).encode())

    requested: list[str] = []
    read_into = objects.read_into
    monkeypatch.setattr(objects, "read_into", lambda uri, *rest: requested.append(uri) or read_into(uri, *rest))
    reborn = NodeCache(FileCache(cache.files.folder, objects), objects, 2**30)
    async with reborn.pin_files() as pins:
        await reborn.checkpoint(uri, tmp_path / "resume", pins)
    assert (tmp_path / "resume" / "half.safetensors").read_bytes() == half_path.read_bytes()
    assert requested == [half.chunks[0].uri]  # its header; the tensors were here

    # What was evicted is no longer found, and fetched.
    empty = NodeCache(FileCache(cache.files.folder, objects), objects, 0)
    empty.evict()
    assert all(empty.find(chunk.sha256) is None for chunk in (*file.chunks, *half.chunks))
    async with empty.pin_files() as pins:
        await empty.checkpoint(uri, tmp_path / "again", pins)
        assert (tmp_path / "again" / "half.safetensors").read_bytes() == half_path.read_bytes()
    assert len(requested) == 1 + len(half.chunks)


async def test_files_from_before_a_boot_are_hashed_first(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings
) -> None:
    """Nothing is flushed for the cache: a power cut may leave the right name with the wrong bytes."""
    path = tmp_path / "model-0.safetensors"
    save_file(tensors({"a": MIB, "b": MIB}), path)
    content = path.read_bytes()
    (file,) = await CheckpointUploader(objects, s3_settings.bucket_models, cache, KnownBlobs()).upload(
        {path.name: path}
    )
    uri = f"s3://{s3_settings.bucket_models}/manifest.json"
    manifest = {"step": 1, "epoch": 1, "samples_consumed": 8, "files": [file.model_dump(mode="json")]}
    await objects.put(uri, json.dumps(manifest).encode())
    kept = cache.files.blob(file.sha256)

    for damage in (b"", bytes(100)):
        kept.write_bytes(damage + content[len(damage) :])
        os.utime(kept, (1, 1))
        inode = kept.stat().st_ino
        assert cache.find(file.chunks[1].sha256) is None
        async with cache.pin_files() as pins:
            await cache.checkpoint(uri, tmp_path / f"resume-{len(damage)}", pins)
        assert (tmp_path / f"resume-{len(damage)}" / path.name).read_bytes() == content
        assert (kept.stat().st_ino == inode) is (damage == b"")
        assert cache.find(file.chunks[1].sha256) is not None


async def test_corruption_in_the_store_leaves_no_file(
    tmp_path: Path, objects: ObjectStore, s3_settings: Settings
) -> None:
    bucket = s3_settings.bucket_models
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(20 * MIB))
    cache = NodeCache(FileCache(tmp_path / "cache", objects), objects, 2**30)
    (file,) = await CheckpointUploader(objects, bucket, cache, KnownBlobs()).upload({"file": path})
    assert [chunk.size_bytes for chunk in file.chunks] == [8 * MIB, 8 * MIB, 4 * MIB]
    for harm in (b"x" * (4 * MIB), b"short"):
        # As a disk does it: under the blob's name, past the store's check.
        await objects._client.put_object(Bucket=bucket, Key=file.chunks[2].uri.split("/", 3)[3], Body=harm)
        with pytest.raises(ObjectCorrupted, match=r"expected"):
            await restore_file(objects, file, tmp_path / "out" / "file")
        assert list((tmp_path / "out").iterdir()) == []


# -- differences ---------------------------------------------------------------


async def test_deltas_restore_bit_exactly_and_chains_are_bounded(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings
) -> None:
    bucket, known = s3_settings.bucket_models, KnownBlobs()
    generator = np.random.default_rng(3)
    state = tensors({"layer.weight": 2 * MIB, "noise": MIB})
    versions: list[tuple[CheckpointFile, bytes]] = []
    depths = []
    for step in range(7):
        # The rank that writes it changes, as after a resize.
        name = f"model-{step % 2}.safetensors"
        path = tmp_path / str(step) / name
        path.parent.mkdir()
        save_file(state, path)
        bases = find_bases(step - 1, [versions[-1][0]], cache) if versions else DeltaBases()
        uploader = CheckpointUploader(objects, bucket, cache, known, bases)
        (file,) = await uploader.upload({name: path})
        versions.append((file, path.read_bytes()))
        layer, noise = file.chunks[1], file.chunks[2]
        depths.append(sum(1 for _ in layer.uris) - 1)
        if layer.encoding == "xor-zstd":
            assert layer.stored_bytes is not None
            assert layer.stored_bytes < 0.8 * layer.size_bytes
            assert blob_sha256(layer.uri) != layer.sha256
        assert noise.encoding == "plain"  # not worth it
        state["layer.weight"] = state["layer.weight"] * np.float32(1 + 1e-6)
        state["noise"] = generator.standard_normal(MIB // 4, dtype=np.float32)
    assert depths == [0, 1, 2, 3, 4, 0, 1]
    for n, (file, content) in enumerate(versions):
        await restore_file(objects, file, tmp_path / "restored" / str(n))
        assert (tmp_path / "restored" / str(n)).read_bytes() == content
    # A changed link of the chain is found, also if it decodes.
    file = versions[4][0]
    base = file.chunks[1].base
    assert base is not None
    wrong = base.model_copy(update={"uri": versions[6][0].chunks[1].uri})
    broken = file.chunks[1].model_copy(update={"base": wrong})
    with pytest.raises(ObjectCorrupted):
        await restore_file(
            objects, file.model_copy(update={"chunks": (file.chunks[0], broken, file.chunks[2])}), tmp_path / "no"
        )


async def test_node_repairs_corrupted_blobs(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings, bus: Bus
) -> None:
    """Parts of files and differences alike; what this node has not, or has damaged, is left to others."""
    bucket, known = s3_settings.bucket_models, KnownBlobs()
    state = tensors({"a": MIB, "b": MIB, "c": MIB})
    save_file(state, tmp_path / "one.safetensors")
    (one,) = await CheckpointUploader(objects, bucket, cache, known).upload(
        {"m.safetensors": tmp_path / "one.safetensors"}
    )
    save_file(state | {"a": state["a"] * np.float32(1 + 1e-6)}, tmp_path / "two.safetensors")
    bases = find_bases(1, [one], cache)
    (two,) = await CheckpointUploader(objects, bucket, cache, known, bases).upload(
        {"m.safetensors": tmp_path / "two.safetensors"}
    )
    plain, difference = two.chunks[2], two.chunks[1]
    assert (plain.encoding, difference.encoding) == ("plain", "xor-zstd")
    elsewhere = f"s3://{bucket}/blobs/sha256/ab/{'ab' * 32}"
    manifest_uri = f"s3://{bucket}/e/r1/checkpoints/epoch_1/step_00000002.g1.json"
    await objects.put(manifest_uri, json.dumps({"files": [two.model_dump(mode="json")]}).encode())
    blobs = (plain.uri, difference.uri, elsewhere)
    for uri in blobs[:2]:
        await objects.delete(uri)
    rotten = CheckpointRotten(run_id="r1", uri=manifest_uri, step=2, blobs=blobs, found_at="2026-01-01T00:00:00Z")

    context: Any = type("Context", (), {})()
    context.cache, context.objects, context.bus, context.known = cache, objects, bus, known
    context.settings = type("Settings", (), {"node_id": "n1"})()
    assert await repair_blobs(context, rotten) == list(blobs[:2])
    repaired = await bus.read_history("run.r1.checkpoint_repaired")
    assert [each.event.blob for each in repaired] == list(blobs[:2])
    await restore_file(objects, two, tmp_path / "restored")
    assert (tmp_path / "restored").read_bytes() == (tmp_path / "two.safetensors").read_bytes()

    # This node's own copy is rotten too.
    await objects.delete(plain.uri)
    for file in (one, two):
        damaged = bytearray(cache.files.blob(file.sha256).read_bytes())
        damaged[-MIB - 100] ^= 1
        cache.files.blob(file.sha256).unlink()
        cache.files.blob(file.sha256).write_bytes(damaged)
    assert await repair_blobs(context, rotten) == [difference.uri]


# -- what is known -------------------------------------------------------------


async def test_distrusted_blobs_are_sent_again(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings
) -> None:
    bucket, known = s3_settings.bucket_models, KnownBlobs()
    path = tmp_path / "file"
    path.write_bytes(b"7" * MIB)
    (file,) = await CheckpointUploader(objects, bucket, cache, known).upload({"file": path})
    await objects.delete(file.chunks[0].uri)
    # The uploader trusts its record and does not check. The checkpoint service does, and its refusal arrives.
    blind = CheckpointUploader(objects, bucket, cache, known)
    await blind.upload({"file": path})
    assert blind.sent_bytes == 0
    known.clear()
    seeing = CheckpointUploader(objects, bucket, cache, known)
    await seeing.upload({"file": path})
    assert seeing.sent_bytes == MIB
    # There, and of the right size, but reported as rotten.
    known.distrust([file.sha256])
    for expected in (MIB, 0):
        uploader = CheckpointUploader(objects, bucket, cache, known)
        await uploader.upload({"file": path})
        assert uploader.sent_bytes == expected


async def test_cancelled_upload_cancels_its_requests(
    tmp_path: Path, cache: NodeCache, objects: ObjectStore, s3_settings: Settings
) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(2).randbytes(33 * MIB))
    begun = asyncio.Event()
    put = objects.put

    async def slow(*args: Any, **rest: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    objects.put = slow  # type: ignore[method-assign]
    uploader = CheckpointUploader(objects, s3_settings.bucket_models, cache, KnownBlobs())
    task = asyncio.create_task(uploader.upload({"file": path}))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(each.done() for each in uploader._sending.values())
    objects.put = put  # type: ignore[method-assign]
    assert cache.find(hashlib.sha256(path.read_bytes()).hexdigest()) is None


# -- DVC -----------------------------------------------------------------------


async def test_dvc_pointer_names_the_stored_files(tmp_path: Path, objects: ObjectStore, s3_settings: Settings) -> None:
    """The layout of DVC 3: the pointer's hashes are the files' names under the remote's ``files/md5``."""
    bucket = s3_settings.bucket_models
    named = {"model-0.safetensors": tmp_path / "a", "notes/it's.json": tmp_path / "b"}
    for name, path in named.items():
        path.write_text(name * 1000)
    key = pointer_key("digits", "r1", 2, 30, 1, "n1")
    uri = await write_pointer(objects, bucket, key, named)
    assert uri == f"s3://{bucket}/digits/r1/checkpoints/epoch_2/step_00000030.g1.n1.dvc"
    outs = yaml.safe_load(await objects.get(uri))["outs"]
    assert [out["path"] for out in outs] == sorted(named)
    for out in outs:
        content = await objects.get(f"s3://{bucket}/dvc/files/md5/{out['md5'][:2]}/{out['md5'][2:]}")
        assert content == named[out["path"]].read_bytes()
        assert (hashlib.md5(content).hexdigest(), len(content), "md5") == (out["md5"], out["size"], out["hash"])


async def test_the_hashes_and_names_are_those_of_dvc(
    tmp_path: Path, objects: ObjectStore, s3_settings: Settings
) -> None:
    paths = {name: tmp_path / str(number) for number, name in enumerate(DVC_3_67_1)}
    for name, (content, _) in DVC_3_67_1.items():
        paths[name].write_bytes(content)
    uri = await write_pointer(objects, s3_settings.bucket_models, "checkpoint.dvc", paths)
    outs = yaml.safe_load(await objects.get(uri))["outs"]
    assert {out["path"]: out["md5"] for out in outs} == {name: md5 for name, (_, md5) in DVC_3_67_1.items()}


async def test_agent_sends_deltas_and_writes_dvc_pointers(world: World, agent: Any) -> None:
    """What the request asks for reaches the store: differences to the last committed checkpoint, and DVC's names."""
    await agent()
    changes: dict[str, Any] = {"checkpoints": {"delta": True, "dvc": True}}
    await world.place(params={"steps": 10, "weights": 64 * 1024}, **changes)
    first: CheckpointStaged = await world.wait_for(CheckpointStaged)
    ref = await world.commit(first)
    await world.wait_for(RunExited)
    await world.place(generation=2, resume=ref, params={"steps": 20, "weights": 64 * 1024}, **changes)
    second: CheckpointStaged = await world.wait_for(CheckpointStaged, count=2)
    await world.commit(second)
    await world.wait_for(RunExited, count=2)
    before, after = (next(f for f in each.files if f.path == "model-0.safetensors") for each in (first, second))
    assert (before.chunks[1].encoding, after.chunks[1].encoding) == ("plain", "xor-zstd")
    assert after.chunks[1].base == before.chunks[1]
    for staged in (first, second):
        key = pointer_key("default", "r1", staged.epoch, staged.step, staged.generation, "n1")
        outs = yaml.safe_load(await world.objects.get(f"s3://{world.settings.bucket_models}/{key}"))["outs"]
        assert [out["path"] for out in outs] == ["model-0.safetensors", "state_0.json"]


async def test_blobs_of_another_node_are_renewed(
    tmp_path: Path, objects: ObjectStore, s3_settings: Settings, cache: NodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old blob, which garbage collection may be about to delete, is another one then; with the same content."""
    paths = {name: tmp_path / name for name in ("small", "large")}
    for name, path in paths.items():
        path.write_bytes(os.urandom(100 if name == "small" else 9 * MIB))
    files = await CheckpointUploader(objects, s3_settings.bucket_models, cache, KnownBlobs()).upload(paths)
    uris = [uri for file in files for uri in file.uris]
    before = {uri: await objects.head(uri) for uri in uris}

    other = CheckpointUploader(objects, s3_settings.bucket_models, cache, KnownBlobs())
    await other.renew(files)
    assert {uri: await objects.head(uri) for uri in uris} == before

    monkeypatch.setattr("services.kit.store.objects.REUSE_AGE_S", 0.0)
    for _ in range(2):  # every other renewal of a small object sends it again
        await other.renew(files)
        after = {uri: await objects.head(uri) for uri in uris}
        assert all(after[uri].etag != before[uri].etag for uri in uris)
        before = after
    for uri in uris:
        assert hashlib.sha256(await objects.get(uri)).hexdigest() == blob_sha256(uri)
    await objects.delete(uris[-1])
    with pytest.raises(UploadError, match="has lost"):
        await other.renew(files)
