"""The bytes of a POSIX ustar archive; every run writes the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 512
#: Ends an archive.
END = bytes(2 * BLOCK)
MAX_NAME_BYTES = 100
MAX_MEMBER_BYTES = 8**11 - 1

# name[100] mode uid gid size[12] mtime[12] chksum[8] type linkname[100] magic version uname gname major minor prefix
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" + b"0000000\0"
_MTIME = b"00000000000\0"
_AFTER_CHECKSUM = (
    b"0" + bytes(100) + b"ustar\x0000" + bytes(32) + bytes(32) + b"0000000\0" + b"0000000\0" + bytes(155) + bytes(12)
)
#: The checksum counts its own field as spaces.
_SPACES = b" " * 8
_TEMPLATE = np.frombuffer(
    bytes(MAX_NAME_BYTES) + _BEFORE_SIZE + bytes(12) + _MTIME + _SPACES + _AFTER_CHECKSUM, dtype=np.uint8
)
_SIZE_AT = MAX_NAME_BYTES + len(_BEFORE_SIZE)
_CHECKSUM_AT = _SIZE_AT + 12 + len(_MTIME)
_TEMPLATE_SUM = int(_TEMPLATE.sum())


def headers(names: Sequence[bytes], sizes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the header blocks, ``[n, 512]``, of regular files: mode 0644, owner 0, time 0.

    Raises:
        ValueError: a name or a size does not fit the format.
    """
    if unfit := [name for name in names if not 0 < len(name) <= MAX_NAME_BYTES]:
        raise ValueError(f"{unfit[0].decode()!r} does not fit the {MAX_NAME_BYTES} bytes of a ustar name")
    if len(sizes) and not 0 <= int(sizes.min()) <= int(sizes.max()) <= MAX_MEMBER_BYTES:
        raise ValueError(f"a file of {int(sizes.max())} bytes is too large for ustar")
    blocks = np.tile(_TEMPLATE, (len(names), 1))
    named = np.array(names, dtype=f"S{MAX_NAME_BYTES}").view(np.uint8).reshape(len(names), MAX_NAME_BYTES)
    digits = _octal(sizes, 11)
    blocks[:, :MAX_NAME_BYTES] = named
    blocks[:, _SIZE_AT : _SIZE_AT + 11] = digits
    # The sum over a header is that of the template and of what was zero in it.
    checksums = _TEMPLATE_SUM + named.sum(axis=1, dtype=np.int64) + digits.sum(axis=1, dtype=np.int64)
    blocks[:, _CHECKSUM_AT : _CHECKSUM_AT + 6] = _octal(checksums, 6)
    blocks[:, _CHECKSUM_AT + 6] = 0
    return blocks


def header(name: str, size: int) -> bytes:
    """Return the header block of one regular file."""
    return headers([name.encode()], np.array([size], dtype=np.int64)).tobytes()


def member_bytes(size: int) -> int:
    """Return the bytes of an archive member of ``size`` bytes."""
    return BLOCK + size + -size % BLOCK


def _octal(values: NDArray[np.int64], digits: int) -> NDArray[np.uint8]:
    shifts = 3 * np.arange(digits - 1, -1, -1, dtype=np.int64)
    return (((values[:, None] >> shifts) & 7) + ord("0")).astype(np.uint8)
