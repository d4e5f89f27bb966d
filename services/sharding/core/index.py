"""The offset index of a shard, made from arrays: the bytes that ``contracts.shard_index.encode`` returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contracts.shard_index import MAGIC, StridedField

Int64s = NDArray[np.int64]


def encode(
    keys: bytes, key_lengths: NDArray[np.integer[Any]], fields: Mapping[str, tuple[Int64s, Int64s] | StridedField]
) -> bytes:
    """Return the index of n samples: their keys, one after the other, and by field n offsets and n sizes, or a rule."""
    layout: dict[str, object] = {}
    arrays: list[bytes] = []
    for name in sorted(fields):
        field = fields[name]
        rule = field if isinstance(field, StridedField) else _find_stride(*field)
        if rule is not None:
            layout[name] = {"first": rule.first, "size": rule.size, "stride": rule.stride}
        elif not isinstance(field, StridedField):
            layout[name] = "arrays"
            arrays += [array.astype("<i8").tobytes() for array in field]
    header = json.dumps(
        {"fields": layout, "keys_bytes": len(keys), "samples": len(key_lengths)},
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode()
    header += b" " * (-(len(MAGIC) + 4 + len(header)) % 8)
    ends = np.cumsum(key_lengths, dtype="<i8").tobytes()
    return b"".join((MAGIC, len(header).to_bytes(4, "little"), header, *arrays, ends, keys))


def _find_stride(offsets: Int64s, sizes: Int64s) -> StridedField | None:
    """Return the rule if all samples have one size and one distance."""
    if sizes[0] < 0 or (sizes != sizes[0]).any():
        return None
    stride = int(offsets[1] - offsets[0]) if len(offsets) > 1 else int(sizes[0])
    return StridedField(int(offsets[0]), stride, int(sizes[0])) if (np.diff(offsets) == stride).all() else None
