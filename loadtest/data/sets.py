"""Data to read: the same samples in our shards and in what others read."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts import shard_index
from contracts.events.dataset import ShardFile

SHARD_BYTES = 128 * 2**20
BLOCK = 512
_NO_HASH = "0" * 64


@dataclass(frozen=True, slots=True)
class Written:
    """A folder of shards, and what a manifest would say of them."""

    folder: Path
    shards: tuple[ShardFile, ...]
    samples: int
    size: int

    @property
    def paths(self) -> list[Path]:
        return [self.folder / shard.path for shard in self.shards]


def content(number: int, size: int) -> bytes:
    """What sample ``number`` holds: like no other, and quickly made."""
    return (number.to_bytes(8, "little") * (-(-size // 8)))[:size]


def write_tar(folder: Path, samples: int, size: int, *, piece_bytes: int) -> Written:
    """Write ustar shards of one field, ``piece_bytes`` at a time: how the system lays out its cache follows that."""
    folder.mkdir(parents=True, exist_ok=True)
    stride = BLOCK + size + -size % BLOCK
    per_shard = (SHARD_BYTES - 2 * BLOCK) // stride
    shards: list[ShardFile] = []
    for first in range(0, samples, per_shard):
        numbers = range(first, min(first + per_shard, samples))
        path = folder / f"shard-{len(shards):05d}.tar"
        write_pieces(path, _members(numbers, size), piece_bytes)
        offsets = [BLOCK + row * stride for row in range(len(numbers))]
        shards.append(_shard(folder, path, [_key(number) for number in numbers], offsets, size))
    return Written(folder, tuple(shards), samples, size)


def write_flat(folder: Path, samples: int, size: int, *, piece_bytes: int) -> Written:
    """Write flat shards, as tokens and text have them."""
    folder.mkdir(parents=True, exist_ok=True)
    per_shard = SHARD_BYTES // size
    shards: list[ShardFile] = []
    for first in range(0, samples, per_shard):
        numbers = range(first, min(first + per_shard, samples))
        path = folder / f"shard-{len(shards):05d}.bin"
        write_pieces(path, (content(number, size) for number in numbers), piece_bytes)
        offsets = [row * size for row in range(len(numbers))]
        shards.append(_shard(folder, path, [_key(number) for number in numbers], offsets, size))
    return Written(folder, tuple(shards), samples, size)


def write_pieces(path: Path, parts: Iterator[bytes], piece_bytes: int) -> None:
    """Write a file ``piece_bytes`` at a time."""
    waiting = bytearray()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            waiting += part
            while len(waiting) >= piece_bytes:
                file.write(waiting[:piece_bytes])
                del waiting[:piece_bytes]
        file.write(waiting)


def _members(numbers: range, size: int) -> Iterator[bytes]:
    for number in numbers:
        info = tarfile.TarInfo(f"{_key(number)}.bin")
        info.size = size
        yield info.tobuf(tarfile.USTAR_FORMAT) + content(number, size) + bytes(-size % BLOCK)
    yield bytes(2 * BLOCK)


def _key(number: int) -> str:
    return f"s{number:09d}"


def _shard(folder: Path, path: Path, keys: list[str], offsets: list[int], size: int) -> ShardFile:
    index = path.with_suffix(".idx")
    index.write_bytes(shard_index.encode(keys, {"bin": (offsets, [size] * len(keys))}))
    return ShardFile(
        path=path.name,
        sha256=_NO_HASH,
        size_bytes=path.stat().st_size,
        samples=len(keys),
        index_path=index.name,
        index_sha256=_NO_HASH,
        index_bytes=index.stat().st_size,
    )


def check(batch: np.ndarray, ids: np.ndarray) -> None:
    """Make sure that a batch holds these samples."""
    found = np.ascontiguousarray(batch[:, :8]).view("<u8").ravel()
    if not np.array_equal(found, ids.astype(np.uint64)):
        raise AssertionError("the batch does not hold the samples that were asked for")
