"""Gathers samples' bytes into batches: by a small C library, compiled at first use, or by numpy."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

#: ``0``: do without the C library.
NATIVE_VARIABLE = "TRAINBUS_NATIVE"
_SOURCE = Path(__file__).with_name("gather.c")
_FLAGS = ("-O3", "-shared", "-fPIC", "-std=c11")
_COMPILE_S = 60.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class MappedFile:
    """A read-only mapped file. It stays valid when the file is unlinked, and holds no file descriptor.

    (Python's own ``mmap`` holds one for each; a rank may have several hundred shards open.)
    """

    address = 0

    def __init__(self, fd: int, size: int) -> None:
        """Map the first ``size`` bytes (above 0) of an open file, which no one may shorten while this lives.

        Raises:
            OSError: the system does not map it.
        """
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = address
        self.size = size
        #: A view. All references to it, or to a part of it, must be gone before ``close``.
        memory = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.bytes.flags.writeable = False

    def close(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.size)
            self.address = 0

    def __del__(self) -> None:
        self.close()


class NativeLibrary:
    """The C library; its calls release the interpreter's lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.strided = _declare(library.gather_strided, "pnpnpppnppn", _NUMBER)
        self.scattered = _declare(library.gather_scattered, "ppnp")
        self.run_length = _declare(library.run_length, "pn", _NUMBER)
        self.run = _declare(library.read_run, "innnnp", _NUMBER)


_NUMBER = ctypes.c_int64
_TYPES = {"p": ctypes.c_void_p, "n": _NUMBER, "i": ctypes.c_int}


def _declare(function: Any, arguments: str, result: Any = None) -> Any:
    """Declare a C function: its arguments by letter (pointer, number, int), and its result."""
    function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], result
    return function


@cache
def load_native_library() -> NativeLibrary | None:
    """Return the C library, compiled and kept in the user's cache at first use; None where that does not work."""
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return None
    try:
        source = _SOURCE.read_bytes()
        name = hashlib.sha256(source + " ".join((*_FLAGS, os.uname().machine)).encode()).hexdigest()[:16]
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(home) / "trainbus" / f"gather-{name}.so"
        if not path.is_file():
            _compile(path)
        if path.stat().st_uid not in (0, os.getuid()):
            return None  # another user could have written the code
        return NativeLibrary(ctypes.CDLL(str(path)))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def _compile(path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "gather.so"
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S, stdin=subprocess.DEVNULL)
        made.replace(path)  # several ranks may come here at once: each has a whole one


class FieldLocations:
    """Addresses of one field by shard, for strided fields. The reader writes them, and C reads them."""

    def __init__(self, starts: Ints, used: Ints) -> None:
        """Create it without any shard.

        Args:
            starts: the first sample of each shard, and the end of the last.
            used: by shard, shared by all fields: the batch that last copied from it.
        """
        shards = len(used)
        self._starts, self._used = starts, used
        #: Address of the field in each shard's first sample; 0: not mapped, or without a stride.
        self.first = np.zeros(shards, dtype=np.int64)
        self.stride = np.zeros(shards, dtype=np.int64)
        self.sizes = np.zeros(shards, dtype=np.int64)
        #: What the C library takes. The arrays never move; to ask numpy each time takes longer than a small copy.
        self._before = address(starts), shards, address(self.first), address(self.stride), address(self.sizes)
        self._used_at = address(used)

    def copy(self, ids: Ints, out: Bytes, batch: int) -> int:
        """Copy the field of the samples ``ids`` into ``out``, both contiguous, ``uint8[n, size]``.

        Returns:
            How many were copied: all, or those before the first whose shard must be looked at or is of another size.
        """
        count, size = len(ids), out.shape[1]
        if (library := load_native_library()) is not None:
            done: int = library.strided(address(ids), count, *self._before, size, address(out), self._used_at, batch)
            return done
        numbers = np.clip(self._starts.searchsorted(ids, side="right") - 1, 0, len(self.first) - 1)
        sound = (ids >= 0) & (ids < self._starts[-1]) & (self.first[numbers] != 0) & (self.sizes[numbers] == size)
        if not bool(sound.all()):
            count = int(sound.argmin())
            ids, numbers = ids[:count], numbers[:count]
        self._used[numbers] = batch
        from_ = self.first[numbers] + (ids - self._starts[numbers]) * self.stride[numbers]
        copy_pieces(from_, self.sizes[numbers], out[:count].reshape(-1))
        return count


def address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array; several times faster than ``array.ctypes.data``."""
    found: int = array.__array_interface__["data"][0]
    return found


def run_length(ids: Ints) -> int:
    """Return how many of the ids, from the first on, follow each other."""
    if (library := load_native_library()) is not None:
        length: int = library.run_length(address(ids), len(ids))
        return length
    breaks = np.flatnonzero(np.diff(ids) != 1)
    return int(breaks[0]) + 1 if len(breaks) else len(ids)


def copy_pieces(addresses: Ints, sizes: Ints, out: Bytes) -> None:
    """Copy pieces of memory, one after the other, into ``out``, which has room for just them."""
    if (library := load_native_library()) is not None:
        library.scattered(address(addresses), address(sizes), len(sizes), address(out))
        return
    to = address(out)
    for piece, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(to, piece, size)
        to += size


def read_run(fd: int, offset: int, stride: int, out: Bytes) -> int:
    """Read ``out.shape`` = [n, size] bytes from an open file, each row ``stride`` after the one before.

    Returns how many rows are whole: fewer than n where the file ends, or where the way through Python is no better
    than copying out of the mapped file.
    """
    rows, size = out.shape
    if (library := load_native_library()) is not None:
        return int(library.run(fd, offset, rows, stride, size, address(out)))
    if stride != size:
        return 0
    flat: Any = out.reshape(-1)
    got: int = os.preadv(fd, [flat], offset)
    return got // max(int(size), 1)
