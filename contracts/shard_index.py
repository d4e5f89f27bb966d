"""The layout of a shard's offset index, ``<shard>.idx``: where each field of each sample lies, for any language.

All integers are little-endian. The file is

- the magic word ``TBINDEX`` and a byte 2;
- ``uint32``: the length of the header in bytes, which makes the next part begin at a multiple of 8;
- the header: JSON, padded with spaces; ``samples`` (n), ``fields`` (by name, sorted: its layout), ``keys_bytes``;
- for each field that is stored as arrays: ``int64[n]`` offsets, then ``int64[n]`` sizes; size -1 is a field that the
  sample does not have. A field whose samples all have one size and lie at one distance is stored in the header:
  ``{"first": offset, "stride": bytes, "size": bytes}``;
- ``int64[n]``: where each key ends in what follows; then the keys, UTF-8, one after the other.

The same samples give the same bytes.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAGIC = b"TBINDEX\x02"
_LENGTH = struct.Struct("<I")
_INT64 = struct.Struct("<q")
_PREFIX = len(MAGIC) + _LENGTH.size
#: The size of a field that a sample does not have.
ABSENT = -1


@dataclass(frozen=True, slots=True)
class StridedField:
    """A field of one size at one distance: sample i has ``size`` bytes at ``first + i * stride``."""

    first: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class ScatteredField:
    """A field stored as arrays of n ``int64`` each, as they lie in the file."""

    offsets: memoryview
    sizes: memoryview


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An index as it was read; nothing of it is copied out of the file's bytes."""

    samples: int
    fields: Mapping[str, StridedField | ScatteredField]
    #: n ``int64``: where each key ends in ``keys``.
    key_ends: memoryview
    keys: memoryview

    def key(self, row: int) -> str:
        """The key of one sample."""
        start = _INT64.unpack_from(self.key_ends, 8 * (row - 1))[0] if row else 0
        return str(self.keys[start : _INT64.unpack_from(self.key_ends, 8 * row)[0]], "utf-8")

    def places(self, row: int) -> dict[str, tuple[int, int]]:
        """Offset and size of each field that one sample has."""
        found: dict[str, tuple[int, int]] = {}
        for name, field in self.fields.items():
            if isinstance(field, StridedField):
                found[name] = field.first + row * field.stride, field.size
            elif (size := _INT64.unpack_from(field.sizes, 8 * row)[0]) != ABSENT:
                found[name] = _INT64.unpack_from(field.offsets, 8 * row)[0], size
        return found


def encode(keys: Sequence[str], fields: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> bytes:
    """Return the index of n samples.

    Args:
        keys: n of them.
        fields: by name, n offsets and n sizes each (``ABSENT`` for a field that a sample does not have).
    """
    layouts: dict[str, Any] = {}
    arrays: list[bytes] = []
    for name in sorted(fields):
        offsets, sizes = fields[name]
        strided = _detect_stride(offsets, sizes)
        if strided is not None:
            layouts[name] = {"first": strided.first, "size": strided.size, "stride": strided.stride}
        else:
            layouts[name] = "arrays"
            arrays += [_pack(offsets), _pack(sizes)]
    encoded = [key.encode() for key in keys]
    ends, end = [], 0
    for key in encoded:
        end += len(key)
        ends.append(end)
    header = json.dumps(
        {"fields": layouts, "keys_bytes": end, "samples": len(keys)},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    header += b" " * (-(_PREFIX + len(header)) % 8)
    return b"".join((MAGIC, _LENGTH.pack(len(header)), header, *arrays, _pack(ends), *encoded))


def decode(content: bytes | memoryview) -> ShardIndex:
    """Read an index.

    Raises:
        ValueError: it is none, or it is cut short.
    """
    data = memoryview(content)
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError("no shard index of version 2")
    try:
        (length,) = _LENGTH.unpack(data[len(MAGIC) : _PREFIX])
        header = json.loads(bytes(data[_PREFIX : _PREFIX + length]))
        samples, at = int(header["samples"]), _PREFIX + length
        fields: dict[str, StridedField | ScatteredField] = {}
        for name in sorted(header["fields"]):
            how = header["fields"][name]
            if how == "arrays":
                fields[name] = ScatteredField(data[at : at + 8 * samples], data[at + 8 * samples : at + 16 * samples])
                at += 16 * samples
            else:
                fields[name] = StridedField(int(how["first"]), int(how["stride"]), int(how["size"]))
        key_ends, at = data[at : at + 8 * samples], at + 8 * samples
        keys = data[at : at + int(header["keys_bytes"])]
    except (struct.error, KeyError, TypeError) as error:
        raise ValueError(f"a shard index that cannot be read: {error!r}") from error
    if at + int(header["keys_bytes"]) != len(data):
        raise ValueError(f"a shard index of {len(data)} bytes that should have {at + int(header['keys_bytes'])}")
    return ShardIndex(samples, fields, key_ends, keys)


def _detect_stride(offsets: Sequence[int], sizes: Sequence[int]) -> StridedField | None:
    if not sizes or sizes[0] < 0 or any(size != sizes[0] for size in sizes):
        return None
    stride = offsets[1] - offsets[0] if len(offsets) > 1 else sizes[0]
    if any(offset != offsets[0] + i * stride for i, offset in enumerate(offsets)):
        return None
    return StridedField(offsets[0], stride, sizes[0])


def _pack(values: Sequence[int]) -> bytes:
    packed = array("q", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
