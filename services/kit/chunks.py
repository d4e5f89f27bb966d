"""Checkpoint chunks: fetched, decoded, verified and joined to files. Differences are encoded here, too.

A difference (``xor-zstd``) is, in the blob's bytes: ``TBXZ``, one byte of version (1), one byte ``width``, and a zstd
frame of the XOR of the piece and its base, in byte planes: of items of ``width`` bytes first all the first bytes,
then all the second ones, and so on; what does not fill an item comes last as it is. Weights that hardly move keep
sign, exponent and leading digits, so that whole planes are almost zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from blake3 import blake3

from contracts.events.checkpoint import CheckpointFile, Chunk
from services.kit.concurrency import cancel_and_wait, run_in_thread
from services.kit.store.errors import ObjectCorrupted
from services.kit.store.files import FileSink, write_at
from services.kit.store.objects import ObjectStore

MAGIC = b"TBXZ\x01"
#: Differences one upon the other, at most; the next one is stored whole.
MAX_CHAIN = 4
#: Of a piece that is to be stored as a difference; decoding one holds it in memory.
MAX_DIFFERENCE_BYTES = 64 * 2**20
WIDTHS = (1, 2, 4, 8)
#: zstd's fastest ordinary level: higher ones gain about a percent of weights and cost several times as much.
LEVEL = 1
PARALLEL_FETCHES = 4
COPY_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a local file that are known to be a piece."""

    path: Path
    offset: int
    size_bytes: int

    def read(self) -> bytes:
        """Return the bytes; raise OSError if some are missing."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size_bytes)
        if len(content) != self.size_bytes:
            raise OSError(f"{self.path} is shorter than it was")
        return content


class LocalPieces(Protocol):
    """An index of the pieces on this machine."""

    def find(self, sha256: str) -> FileRange | None: ...


def count_differences(chunk: Chunk) -> int:
    """Return how many differences have to be decoded to get the piece."""
    return 0 if chunk.base is None else 1 + count_differences(chunk.base)


def encode_difference(piece: bytes, base: bytes, width: int) -> bytes:
    """Return the difference between two pieces of one size. ``decode_difference`` gives ``piece`` back."""
    import numpy as np
    import zstandard

    if len(piece) != len(base):
        raise ValueError(f"pieces of {len(piece)} and {len(base)} bytes have no difference")
    if width not in WIDTHS:
        raise ValueError(f"items of {width} bytes are not known")
    different = np.bitwise_xor(np.frombuffer(piece, np.uint8), np.frombuffer(base, np.uint8))
    whole = len(piece) // width * width
    planes = np.ascontiguousarray(different[:whole].reshape(-1, width).T).tobytes() + different[whole:].tobytes()
    return MAGIC + bytes([width]) + zstandard.ZstdCompressor(level=LEVEL).compress(planes)


def decode_difference(blob: bytes, base: bytes) -> bytes:
    """Return the piece that ``blob`` encodes as a difference to ``base``.

    Raises:
        ObjectCorrupted: the blob is no difference to a piece of this size.
    """
    import numpy as np
    import zstandard

    width = blob[len(MAGIC)] if len(blob) > len(MAGIC) else 0
    if not blob.startswith(MAGIC) or width not in WIDTHS:
        raise ObjectCorrupted("a difference does not begin as one")
    try:
        frame = blob[len(MAGIC) + 1 :]
        # Asked before it is unpacked: a blob must not be able to fill the memory.
        if zstandard.get_frame_parameters(frame).content_size != len(base):
            raise ObjectCorrupted(f"a difference is not one to a piece of {len(base)} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise ObjectCorrupted(f"a difference cannot be unpacked: {error}") from error
    whole = len(base) // width * width
    different = np.concatenate((planes[:whole].reshape(width, -1).T.reshape(-1), planes[whole:]))
    return np.bitwise_xor(different, np.frombuffer(base, np.uint8)).tobytes()


async def read_piece(objects: ObjectStore, chunk: Chunk, local: LocalPieces | None = None) -> bytes:
    """Return a piece's verified bytes; decode all of its differences.

    Raises:
        ObjectNotFound: a blob is not in the store.
        ObjectCorrupted: a blob or what it decodes to has another hash.
    """
    if local is not None:
        content = await asyncio.to_thread(read_verified, local.find(chunk.sha256), chunk.sha256)
        if content is not None:
            return content
    stored = await objects.get(chunk.uri)
    if chunk.encoding == "plain":
        piece = stored
    else:
        if chunk.base is None or count_differences(chunk) > MAX_CHAIN or chunk.size_bytes > MAX_DIFFERENCE_BYTES:
            raise ObjectCorrupted(f"{chunk.uri} is a difference without a base, or exceeds the limits of differences")
        if chunk.base.size_bytes != chunk.size_bytes:
            raise ObjectCorrupted(f"{chunk.uri} is a difference to a piece of another size")
        base = await read_piece(objects, chunk.base, local)
        piece = await asyncio.to_thread(decode_difference, stored, base)
    digest = await asyncio.to_thread(_sha256 if chunk.blake3 is None else blake3_hex, piece)
    if digest != (chunk.blake3 or chunk.sha256):
        raise ObjectCorrupted(f"{chunk.uri} gives a piece of hash {digest}, expected {chunk.blake3 or chunk.sha256}")
    return piece


async def restore_file(
    objects: ObjectStore,
    file: CheckpointFile,
    target: Path,
    *,
    local: LocalPieces | None = None,
    gate: asyncio.Semaphore | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Make ``target`` the file, whole or not at all; each fetched byte is hashed once and written once.

    What ``local`` has is copied within the file system. ``gate`` bounds how many pieces are fetched at a time, and
    ``on_bytes`` gets the size of every piece that is there.

    Raises:
        ObjectNotFound, ObjectCorrupted: see ``read_piece``; nothing is left at ``target``.
    """
    gate = gate or asyncio.Semaphore(PARALLEL_FETCHES)
    offsets = list(accumulate((chunk.size_bytes for chunk in file.chunks), initial=0))
    if offsets[-1] != file.size_bytes:
        raise ObjectCorrupted(f"the chunks of {file.path!r} do not add up to its {file.size_bytes} bytes")
    with _temporary_file(target, file.size_bytes) as partial:

        async def fill(chunk: Chunk, offset: int) -> None:
            async with gate:
                await place_piece(objects, chunk, partial, offset, local)
                on_bytes(chunk.size_bytes)

        work = [asyncio.ensure_future(fill(*each)) for each in zip(file.chunks, offsets[:-1], strict=True)]
        try:
            await asyncio.gather(*work)
        finally:
            await cancel_and_wait(*work)  # the file is moved or removed behind them


