"""A finished ingestion made up on the spot, and a store that is a folder: what sharding is measured with."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from contracts.datasets import SPLITS, canonical_json, ingestion_uri, pack_name
from contracts.events.dataset import DatasetIngested
from contracts.spec.data import DataSource
from services.kit.sample_order import group
from services.kit.store.errors import ObjectExists, ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectInfo, ObjectPage
from services.kit.store.uris import split_uri

BUCKET = "datasets"


class Record(NamedTuple):
    """One sound record of an ingestion."""

    key: str
    content: bytes
    split: str = "train"
    label: str | None = None
    ext: str = "png"
    #: Extension and size of its files, where it has several; they lie one after the other.
    fields: list[tuple[str, int]] | None = None


class FolderStore:
    """The part of ``ObjectStore`` that ingestion and sharding use, on a folder. Transfers are links, hence free."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, uri: str) -> Path:
        bucket, key = split_uri(uri)
        return self.root / bucket / key

    async def get(self, uri: str, **_: object) -> bytes:
        try:
            return self.path(uri).read_bytes()
        except FileNotFoundError as error:
            raise ObjectNotFound(uri) from error

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False, content_type: str = "") -> None:
        path = self.path(uri)
        if if_absent and path.exists():
            raise ObjectExists(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{random.getrandbits(32)}")
        partial.write_bytes(body)
        partial.replace(path)

    async def put_file(self, path: Path, uri: str, *, sha256: str, if_absent: bool = False) -> None:
        target = self.path(uri)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not if_absent:
            target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except FileExistsError as error:
            raise ObjectExists(uri) from error

    async def ensure_bucket(self, bucket: str) -> None:
        (self.root / bucket).mkdir(parents=True, exist_ok=True)

    async def upload(self, path: Path, uri: str) -> None:
        await self.put_file(path, uri, sha256="")

    async def head(self, uri: str) -> ObjectInfo:
        try:
            found = self.path(uri).stat()
        except FileNotFoundError as error:
            raise ObjectNotFound(uri) from error
        return ObjectInfo(*split_uri(uri), found.st_size, "", datetime.fromtimestamp(found.st_mtime, UTC))

    async def renew(self, there: ObjectInfo) -> bool:
        try:
            os.utime(self.path(there.uri))
        except FileNotFoundError as error:
            raise ObjectNotFound(there.uri) from error
        return True

    async def list(self, uri: str) -> AsyncIterator[ObjectInfo]:
        bucket, prefix = split_uri(uri)
        folder = (self.root / bucket / f"{prefix}x").parent
        keys = (path.relative_to(self.root / bucket).as_posix() for path in folder.rglob("*") if path.is_file())
        for key in sorted(key for key in keys if key.startswith(prefix)):
            yield await self.head(f"s3://{bucket}/{key}")

    async def list_pages(self, uri: str) -> AsyncIterator[ObjectPage]:
        yield ObjectPage(tuple([info async for info in self.list(uri)]))

    async def download(self, uri: str, path: Path, **_: object) -> str:
        try:
            shutil.copyfile(self.path(uri), path)
        except FileNotFoundError as error:
            raise ObjectNotFound(uri) from error
        return ""

    async def read_into(self, uri: str, path: Path, offset: int, size_bytes: int, hasher: Callable[[], Any]) -> str:
        path.unlink(missing_ok=True)
        os.link(self.path(uri), path)
        return ""

    async def delete(self, uri: str, *, if_match: str = "") -> None:
        self.path(uri).unlink(missing_ok=True)


def ingest(
    store: FolderStore,
    records: Iterable[Record],
    data: DataSource,
    *,
    groups: int = 1,
    pack_bytes: int = 64 * 2**20,
    fingerprint: str = "0" * 64,
) -> DatasetIngested:
    """Write packs and an index as ingestion does; records go into the packs in the order in which they come."""
    folder = store.path(ingestion_uri(BUCKET, fingerprint))
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, bytes] = {}
    open_packs: dict[int, tuple[int, int]] = {}
    counts, classes, packs = dict.fromkeys(SPLITS, 0), set(), 0
    for record in records:
        into = group(data.split.seed, record.key, groups)
        pack, offset = open_packs.get(into, (-1, pack_bytes))
        if offset >= pack_bytes:
            pack, offset, packs = packs, 0, packs + 1
        with (folder / pack_name(pack)).open("ab") as file:
            file.write(record.content)
        open_packs[into] = pack, offset + len(record.content)
        line = {
            "key": record.key,
            "split": record.split,
            "uri": f"s3://lake/{record.key}.{record.ext}",
            "etag": "0" * 32,
            "offset": None,
            "label": record.label,
            "ext": record.ext,
            "size": len(record.content),
            "sha256": hashlib.sha256(record.content).hexdigest(),
            "pack": pack,
            "pack_offset": offset,
            "fields": record.fields,
            "xxh3": xxhash.xxh3_128_hexdigest(record.content),
        }
        lines[record.key] = canonical_json(line) + b"\n"
        counts[record.split] += 1
        classes |= {record.label} - {None}
    with (folder / "index.jsonl").open("wb") as file:
        file.writelines(lines[key] for key in sorted(lines))
    return DatasetIngested(
        ingestion_id="i1",
        data=data,
        fingerprint=fingerprint,
        index_uri=ingestion_uri(BUCKET, fingerprint, "index.jsonl"),
        accepted=len(lines),
        split_counts=counts,
        classes=tuple(sorted(classes)),
    )


def digest(store: FolderStore) -> str:
    """One hash over everything in ``shards/`` and ``datasets/``, names and contents."""
    root = store.root / BUCKET
    files = sorted(p for part in ("shards", "datasets") for p in (root / part).rglob("*") if p.is_file())
    return hashlib.sha256("".join(f"{p.relative_to(root)} {hash_file(p)}\n" for p in files).encode()).hexdigest()
