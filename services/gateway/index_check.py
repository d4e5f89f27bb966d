"""Verification of a shard's index against the shard. An archive is read by its own headers, not by the index."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from contracts import shard_index
from contracts.shard_index import StridedField

BLOCK = 512


def find_index_mismatch(shard: Path, index: bytes, samples: int) -> str | None:
    """Return how a shard of ``samples`` samples and its index differ; None if they agree to the byte."""
    try:
        read = shard_index.decode(index)
    except ValueError as error:
        return f"its index is {error}"
    if read.samples != samples:
        return f"its index has {read.samples} samples, the manifest {samples}"
    with shard.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return _archive(content, read) if _is_archive(content) else _flat(len(content), read)
        except ValueError as error:
            return str(error)


def _is_archive(content: mmap.mmap) -> bool:
    return content[257:262] == b"ustar"


def _flat(size: int, index: shard_index.ShardIndex) -> str | None:
    """Check that the shard is samples of one size, one after the other."""
    fields = list(index.fields.values())
    if len(fields) != 1 or not isinstance(fields[0], StridedField):
        return "it is no ustar archive, and its index names no single field of one size"
    field = fields[0]
    if (field.first, field.stride) != (0, field.size) or field.size * index.samples != size:
        return f"it has {size:,} bytes, its index has {index.samples:,} samples of {field.size:,} at {field.stride:,}"
    return None


def _archive(content: mmap.mmap, index: shard_index.ShardIndex) -> str | None:
    members = _members(content)
    for row in range(index.samples):
        key, places = index.key(row), index.places(row)
        left = dict(places)
        while left:
            name, offset, size = next(members, ("", 0, 0))
            field = name[len(key) + 1 :] if name.startswith(f"{key}.") else ""
            if left.pop(field, None) != (offset, size):
                found = f"{name!r} ({size:,} bytes at {offset:,})" if name else "its end"
                return f"sample {row} ({key!r}) should have {sorted(places)} at {places}, but the archive has {found}"
    extra = next(members, None)
    return f"the archive has {extra[0]!r} more than its index" if extra else None


def _members(content: mmap.mmap) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each file, from the headers."""
    at = 0
    while (header := content[at : at + BLOCK]).strip(b"\0"):
        if len(header) < BLOCK or header[257:262] != b"ustar" or header[156:157] not in (b"0", b"\0"):
            raise ValueError(f"no header of a file at {at:,}")
        if int(header[148:154], 8) != sum(header[:148]) + sum(header[156:]) + 8 * ord(" "):
            raise ValueError(f"the header at {at:,} does not fit its checksum")
        size = int(header[124:135], 8)
        yield header[:100].rstrip(b"\0").decode(), at + BLOCK, size
        at += BLOCK + size + -size % BLOCK
    if content[at : at + 2 * BLOCK] != bytes(2 * BLOCK):
        raise ValueError(f"the archive has no end at {at:,}")
