"""Where a file is cut into pieces, so that what did not change is the same piece again.

A safetensors file is cut at its tensors: the header alone, large tensors every ``CUT_BYTES`` from their own start,
small ones together. Where small ones part is decided by the tensors' names, not by what lies before them: a tensor that
comes or goes, as when the ranks share the state anew, changes its own group and no other. Anything else is cut at
fixed lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: SeaweedFS takes what is larger in parts, and is half as long again over them.
CUT_BYTES = 8 * 2**20
#: A tensor of so many bytes is a piece of its own; more pieces would cost more requests than they save bytes.
LARGE_BYTES = 256 * 2**10
#: Small tensors that belong together: about so many bytes, and never more than the second figure.
GROUP_BYTES = 2**20
GROUP_MOST_BYTES = 4 * 2**20
LENGTH_BYTES = 8
#: What the format allows for a header.
HEADER_MOST_BYTES = 100_000_000
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
    #: The same in every checkpoint for what is the same part of the state; '' where nobody can say.
    key: str = ""
    #: Bytes of an item of the tensor.
    width: int = 1


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    start: int
    end: int
    width: int


def header_length(first: bytes, size_bytes: int) -> int:
    """Bytes of length field and header if this may be a safetensors file, else 0."""
    if len(first) < LENGTH_BYTES or first[LENGTH_BYTES : LENGTH_BYTES + 1] not in (b"{", b""):
        return 0
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    whole = LENGTH_BYTES + length
    return whole if 2 <= length <= HEADER_MOST_BYTES and whole <= size_bytes else 0


def cut(size_bytes: int, header: bytes = b"") -> tuple[ChunkRange, ...]:
    """The pieces of a file, in order and without gaps. ``header``: its first ``header_length`` bytes.

    A header that is nonsense does no harm: the file is then cut at fixed lengths.
    """
    tensors = _tensors(header, size_bytes) if header else None
    if not tensors:
        return tuple(_fixed(0, size_bytes, "", 1))
    return (ChunkRange(0, len(header)), *_at_tensors(tensors))


def _at_tensors(tensors: list[_Tensor]) -> Iterator[ChunkRange]:
    group: list[_Tensor] = []
    for tensor in tensors:
        size_bytes = tensor.end - tensor.start
        large = size_bytes >= LARGE_BYTES
        if group and (large or tensor.end - group[0].start > GROUP_MOST_BYTES):
            yield _together(group)
            group = []
        if large:
            yield from _fixed(tensor.start, size_bytes, tensor.name, tensor.width)
        elif size_bytes:
            group.append(tensor)
            if _parts_after(tensor):
                yield _together(group)
                group = []
    if group:
        yield _together(group)


def _parts_after(tensor: _Tensor) -> bool:
    """Whether a group ends here: the likelier the larger the tensor, so that groups have ``GROUP_BYTES`` on average."""
    drawn = int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=4).digest(), "big") / 2**32
    return drawn < (tensor.end - tensor.start) / GROUP_BYTES


def _together(group: list[_Tensor]) -> ChunkRange:
    start, end = group[0].start, group[-1].end
    widths = {tensor.width for tensor in group}
    return ChunkRange(start, end - start, f"{group[0].name}..{group[-1].name}", widths.pop() if len(widths) == 1 else 1)


def _fixed(start: int, size_bytes: int, name: str, width: int) -> Iterator[ChunkRange]:
    for offset in range(0, size_bytes, CUT_BYTES):
        key = f"{name}@{offset}" if name else ""
        yield ChunkRange(start + offset, min(CUT_BYTES, size_bytes - offset), key, width)
    if not size_bytes:
        yield ChunkRange(start, 0)


def _tensors(header: bytes, size_bytes: int) -> list[_Tensor] | None:
    """The tensors in the order of the file, if they fill it without gaps or overlaps; else None."""
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
