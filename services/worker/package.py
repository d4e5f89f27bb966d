"""Unpacking a code package: a gzipped tar by somebody we need not trust."""

from __future__ import annotations

import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

GIB = 2**30


class PackageError(ValueError):
    """The package is not to be unpacked; the text says what to change."""


def unpack(package: Path, folder: Path, *, max_bytes: int = 2 * GIB, max_files: int = 20_000) -> None:
    """Unpack into ``folder`` (made anew): all of it inside, or a ``PackageError`` and no folder."""
    shutil.rmtree(folder, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _extract(package, partial, max_bytes, max_files)
        partial.replace(folder)
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeError) as error:
        raise PackageError(
            f"the code package cannot be unpacked: {error}. It must be a whole gzipped tar: "
            "upload it with `trainbus submit`, or make it with `tar czf`"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def problem(member: tarfile.TarInfo) -> str | None:
    """Why this member is refused, None if it is sound. What it says is all that is looked at."""
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
    if target.is_absolute():
        return f"is a link to {member.linkname!r}, outside of the package: replace it by a copy"
    for part in target.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return f"is a link to {member.linkname!r}, outside of the package: replace it by a copy"
    return None


def _extract(package: Path, folder: Path, max_bytes: int, max_files: int) -> None:
    size_bytes = count = 0
    # As a stream: a bomb is noticed by what its headers say, before it is blown up.
    with tarfile.open(package, "r|gz") as archive:
        for member in archive:
            count += 1
            size_bytes += max(member.size, 0)
            if count > max_files:
                raise PackageError(f"the code package holds more than {max_files:,} files: leave out what is data")
            if size_bytes > max_bytes:
                raise PackageError(
                    f"the code package unpacks to more than {max_bytes:,} bytes: put data into the lake, "
                    "and name it in 'data'"
                )
            reason = problem(member)
            if reason is not None:
                raise PackageError(f"the code package is refused: {member.name!r} {reason}")
            try:
                # The filter looks at where the path really leads once earlier links are in place.
                archive.extract(member, folder, filter="data", set_attrs=True)
            except (tarfile.FilterError, KeyError) as error:
                raise PackageError(f"the code package is refused: {error}") from error
    if count == 0:
        raise PackageError("the code package is empty: pack the folder that holds the task")
