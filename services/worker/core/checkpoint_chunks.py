"""The chunks of a checkpoint's file: where it is cut, and which chunks are stored as a difference.

A safetensors file is cut at its tensors: the header alone, large tensors every ``CHUNK_BYTES`` from their own start,
small tensors in groups. The names of the tensors decide where a group ends: a tensor that is added or removed, as when
the ranks shard the state again, changes its own group only. An unchanged part of the state is then the same chunk
again. Any other file is cut at fixed lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.events.checkpoint import Chunk

#: SeaweedFS stores larger objects in parts, which takes half as long again.
CHUNK_BYTES = 8 * 2**20
#: A tensor of this size is a chunk of its own; more chunks would cost more requests than they save bytes.
LARGE_BYTES = 256 * 2**10
#: Bytes of a group of small tensors, on average and at most.
GROUP_BYTES = 2**20
GROUP_MAX_BYTES = 4 * 2**20
LENGTH_BYTES = 8
#: The longest header that the format allows.
HEADER_MAX_BYTES = 100_000_000
ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """A range of a file."""

    start: int
    size_bytes: int
    #: Names the part of the state, alike in every checkpoint; '' where it is unknown.
    key: str = ""
    #: Bytes of one item of the tensor.
    width: int = 1


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    start: int
    end: int
    width: int


def header_length(first: bytes, size_bytes: int) -> int:
    """Return the bytes of length field and header if this may be a safetensors file, else 0."""
    if len(first) < LENGTH_BYTES or first[LENGTH_BYTES : LENGTH_BYTES + 1] not in (b"{", b""):
        return 0
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    whole = LENGTH_BYTES + length
    return whole if 2 <= length <= HEADER_MAX_BYTES and whole <= size_bytes else 0


def chunk_ranges(size_bytes: int, header: bytes = b"") -> tuple[ChunkRange, ...]:
    """Return the chunks of a file, in order and without gaps. ``header``: its first ``header_length`` bytes.

    A file with an invalid header is cut at fixed lengths.
    """
    tensors = _tensors(header, size_bytes) if header else None
    if not tensors:
        return tuple(_fixed_ranges(0, size_bytes, "", 1))
    return (ChunkRange(0, len(header)), *_tensor_ranges(tensors))


def _tensor_ranges(tensors: list[_Tensor]) -> Iterator[ChunkRange]:
    group: list[_Tensor] = []
    for tensor in tensors:
        size_bytes = tensor.end - tensor.start
        large = size_bytes >= LARGE_BYTES
        if group and (large or tensor.end - group[0].start > GROUP_MAX_BYTES):
            yield _group_range(group)
            group = []
        if large:
            yield from _fixed_ranges(tensor.start, size_bytes, tensor.name, tensor.width)
        elif size_bytes:
            group.append(tensor)
            if _ends_group(tensor):
                yield _group_range(group)
                group = []
    if group:
        yield _group_range(group)


def _ends_group(tensor: _Tensor) -> bool:
    """Whether a group ends here: the likelier the larger the tensor, so that groups have ``GROUP_BYTES`` on average."""
    draw = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=4).digest(), "big") / 2**32
    return draw < (tensor.end - tensor.start) / GROUP_BYTES


def _group_range(group: list[_Tensor]) -> ChunkRange:
    start, end = group[0].start, group[-1].end
    widths = {tensor.width for tensor in group}
    return ChunkRange(start, end - start, f"{group[0].name}..{group[-1].name}", widths.pop() if len(widths) == 1 else 1)


def _fixed_ranges(start: int, size_bytes: int, name: str, width: int) -> Iterator[ChunkRange]:
    for offset in range(0, size_bytes, CHUNK_BYTES):
        key = f"{name}@{offset}" if name else ""
        yield ChunkRange(start + offset, min(CHUNK_BYTES, size_bytes - offset), key, width)
    if not size_bytes:
        yield ChunkRange(start, 0)


def _tensors(header: bytes, size_bytes: int) -> list[_Tensor] | None:
    """Return the tensors in the order of the file; None unless they fill it without gaps or overlaps."""
    try:
        described: Any = json.loads(header[LENGTH_BYTES:])
        tensors = [
            _Tensor(
                name,
                len(header) + each["data_offsets"][0],
                len(header) + each["data_offsets"][1],
                ITEM_BYTES.get(each["dtype"], 1),
            )
            for name, each in described.items()
            if name != "__metadata__"
        ]
        tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
        at = len(header)
        for tensor in tensors:
            if tensor.start != at or tensor.end < at:
                return None
            at = tensor.end
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return tensors if at == size_bytes else None


#: The largest difference, as a part of its chunk: decoding it at a restore costs more than a larger one saves.
MAX_DELTA_SHARE = 0.85
#: Smaller chunks cost a request either way.
MIN_DELTA_BYTES = 64 * 2**10
#: Bytes that are compressed first, to see whether the rest is worth it.
SAMPLE_BYTES = 512 * 2**10


@dataclass(frozen=True, slots=True)
class DeltaBases:
    """The chunks of a committed checkpoint, by the part of the state that they hold."""

    step: int = -1
    chunks: Mapping[str, Chunk] = field(default_factory=dict)

    def find(self, key: str, size_bytes: int, sha256: str, *, max_depth: int) -> Chunk | None:
        """Return the chunk to store a difference to; None: store the new one whole."""
        base = self.chunks.get(key) if key else None
        if base is None or base.size_bytes != size_bytes or base.sha256 == sha256 or size_bytes < MIN_DELTA_BYTES:
            return None
        return base if _depth(base) < max_depth else None


def is_worthwhile(delta_bytes: int, chunk_bytes: int) -> bool:
    return delta_bytes < MAX_DELTA_SHARE * chunk_bytes


def _depth(chunk: Chunk) -> int:
    return 0 if chunk.base is None else 1 + _depth(chunk.base)
