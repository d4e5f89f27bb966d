"""The content of a few samples of a dataset, for a report: read by ranges, and bounded."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Sequence

import structlog

from contracts.datasets import Manifest, shard_uri
from contracts.events.dataset import ShardFile
from contracts.shard_index import ShardIndex, decode
from services.evaluation.core.report import SampleContent
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri

log = structlog.get_logger(__name__)

#: Indexes of shards that are searched for the samples, and the bytes of one.
MAX_SHARDS, MAX_INDEX_BYTES = 64, 16 * 2**20
#: Of one field of a sample that a report shows.
MAX_IMAGE_BYTES, MAX_TEXT_BYTES = 256 * 2**10, 2000
#: Time for all of them: a report without the samples is better than none.
PATIENCE_S = 20.0
#: What a browser shows; the first bytes decide, never a file's name.
IMAGES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


async def read_samples(
    objects: ObjectStore, manifest_uri: str, split: str, keys: Sequence[str]
) -> dict[str, SampleContent]:
    """Return the samples of these keys that are at hand; never an error."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _read_samples(objects, manifest_uri, split, keys)
    except (TransientError, ObjectNotFound, TimeoutError, ValueError) as error:
        log.warning("samples left out of the report", manifest=manifest_uri, error=repr(error))
        return {}


async def _read_samples(
    objects: ObjectStore, manifest_uri: str, split: str, keys: Iterable[str]
) -> dict[str, SampleContent]:
    manifest = Manifest.model_validate_json(await objects.get(manifest_uri))
    files = manifest.splits.get(split)
    missing, found = set(keys), dict[str, SampleContent]()
    bucket, _ = split_uri(manifest_uri)
    if manifest.token_bytes is not None:
        return {}  # windows of tokens are no text without their tokenizer
    for shard in files.shards[:MAX_SHARDS] if files else ():
        if not missing:
            break
        if shard.index_bytes > MAX_INDEX_BYTES:
            continue
        index = decode(await objects.get(shard_uri(bucket, shard.index_sha256)))
        for row in range(index.samples):
            if (key := index.key(row)) in missing:
                missing.discard(key)
                found[key] = await _read_sample(objects, bucket, shard, index, row)
    return found


async def _read_sample(
    objects: ObjectStore, bucket: str, shard: ShardFile, index: ShardIndex, row: int
) -> SampleContent:
    """Return the first field that can be shown: an image, else text."""
    texts: list[str] = []
    for name, (offset, size) in sorted(index.places(row).items()):
        content = bytearray()
        stop = offset + min(size, MAX_IMAGE_BYTES)
        await objects.reader.read(shard_uri(bucket, shard.sha256), content.extend, start=offset, stop=stop)
        mime = next((kind for magic, kind in IMAGES.items() if content.startswith(magic)), None)
        if mime is not None and size <= MAX_IMAGE_BYTES:
            return SampleContent(image=f"data:{mime};base64,{base64.b64encode(content).decode()}")
        if mime is None and (text := _to_text(bytes(content), size)) is not None:
            texts.append(text if len(index.fields) == 1 else f"{name}: {text}")
    return SampleContent(text="\n".join(texts)[:MAX_TEXT_BYTES])


def _to_text(content: bytes, size: int) -> str | None:
    """Return the start of a text, JSON in short; None for anything else."""
    cut = content[:MAX_TEXT_BYTES]
    try:
        text = cut.decode("utf-8", "strict" if len(cut) == size else "ignore")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    if len(cut) == size:
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except ValueError:
            pass
    return text
