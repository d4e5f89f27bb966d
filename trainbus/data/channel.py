"""A channel for objects between two processes of a machine: arrays and tensors travel in shared memory."""

from __future__ import annotations

import errno
import io
import itertools
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: How many parts there are in the memory, and its size.
_MESSAGE = struct.Struct("<qq")
_ALIGN = 64


class ChannelClosed(Exception):
    """The other process is gone."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends. Messages are a few bytes and a file of memory, so that ``send`` does not block."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, value: Any) -> None:
    """Send an object that pickles.

    Raises:
        ChannelClosed: the other process is gone.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
    parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"<{len(parts)}q", *(part.nbytes for part in parts))
    # A file of its own rather than /dev/shm, which containers keep small.
    fd = os.memfd_create("trainbus-batch", os.MFD_CLOEXEC)
    try:
        at = _write(fd, sizes, 0)
        for part in parts:
            at = _write(fd, part, at)
        os.ftruncate(fd, at)
        socket.send_fds(end, [_MESSAGE.pack(len(parts), at)], [fd])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChannelClosed from error
    finally:
        os.close(fd)


def receive(end: socket.socket) -> Any:
    """Return the next object. Its arrays and tensors lie in memory that is theirs alone.

    Raises:
        ChannelClosed: the other process is gone.
        OSError: this process has no file descriptors left.
    """
    try:
        message, fds, _, _ = socket.recv_fds(end, _MESSAGE.size, 1)
    except ConnectionResetError as error:
        raise ChannelClosed from error
    if not message:
        raise ChannelClosed
    if not fds:
        raise OSError(errno.EMFILE, "no file descriptor is left for a batch: raise the limit (ulimit -n)")
    count, total = _MESSAGE.unpack(message)
    try:
        memory = memoryview(mmap.mmap(fds[0], total))
    finally:
        os.close(fds[0])
    sizes = struct.unpack_from(f"<{count}q", memory)
    starts = list(itertools.accumulate(map(_align, sizes), initial=_align(8 * count)))
    head, *buffers = [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return pickle.loads(head, buffers=buffers)  # noqa: S301  what the parent or its own fork has written


def _write(fd: int, part: bytes | memoryview, at: int) -> int:
    """Write at ``at``; return where the next part begins."""
    rest = memoryview(part)
    written = 0
    while written < rest.nbytes:
        written += os.pwrite(fd, rest[written:], at + written)
    return at + _align(rest.nbytes)


def _align(size: int) -> int:
    return size + -size % _ALIGN


class _Pickler(pickle.Pickler):
    """Leaves the contents of plain tensors out of the pickle, as numpy does with those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (content, value.dtype, tuple(value.shape))


def _tensor(content: NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)
