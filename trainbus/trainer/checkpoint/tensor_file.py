"""Opens a safetensors file so that each of its tensors is read alone, whole or by rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainbus.trainer.checkpoint.digest import DTYPES
from trainbus.trainer.checkpoint.files import CheckpointError

#: Called before bytes of a file are read, with the first and the one behind the last: they may have to be fetched.
RequireRange = Callable[[Path, int, int], None]
#: The length of a header, little-endian, at the beginning of a safetensors file.
LENGTH_BYTES = 8
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A ``ReadableTensor`` in a file, in C order. A read takes no address space beside that of its result."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    #: Where its first byte lies in the file.
    offset: int
    #: None: the whole file is here.
    require: RequireRange | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        return self._read(self.offset, self.shape)

    def read_rows(self, start: int, stop: int) -> Tensor:
        row_shape = self.shape[1:]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        return self._read(self.offset + start * row_bytes, torch.Size((stop - start, *row_shape)))

    def _read(self, offset: int, shape: torch.Size) -> Tensor:
        raw = torch.empty(math.prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        if self.require is not None and raw.nbytes:
            self.require(self.path, offset, offset + raw.nbytes)
        try:
            # Opened for each read: a checkpoint of many ranks has more files than a process may have open.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._fill(memoryview(raw.numpy()), fd, offset)  # type: ignore[arg-type]
            finally:
                os.close(fd)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return raw.view(self.dtype).view(shape)

    def _fill(self, target: memoryview, fd: int, offset: int) -> None:
        while target:
            # One call reads at most 2 GiB.
            size_bytes = os.preadv(fd, [target], offset)
            if not size_bytes:
                raise CheckpointError(f"{self.path.name} of the checkpoint is shorter than when it was opened")
            target, offset = target[size_bytes:], offset + size_bytes


def open_tensor_file(path: Path, require: RequireRange | None = None) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name; it reads only the header.

    ``require``: where the file has its length, but perhaps not all of its bytes.

    Raises:
        CheckpointError: the file is no safetensors file, is not as long as its header says, or has an unknown type.
    """
    try:
        size_bytes = path.stat().st_size
        if require is not None:
            _require_header(path, require)
        # Mapped, the whole file would count towards the limit of a rank's address space.
        with safe_open(path, framework="pt", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            described = {name: (each.get_dtype(), torch.Size(each.get_shape())) for name, each in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    for name, (dtype, _) in described.items():
        if dtype not in _BY_NAME:
            raise CheckpointError(f"{name!r} in {path.name} of the checkpoint is of the unknown type {dtype}")
    # safetensors has checked that the tensors fill the rest of the file in this order, without a gap.
    sizes = [math.prod(shape) * _BY_NAME[dtype].itemsize for dtype, shape in described.values()]
    offsets = accumulate(sizes, initial=size_bytes - sum(sizes))
    return {
        name: FileTensor(path, _BY_NAME[dtype], shape, offset, require)
        for (name, (dtype, shape)), offset in zip(described.items(), offsets, strict=False)
    }


def _require_header(path: Path, require: RequireRange) -> None:
    require(path, 0, LENGTH_BYTES)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    require(path, 0, min(LENGTH_BYTES + length, path.stat().st_size))


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path.name} of the checkpoint cannot be read: {error}")