async def place_piece(
    objects: ObjectStore, chunk: Chunk, path: Path, offset: int, local: LocalPieces | None = None
) -> None:
    """Write a piece into an existing file from ``offset`` on: from this machine where it is here, else from the store.

    Raises:
        ObjectNotFound, ObjectCorrupted: see ``read_piece``; the file then has other bytes there.
        TransientError: the store is away, or the file cannot be written.
    """
    found = local.find(chunk.sha256) if local is not None else None
    if found is None or not await asyncio.to_thread(_copy_range, found, path, offset):
        await _fetch(objects, chunk, path, offset, local)


async def _fetch(objects: ObjectStore, chunk: Chunk, path: Path, offset: int, local: LocalPieces | None) -> None:
    if chunk.encoding == "plain":
        hasher = hashlib.sha256 if chunk.blake3 is None else blake3
        digest = await objects.read_into(chunk.uri, path, offset, chunk.size_bytes, hasher)
        if digest != (chunk.blake3 or chunk.sha256):
            raise ObjectCorrupted(f"{chunk.uri} has hash {digest}, expected {chunk.blake3 or chunk.sha256}")
        return
    piece = await read_piece(objects, chunk, local)
    with FileSink(path, offset) as sink:
        await run_in_thread(sink, memoryview(piece))


@contextmanager
def _temporary_file(target: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a temporary file of that size; it replaces ``target`` if the block succeeds.

    By its path, and never by an open handle: a thread goes on when its caller is cancelled, and must then find nothing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.truncate(size_bytes)
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _copy_range(source: FileRange, target: Path, offset: int) -> bool:
    """Copy a piece within the file system (shared, where it can); False if the source is not what it was."""
    try:
        with source.path.open("rb", buffering=0) as file, target.open("r+b", buffering=0) as output:
            begin, left = source.offset, source.size_bytes
            if os.fstat(file.fileno()).st_size < begin + left:
                return False
            while left:
                copied = _copy_some(file, output, begin, offset, left)
                if not copied:
                    return False
                begin, offset, left = begin + copied, offset + copied, left - copied
    except OSError:
        return False
    return True


def _copy_some(source: BinaryIO, target: BinaryIO, begin: int, offset: int, most: int) -> int:
    copy: Any = getattr(os, "copy_file_range", None)  # Linux only
    if copy is not None:
        try:
            copied: int = copy(source.fileno(), target.fileno(), most, begin, offset)
            return copied
        except OSError:
            pass  # between file systems, on kernels that cannot
    source.seek(begin)
    content = source.read(min(most, COPY_BYTES))
    write_at(target, content, offset)
    return len(content)


def read_verified(found: FileRange | None, sha256: str) -> bytes | None:
    """Return a local piece's bytes; None if it is missing or has changed."""
    if found is None:
        return None
    try:
        content = found.read()
    except OSError:
        return None
    return content if _sha256(content) == sha256 else None


def blake3_hex(content: bytes) -> str:
    return blake3(content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
