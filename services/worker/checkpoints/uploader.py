"""Uploads to the object store: checkpoints by content, artifacts by name."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import structlog

from contracts.events.checkpoint import CheckpointFile, Chunk, FileListing
from contracts.events.run import Artifact
from contracts.manifest import MAX_INLINE_BYTES, MAX_LISTING_BYTES, encode_listing
from contracts.ranks import CheckpointLine
from services.kit import chunks as kit
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectChanged, ObjectExists, ObjectNotFound
from services.kit.store.files import hash_file, is_inside
from services.kit.store.objects import ObjectInfo, ObjectStore, is_young
from services.kit.store.uris import blob_key, blob_sha256
from services.worker import metrics
from services.worker.cache.node_cache import NodeCache
from services.worker.core.checkpoint_chunks import (
    LENGTH_BYTES,
    SAMPLE_BYTES,
    ChunkRange,
    DeltaBases,
    chunk_ranges,
    header_length,
    is_worthwhile,
)

#: Blobs remembered, about 100 bytes each. The oldest of more are asked for again.
MAX_BLOBS = 200_000


class KnownBlobs:
    """Blobs with the time at which the store last wrote them.

    An upload may rely on a young blob: garbage collection spares blobs for longer. ``clear`` and ``distrust`` are
    called when the store turns out to lack blobs, or to have corrupted ones.
    """

    def __init__(self) -> None:
        self._written_at: OrderedDict[str, datetime] = OrderedDict()
        self._distrusted: set[str] = set()

    def has(self, sha256: str) -> bool:
        """Whether an upload may rely on the blob."""
        written_at = self._written_at.get(sha256)
        return written_at is not None and is_young(written_at)

    def is_distrusted(self, sha256: str) -> bool:
        """Whether the blob must be written again, even if the store has it."""
        return sha256 in self._distrusted

    def add(self, sha256: str, written_at: datetime) -> None:
        """Note that the store has a blob."""
        self._distrusted.discard(sha256)
        self._written_at[sha256] = written_at
        self._written_at.move_to_end(sha256)
        while len(self._written_at) > MAX_BLOBS:
            self._written_at.popitem(last=False)

    def distrust(self, blobs: Iterable[str]) -> None:
        """Note that the store has corrupted blobs."""
        for sha256 in blobs:
            self._written_at.pop(sha256, None)
            self._distrusted.add(sha256)

    def clear(self) -> None:
        """Know nothing of the store any more."""
        self._written_at.clear()


log = structlog.get_logger(__name__)

#: Chunks of all files that are read and not yet stored: bounds the memory (8 MiB each) and the requests at a time.
PARALLEL_CHUNKS = 4
#: Larger chunks are looked up before they are stored; for smaller ones the request costs more than the upload.
LOOKUP_MIN_BYTES = 64 * 2**10
#: How often a blob is looked at that others write or delete in the same moments.
MAX_LOOKS = 20
#: From this size two threads hash a chunk and the file; for a smaller one, changing threads costs more than hashing.
TWO_THREADS_BYTES = 2**20
#: ``model-3.safetensors`` -> ``model.safetensors``: which rank holds a tensor changes with the number of ranks.
RANK_SUFFIX = re.compile(r"-\d+(?=\.|$)")


class UploadError(ValueError):
    """A rank's files cannot be uploaded; the text says why."""


