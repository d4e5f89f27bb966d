"""The files of a code package, a gzipped tar from an untrusted user, unpacked into a folder."""

from __future__ import annotations

import errno
import shutil
import tarfile
from pathlib import Path

from services.kit.code_package import UNPACKING_ERRORS, PackageError, describe_outside, find_problem
from services.kit.store.files import is_inside

GIB = 2**30
#: Numbers of the errors that the names in a package cause; None: gzip's own. The machine is at fault for all others.
PACKAGE_ERRNOS = (None, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP)


def unpack_package(package: Path, folder: Path, *, max_bytes: int = 2 * GIB, max_files: int = 20_000) -> None:
    """Unpack into a new ``folder``.

    Raises:
        PackageError: the package is refused; there is no folder then.
        OSError: it cannot be written here, on a full disk for example.
    """
    shutil.rmtree(folder, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _extract(package, partial, max_bytes, max_files)
        partial.replace(folder)
    except UNPACKING_ERRORS as error:
        if isinstance(error, OSError) and error.errno not in PACKAGE_ERRNOS:
            raise
        raise PackageError(
            f"the code package cannot be unpacked: {error}. It must be a whole gzipped tar: "
            "upload it with `trainbus submit`, or make it with `tar czf`"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(package: Path, folder: Path, max_bytes: int, max_files: int) -> None:
    # By hand: the filters of tarfile are not in every Python 3.11.
    size_bytes = count = 0
    links: list[tarfile.TarInfo] = []
    # As a stream: a bomb is recognized by its headers, before it is unpacked.
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
            reason = find_problem(member)
            if reason is not None:
                raise PackageError(f"the code package is refused: {member.name!r} {reason}")
            if member.issym() or member.islnk():
                links.append(member)
            elif member.isdir():
                (folder / member.name).mkdir(parents=True, exist_ok=True)
            else:
                _write_file(archive, member, folder / member.name)
    # Links come last, so that nothing is written through one.
    for link in links:
        _write_link(link, folder)
    if count == 0:
        raise PackageError("the code package is empty: pack the folder that holds the task")


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = archive.extractfile(member)
    assert content is not None  # it is a file
    path.unlink(missing_ok=True)  # a second entry of one name replaces the first, as tar does it
    with path.open("xb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(0o755 if member.mode & 0o111 else 0o644)


def _write_link(member: tarfile.TarInfo, folder: Path) -> None:
    """Make a link whose target, with every other link in place, is inside the package."""
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    target = (path.parent if member.issym() else folder) / member.linkname
    if not (is_inside(path.parent, folder) and is_inside(target, folder)):
        raise PackageError(f"the code package is refused: {member.name!r} {describe_outside(member)}")
    if member.issym():
        path.symlink_to(member.linkname)
    elif target.is_file():
        shutil.copyfile(target, path)
    else:
        raise PackageError(
            f"the code package is refused: {member.name!r} is a link to {member.linkname!r}, which is not there"
        )
