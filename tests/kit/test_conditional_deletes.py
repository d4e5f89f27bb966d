"""Renewed objects, and deletes that spare them."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from structlog.testing import CapturingLogger

from services.kit.settings import Settings
from services.kit.store import objects as objects_module
from services.kit.store.conditional import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    count_parts,
    renewal_ranges,
    vouched_sha256,
)
from services.kit.store.errors import ObjectChanged, ObjectNotFound
from services.kit.store.objects import PROBE_KEY, ObjectStore
from services.kit.store.uris import blob_key, split_uri

GAUGE = "trainbus_object_store_conditional_deletes"


@given(st.integers(1, 20 * 2**30), st.integers(0, 6))
def test_renewal_makes_other_parts_that_the_store_accepts(size_bytes: int, before: int) -> None:
    ranges = renewal_ranges(size_bytes, f"{'0' * 32}-{before}" if before else "0" * 32)
    assert len(ranges) != before or not before
    if not ranges:
        assert before == 1
        assert size_bytes <= MIN_PART_BYTES
        return
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == size_bytes
    assert all(MIN_PART_BYTES <= end - begin <= MAX_PART_BYTES for begin, end in ranges[:-1])
    assert 0 < ranges[-1][1] - ranges[-1][0] <= MAX_PART_BYTES


@pytest.mark.parametrize(("etag", "parts"), [("0" * 32, 0), (f"{'0' * 32}-12", 12), ("", 0), ("odd-tag", 0)])
def test_parts_are_counted_by_the_etag(etag: str, parts: int) -> None:
    assert count_parts(etag) == parts


def test_store_vouches_for_a_blob_of_one_part_by_its_name() -> None:
    name = hashlib.sha256(b"content").hexdigest()
    plain = b64encode(bytes.fromhex(name)).decode()
    composite = b64encode(hashlib.sha256(bytes.fromhex(name)).digest()).decode()
    assert vouched_sha256(plain, "") == vouched_sha256(plain, name) == name
    assert vouched_sha256(f"{composite}-1", name) == name
    # Nothing is known of other bytes in one part, of several parts, and without a name or a checksum.
    assert vouched_sha256(f"{plain}-1", name) == ""
    assert vouched_sha256(f"{composite}-2", name) == ""
    assert vouched_sha256(f"{composite}-1", "") == ""
    assert vouched_sha256("", name) == ""


async def put_blob(objects: ObjectStore, settings: Settings, content: bytes) -> str:
    uri = f"s3://{settings.bucket_models}/{blob_key(hashlib.sha256(content).hexdigest())}"
    await objects.put(uri, content)
    return uri


@pytest.mark.parametrize("size_bytes", [1, 100_000, 9_000_000])
async def test_renewed_blob_has_another_etag_and_a_hash_that_the_store_vouches_for(
    objects: ObjectStore, s3_settings: Settings, size_bytes: int
) -> None:
    content = b"x" * size_bytes
    uri = await put_blob(objects, s3_settings, content)
    before = await objects.head(uri)
    assert await objects.renew(before)
    renewed = await objects.head(uri)
    assert renewed.etag != before.etag
    assert renewed.sha256 == before.sha256 == hashlib.sha256(content).hexdigest()
    with pytest.raises(ObjectChanged):
        await objects.delete(uri, if_match=before.etag)
    with pytest.raises(ObjectChanged):
        await objects.renew(before)
    assert await objects.get(uri) == content
    # Once more: in other parts, or the caller learns that it must be sent.
    again = await objects.renew(renewed)
    assert again == (size_bytes > MIN_PART_BYTES)
    assert again == ((await objects.head(uri)).etag != renewed.etag)
    assert await objects.get(uri) == content
    await objects.delete(uri, if_match=(await objects.head(uri)).etag)
    with pytest.raises(ObjectNotFound):
        await objects.renew(before)


async def test_renewal_leaves_no_upload_behind(objects: ObjectStore, s3_settings: Settings) -> None:
    uri = await put_blob(objects, s3_settings, b"content")
    there = await objects.head(uri)
    await objects.renew(there)
    with pytest.raises(ObjectChanged):
        await objects.renew(there)
    bucket, key = split_uri(uri)
    listed = await objects.call(lambda client: client.list_multipart_uploads(Bucket=bucket, Prefix=key), uri)
    assert listed.get("Uploads", []) == []


async def test_probe_finds_that_the_store_deletes_conditionally(objects: ObjectStore, s3_settings: Settings) -> None:
    await objects.probe_conditional_deletes(s3_settings.bucket_models)
    assert objects.deletes_conditionally
    assert REGISTRY.get_sample_value(GAUGE) == 1
    assert not await objects.exists(f"s3://{s3_settings.bucket_models}/{PROBE_KEY}")


async def test_store_that_ignores_the_condition_is_reported_once(
    objects: ObjectStore, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(objects_module, "log", log)
    ignore_conditions(objects, monkeypatch)
    for _ in range(2):
        await objects.probe_conditional_deletes(s3_settings.bucket_models)
    assert objects.deletes_conditionally is False
    assert REGISTRY.get_sample_value(GAUGE) == 0
    [call] = log.calls
    assert "ignores If-Match" in call.args[0]
    uri = await put_blob(objects, s3_settings, b"content")
    await objects.delete(uri, if_match="another")
    assert not await objects.exists(uri)


async def test_bucket_that_refuses_the_probe_is_sent_conditions_all_the_same(
    objects: ObjectStore, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(objects_module, "log", log)
    uri = await put_blob(objects, s3_settings, b"content")
    with monkeypatch.context() as patch:

        async def refuse(**_: Any) -> None:
            answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
            raise ClientError(answer, "PutObject")  # type: ignore[arg-type]

        patch.setattr(objects._client, "put_object", refuse)
        await objects.probe_conditional_deletes(s3_settings.bucket_models)
    assert [call.args[0] for call in log.calls] == ["cannot find out whether the object store deletes conditionally"]
    with pytest.raises(ObjectChanged):
        await objects.delete(uri, if_match="another")


def ignore_conditions(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store behave as MinIO does: a delete is carried out whatever its condition says."""
    delete_object = objects._client.delete_object

    async def delete(**arguments: Any) -> Any:
        arguments.pop("IfMatch", None)
        return await delete_object(**arguments)

    monkeypatch.setattr(objects._client, "delete_object", delete)