class CheckpointUploader:
    """Stores one checkpoint's files as chunks under their hashes. A chunk that the store has is not sent again."""

    def __init__(
        self, objects: ObjectStore, bucket: str, cache: NodeCache, known: KnownBlobs, bases: DeltaBases | None = None
    ) -> None:
        self._objects, self._bucket, self._cache, self._known = objects, bucket, cache, known
        self._bases = bases or DeltaBases()
        self._room = asyncio.Semaphore(PARALLEL_CHUNKS)
        #: By hash: chunks of equal content, such as moments that are still zero, are sent once.
        self._sending: dict[str, asyncio.Task[Chunk]] = {}
        self._failure: BaseException | None = None
        self.sent_bytes = 0

    async def upload(self, paths: dict[str, Path]) -> tuple[CheckpointFile, ...]:
        """Store the files by name, and add them to the node's cache.

        Raises:
            UploadError: a file changed while it was read.
        """
        work = [asyncio.ensure_future(self._upload_file(name, path)) for name, path in sorted(paths.items())]
        try:
            return tuple(await asyncio.gather(*work))
        finally:
            for each in (*work, *self._sending.values()):
                each.cancel()
            await asyncio.gather(*work, *self._sending.values(), return_exceptions=True)
            metrics.SENT_BYTES.inc(self.sent_bytes)

    async def upload_listing(self, files: Sequence[CheckpointFile]) -> FileListing | None:
        """Store the list of the files; return None if it is short enough to stand in a fact.

        Raises:
            UploadError: it is longer than any reader reads.
        """
        content = await asyncio.to_thread(encode_listing, files)
        return None if len(content) <= MAX_INLINE_BYTES else await self.store_listing(content, files)

    async def store_listing(self, content: bytes, files: Sequence[CheckpointFile]) -> FileListing:
        """Store a list of files; return where it is.

        Raises:
            UploadError: it is longer than any reader reads.
        """
        if len(content) > MAX_LISTING_BYTES:
            chunks = sum(len(file.chunks) for file in files)
            raise UploadError(
                f"the list of its {chunks:,} pieces has {len(content):,} bytes, more than the {MAX_LISTING_BYTES:,} "
                "that are read of one node: train on more nodes, or store a smaller state"
            )
        digest = await asyncio.to_thread(_sha256, content)
        if not self._known.has(digest):
            await self._store(content, digest)
        files_bytes = sum(file.size_bytes for file in files)
        return FileListing(uri=self._uri(digest), sha256=digest, size_bytes=len(content), files_bytes=files_bytes)

    async def renew(self, files: Iterable[CheckpointFile]) -> None:
        """Have the store hold young blobs of files that another node has uploaded.

        Raises:
            UploadError: it no longer has one.
        """
        for uri in dict.fromkeys(uri for file in files for uri in file.uris):
            if not self._known.has(blob_sha256(uri)):
                await self._renew_blob(uri)

    async def _renew_blob(self, uri: str) -> None:
        for _ in range(MAX_LOOKS):
            begun = datetime.now(UTC)
            with suppress(ObjectChanged):
                there = await self._find(uri)
                if there is None:
                    raise UploadError(f"the store has lost {uri}, which another node has uploaded")
                is_old = not is_young(there.modified_at)
                if is_old and not await self._objects.renew(there):
                    await self._replace(there, await self._objects.get(uri, etag=there.etag))
                self._known.add(blob_sha256(uri), begun if is_old else there.modified_at)
                return
        raise TransientError(f"{uri} changed each of the {MAX_LOOKS} times that it was looked at")

    async def _upload_file(self, name: str, path: Path) -> CheckpointFile:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            ranges = await asyncio.to_thread(file_ranges, file.fileno(), size_bytes)
            whole = hashlib.sha256()
            tasks = []
            for chunk_range in ranges:
                await self._room.acquire()
                try:
                    if self._failure is not None:
                        raise self._failure  # each of the others would wait for the store as long again
                    content, digest = await _read_chunk(file.fileno(), chunk_range, whole if len(ranges) > 1 else None)
                except BaseException:
                    self._room.release()
                    raise
                tasks.append(self._start_sending(content, digest, chunk_range, state_key(name, chunk_range)))
            # Shielded: another file may have the same chunk.
            chunks = await asyncio.gather(*(asyncio.shield(task) for task in tasks))
        sha256 = whole.hexdigest() if len(chunks) > 1 else chunks[0].sha256
        described = CheckpointFile(path=name, sha256=sha256, size_bytes=size_bytes, chunks=tuple(chunks))
        await asyncio.to_thread(self._cache.add_checkpoint_file, path, described)
        return described

    def _start_sending(self, content: bytes, digest: str, chunk_range: ChunkRange, key: str) -> asyncio.Task[Chunk]:
        task = self._sending.get(digest)
        if task is not None:
            self._room.release()
            return task
        task = self._sending[digest] = asyncio.ensure_future(self._send_chunk(content, digest, chunk_range, key))
        task.add_done_callback(self._on_sent)
        return task

    def _on_sent(self, task: asyncio.Task[Chunk]) -> None:
        self._room.release()
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    async def _send_chunk(self, content: bytes, digest: str, chunk_range: ChunkRange, key: str) -> Chunk:
        fast = await asyncio.to_thread(kit.blake3_hex, content)
        plain = Chunk(sha256=digest, size_bytes=len(content), blake3=fast, uri=self._uri(digest))
        if self._known.has(digest):
            return plain
        delta = await self._encode_delta(plain, content, chunk_range, key)
        if delta is not None:
            return delta
        await self._store(content, digest)
        return plain

    async def _store(self, content: bytes, digest: str) -> None:
        uri = self._uri(digest)
        for _ in range(MAX_LOOKS):
            # Before, not after: what counts is when the store wrote it at the earliest.
            begun = datetime.now(UTC)
            with suppress(ObjectChanged, ObjectExists, ObjectNotFound):
                self._known.add(digest, await self._ensure_stored(uri, content, digest) or begun)
                return
        raise TransientError(f"{uri} changed each of the {MAX_LOOKS} times that it was looked at")

    async def _ensure_stored(self, uri: str, content: bytes, digest: str) -> datetime | None:
        """Have the store hold a young blob. Return when it was written; None: just now.

        An old one, which garbage collection may be about to delete, gets another ETag: see ``ObjectStore.renew``.

        Raises:
            ObjectChanged, ObjectExists, ObjectNotFound: somebody else wrote or deleted it meanwhile.
        """
        is_distrusted = self._known.is_distrusted(digest)
        there = None
        if is_distrusted or len(content) >= LOOKUP_MIN_BYTES or not await self._send_if_absent(uri, content):
            there = await self._find(uri)
            if there is None:
                await self._send(uri, content, if_absent=True)
            elif there.size_bytes != len(content) or is_distrusted:
                await self._replace(there, content)
            elif is_young(there.modified_at):
                return there.modified_at
            elif not await self._objects.renew(there):
                await self._replace(there, content)
        return None

    async def _send_if_absent(self, uri: str, content: bytes) -> bool:
        """Send a small blob, which costs no more than looking for it. Return whether it was not there."""
        try:
            await self._send(uri, content, if_absent=True)
        except ObjectExists:
            return False
        return True

    async def _replace(self, there: ObjectInfo, content: bytes) -> None:
        """Send a blob over what is there. The same bytes have the same ETag: it is renewed besides."""
        await self._send(there.uri, content)
        sent = await self._objects.head(there.uri)
        if sent.etag == there.etag:
            await self._objects.renew(sent)

    async def _send(self, uri: str, content: bytes, *, if_absent: bool = False) -> None:
        await self._objects.put(uri, content, if_absent=if_absent)
        self.sent_bytes += len(content)

    async def _find(self, uri: str) -> ObjectInfo | None:
        try:
            return await self._objects.head(uri)
        except ObjectNotFound:
            return None

    # -- deltas -------------------------------------------------------------

    async def _encode_delta(self, plain: Chunk, content: bytes, chunk_range: ChunkRange, key: str) -> Chunk | None:
        """Store the chunk as a difference to the last committed one; return None if it is better stored whole."""
        base = self._bases.find(key, len(content), plain.sha256, max_depth=kit.MAX_CHAIN)
        if base is None:
            return None
        before = await asyncio.to_thread(kit.read_verified, self._cache.find(base.sha256), base.sha256)
        if before is None or not await self._can_rely_on(base):
            return None
        blob = await asyncio.to_thread(_encode_difference, content, before, chunk_range.width)
        if blob is None:
            return None
        sha256 = await asyncio.to_thread(_sha256, blob)
        if not self._known.has(sha256):
            await self._store(blob, sha256)
        stored = {"uri": self._uri(sha256), "encoding": "xor-zstd", "stored_bytes": len(blob), "base": base}
        return plain.model_copy(update=stored)

    async def _can_rely_on(self, base: Chunk) -> bool:
        """Whether all blobs of the base are in the store and young: garbage collection may delete older ones."""
        for uri in base.uris:
            digest = blob_sha256(uri)
            if self._known.is_distrusted(digest) or uri != self._uri(digest):
                return False
            if not self._known.has(digest):
                there = await self._find(uri)
                if there is None or not is_young(there.modified_at):
                    return False
                self._known.add(digest, there.modified_at)
        return True

    def _uri(self, sha256: str) -> str:
        return f"s3://{self._bucket}/{blob_key(sha256)}"


