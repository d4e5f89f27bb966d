"""Safetensors files merged byte by byte: neither torch nor the tensors' memory is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: The largest header that safetensors itself accepts.
MAX_HEADER_BYTES = 100_000_000
COPY_BYTES = 8 * 2**20


class TensorFileError(ValueError):
    """A file is no safetensors file, or not whole."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: list[int]
    start: int
    size_bytes: int


def read_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return name -> tensor of some files.

    Raises:
        TensorFileError: a file is no safetensors file.
    """
    found = {}
    for path in paths:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                if size > MAX_HEADER_BYTES:
                    raise ValueError("its header is too large")
                header: dict[str, Any] = json.loads(file.read(size))
                header.pop("__metadata__", None)
                for name, each in header.items():
                    first, last = each["data_offsets"]
                    found[name] = StoredTensor(path, each["dtype"], each["shape"], 8 + size + first, last - first)
            except (ValueError, KeyError, TypeError) as error:
                raise TensorFileError(f"{path.name} is no safetensors file: {error}") from error
    return found


def write_tensors(tensors: Mapping[str, StoredTensor], path: Path) -> None:
    """Write tensors of other files into one, sorted by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # The larger element first, as safetensors does it: each tensor is aligned then.
    ordered = sorted(tensors.items(), key=lambda item: (-_element_bytes(item[1]), item[0]))
    for name, tensor in ordered:
        end = offset + tensor.size_bytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in ordered:
            with tensor.path.open("rb") as source:
                source.seek(tensor.start)
                left = tensor.size_bytes
                while left:
                    block = source.read(min(left, COPY_BYTES))
                    if not block:
                        raise TensorFileError(f"{tensor.path.name} is shorter than its header says")
                    file.write(block)
                    left -= len(block)


def _element_bytes(tensor: StoredTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.size_bytes // count if count else 0
