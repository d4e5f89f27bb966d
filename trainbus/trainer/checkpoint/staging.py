"""Host buffers that hold a state in the layout of its files, so that writing is one sequential pass."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainbus.trainer.checkpoint.digest import DTYPES
from trainbus.trainer.checkpoint.files import CheckpointError

#: safetensors pads its header with blanks; to this, so that tensors of any type lie where they may.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class FileImage:
    """One safetensors file in memory: its header, and for each tensor a view at its place."""

    def __init__(self, tensors: Mapping[str, Tensor], *, pinned: bool = False, path: Path | None = None) -> None:
        """Lay the tensors out, without copying them.

        Args:
            pinned: in memory that a GPU copies to by itself.
            path: a file that the memory belongs to, on a file system in memory; it outlives the process.
        """
        self.key = _key(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name!r} is of type {tensor.dtype}, which safetensors cannot hold")
        # Largest elements first: each tensor is then aligned to its own.
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, tensor in ordered:
            stop = offset + tensor.numel() * tensor.element_size()
            entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
            table[name], offset = entry, stop
        header = json.dumps(table, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + 8) % ALIGNMENT_BYTES)
        start = 8 + len(header)
        self.size_bytes = start + offset
        self._buffer = _allocate(self.size_bytes, pinned, path)
        self._buffer[:start] = torch.frombuffer(
            bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8
        )
        self.places: dict[str, Place] = {}
        self.views: dict[str, Tensor] = {}
        for name, tensor in ordered:
            first, last = (start + offset for offset in table[name]["data_offsets"])
            self.places[name] = Place(table[name]["dtype"], tuple(tensor.shape), first, last)
            self.views[name] = self._buffer[first:last].view(tensor.dtype).view(tensor.shape)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self._buffer.numpy())  # type: ignore[arg-type]

    def touch(self) -> None:
        """Fault in all pages now, not while training waits for the first copy."""
        first = min((place.start for place in self.places.values()), default=self.size_bytes)
        self._buffer[first:].zero_()


class StagingBuffers:
    """The buffers of one rank's files, kept from one checkpoint to the next."""

    def __init__(self, *, pinned: bool = False, folder: Path | None = None) -> None:
        self._pinned, self._folder = pinned, folder
        self.images: dict[str, FileImage] = {}

    def lay_out(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Allocate buffers for these tensors, by file name, unless they have the layout of those before."""
        same = self.images.keys() == files.keys() and all(
            self.images[name].key == _key(tensors) for name, tensors in files.items()
        )
        if not same:
            self.images.clear()  # before the new ones are made: one copy of the state is all that may be taken
            for name, tensors in files.items():
                path = None if self._folder is None else self._folder / name
                self.images[name] = FileImage(tensors, pinned=self._pinned, path=path)

    def pairs(self, files: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return (where to, where from) for each tensor."""
        return [
            (self.images[file].views[name], tensor)
            for file, tensors in files.items()
            for name, tensor in tensors.items()
        ]


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each tensor to its place; on a GPU this only queues the copies."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=source.is_cuda)


def _key(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _allocate(size_bytes: int, pinned: bool, path: Path | None) -> Tensor:
    if path is not None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A file with holes would end the process by SIGBUS, were the memory full when one is written to.
            os.posix_fallocate(fd, 0, size_bytes)
            return torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)
    if pinned:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