def collect_files(lines: Sequence[CheckpointLine], folder: Path) -> dict[str, Path]:
    """Return the files of all local ranks' folders of one step, by their names in the checkpoint.

    Raises:
        UploadError: a folder is not there or not the generation's own, or two ranks disagree on a file.
    """
    files: dict[str, Path] = {}
    for line in lines:
        source = Path(line.folder) if Path(line.folder).is_absolute() else folder / line.folder
        if not source.is_dir() or not is_inside(source, folder):
            raise UploadError(f"checkpoint folder {line.folder!r} is not a folder inside the generation's own")
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.is_symlink():
                name = path.relative_to(source).as_posix()
                known = files.setdefault(name, path)
                if known != path and hash_file(known) != hash_file(path):
                    raise UploadError(f"two ranks of this node wrote different files as {name!r}: name them by rank")
    return files


def find_bases(step: int, files: Sequence[CheckpointFile], cache: NodeCache) -> DeltaBases:
    """Return the chunks of a committed checkpoint that this node can store differences to."""
    chunks: dict[str, Chunk] = {}
    for file in files:
        path = cache.files.blob(file.sha256)
        try:
            with path.open("rb") as opened:
                ranges = file_ranges(opened.fileno(), os.fstat(opened.fileno()).st_size)
        except OSError:
            continue
        if [chunk_range.size_bytes for chunk_range in ranges] == [chunk.size_bytes for chunk in file.chunks]:
            chunks |= {
                state_key(file.path, chunk_range): chunk for chunk_range, chunk in zip(ranges, file.chunks, strict=True)
            }
    chunks.pop("", None)
    return DeltaBases(step, chunks)


