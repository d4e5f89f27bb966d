"""The bytes of a POSIX ustar archive, with nothing in them that differs between two runs."""

from __future__ import annotations

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
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_MTIME) + 8 * ord(" ") + sum(_AFTER_CHECKSUM)


def header(name: str, size: int) -> bytes:
    """The header block of a regular file: mode 0644, owner 0, time 0.

    Raises:
        ValueError: the name or the size does not fit the format.
    """
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ValueError(f"{name!r} does not fit the {MAX_NAME_BYTES} bytes of a ustar name")
    if not 0 <= size <= MAX_MEMBER_BYTES:
        raise ValueError(f"{name!r} has {size} bytes, more than ustar can say")
    octal = b"%011o\0" % size
    checksum = _FIXED_SUM + sum(encoded) + sum(octal)
    return b"".join((encoded.ljust(100, b"\0"), _BEFORE_SIZE, octal, _MTIME, b"%06o\0 " % checksum, _AFTER_CHECKSUM))


def padding(size: int) -> bytes:
    """What follows a content of ``size`` bytes, up to the next block."""
    return bytes(-size % BLOCK)


def member_bytes(size: int) -> int:
    """What a content of ``size`` bytes takes up in an archive."""
    return BLOCK + size + -size % BLOCK
