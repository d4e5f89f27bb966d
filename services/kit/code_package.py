"""The rules for a code package, a gzipped tar from an untrusted user: where it comes in and where it is unpacked."""

from __future__ import annotations

import gzip
import itertools
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import Any, BinaryIO

#: Of the files of a package, before compression, and their number.
MAX_BYTES = 64 * 2**20
MAX_FILES = 5_000
#: Of what a tar holds besides the files: headers, names and padding.
MAX_HEADER_BYTES = MAX_FILES * 4096
#: What a damaged package causes; RuntimeError: a cycle of links.
UNPACKING_ERRORS = (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeError, RuntimeError)


class PackageError(ValueError):
    """The package is refused; the text says what to change."""


def package_uri(bucket: str, sha256: str) -> str:
    """Return where a package is kept: under its hash."""
    return f"s3://{bucket}/packages/{sha256}.tar.gz"


def check_package(file: BinaryIO) -> None:
    """Read a package to its end, without unpacking it.

    Raises:
        PackageError: it is damaged, too large, empty, or has an entry that is refused.
    """
    size_bytes = count = 0
    try:
        # As a stream: a bomb is recognized by its headers.
        content: Any = _BoundedReader(gzip.GzipFile(fileobj=file))
        with tarfile.open(fileobj=content, mode="r|") as archive:
            for member in archive:
                count += member.isfile()
                size_bytes += max(member.size, 0)
                if count > MAX_FILES or size_bytes > MAX_BYTES:
                    raise PackageError(
                        f"the package holds more than {MAX_FILES:,} files or {MAX_BYTES // 2**20} MiB: "
                        "leave out data and results; data goes into the lake and is named in 'data'"
                    )
                if (reason := find_problem(member)) is not None:
                    raise PackageError(f"the package is refused: {member.name!r} {reason}")
    except UNPACKING_ERRORS as error:
        raise PackageError(f"the body is no whole gzipped tar: {error}. Make it with `tar czf`") from error
    if count == 0:
        raise PackageError("the package holds no files: pack the folder that holds your code")


class _BoundedReader:
    """Reads what a package decompresses to; refuses more than its files can need (a header may be a bomb, too)."""

    def __init__(self, content: gzip.GzipFile) -> None:
        self._content, self._left = content, MAX_BYTES + MAX_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        found = self._content.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(found)
        if self._left < 0:
            raise PackageError(f"the package unpacks to more than {MAX_BYTES // 2**20} MiB: leave out data and results")
        return found


def find_problem(member: tarfile.TarInfo) -> str | None:
    """Return why this member is refused, from its header alone; None if it is accepted."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or member.name.startswith(("/", "\\")):
        return "has an absolute path: pack it with a relative one"
    if ".." in name.parts:
        return "leads out of the package by '..': remove it from the path"
    if len(member.name) > 1000 or "\0" in member.name or "\\" in member.name:
        return "has a name that is not fit for a file: rename it"
    if member.issym() or member.islnk():
        return _link_problem(member, name)
    if member.isdir():
        return None
    if member.sparse is not None:
        return "is a sparse file: pack it as an ordinary one"
    if not member.isfile():
        return "is a device, pipe or other special file: leave it out of the package"
    return None


def _link_problem(member: tarfile.TarInfo, name: PurePosixPath) -> str | None:
    target = PurePosixPath(member.linkname)
    # A hard link's target is named from the package's root, a symbolic one's from where it stands.
    depth = len(name.parts) - 1 if member.issym() else 0
    depths = itertools.accumulate((-1 if part == ".." else 1 for part in target.parts), initial=depth)
    return describe_outside(member) if target.is_absolute() or min(depths) < 0 else None


def describe_outside(member: tarfile.TarInfo) -> str:
    """Return why a link out of the package is refused."""
    return f"is a link to {member.linkname!r}, outside of the package: replace it by a copy"