def file_ranges(handle: int, size_bytes: int) -> tuple[ChunkRange, ...]:
    """Return the chunks of an open file."""
    length = header_length(os.pread(handle, LENGTH_BYTES + 1, 0), size_bytes)
    return chunk_ranges(size_bytes, os.pread(handle, length, 0))


def state_key(name: str, chunk_range: ChunkRange) -> str:
    """Return the name of a part of the state, whichever rank writes it; '' if it has none."""
    return f"{RANK_SUFFIX.sub('', name)}/{chunk_range.key}" if chunk_range.key else ""


async def _read_chunk(handle: int, chunk_range: ChunkRange, whole: hashlib._Hash | None) -> tuple[bytes, str]:
    """Read a chunk; return it with its hash, and update the file's hash."""
    content = await asyncio.to_thread(os.pread, handle, chunk_range.size_bytes, chunk_range.start)
    if len(content) != chunk_range.size_bytes:
        raise UploadError("a checkpoint's file was changed while it was read")
    if whole is not None and len(content) >= TWO_THREADS_BYTES:
        digest, _ = await asyncio.gather(asyncio.to_thread(_sha256, content), asyncio.to_thread(whole.update, content))
        return content, digest
    if whole is not None:
        whole.update(content)
    return content, await asyncio.to_thread(_sha256, content)


def _encode_difference(content: bytes, base: bytes, width: int) -> bytes | None:
    """Return the difference, if it is small enough and decodes to the content."""
    if len(content) > 2 * SAMPLE_BYTES:
        begin = len(content) // 2 // width * width
        sample = slice(begin, begin + SAMPLE_BYTES)
        if not is_worthwhile(len(kit.encode_difference(content[sample], base[sample], width)), SAMPLE_BYTES):
            return None
    blob = kit.encode_difference(content, base, width)
    return blob if is_worthwhile(len(blob), len(content)) and kit.decode_difference(blob, base) == content else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def upload_files(names: Sequence[str], folder: Path, objects: ObjectStore, base_uri: str) -> tuple[Artifact, ...]:
    """Upload files of the generation's folder. Names of other files are skipped."""
    artifacts = []
    for name in dict.fromkeys(names):
        path = folder / name
        if path.is_symlink() or not path.is_file() or not is_inside(path, folder):
            log.warning("artifact is not a file in the generation's folder", artifact=name)
            continue
        short = path.resolve().relative_to(folder.resolve()).as_posix()
        uri = f"{base_uri}/{short}"
        digest = await asyncio.to_thread(hash_file, path)
        await objects.upload(path, uri)
        artifacts.append(Artifact(name=short, uri=uri, sha256=digest, size_bytes=path.stat().st_size))
    return tuple(artifacts)
