"""Valid code packages are unpacked, unsafe ones refused."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.disk_space import DISK_FULL
from services.kit.code_package import PackageError
from services.kit.package_files import unpack_package
from tests.small_disk import file_system, fill
from tests.worker.conftest import package


def archive(*members: tuple[str, bytes, str], content: bytes = b"") -> bytes:
    """A gzipped tar of (name, type, link target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


REFUSED: list[tuple[str, Callable[[], bytes], str]] = [
    ("parent folder", lambda: archive(("../evil", tarfile.REGTYPE, "")), "'..'"),
    ("parent folder inside", lambda: archive(("a/../../evil", tarfile.REGTYPE, "")), "'..'"),
    ("absolute", lambda: archive(("/etc/evil", tarfile.REGTYPE, "")), "absolute"),
    ("link out", lambda: archive(("a", tarfile.SYMTYPE, "../../etc/passwd")), "outside"),
    ("absolute link", lambda: archive(("a", tarfile.SYMTYPE, "/etc/passwd")), "outside"),
    ("hard link out", lambda: archive(("a/b", tarfile.LNKTYPE, "../x")), "outside"),
    (
        "through a link",
        lambda: archive(
            ("d/e", tarfile.DIRTYPE, ""), ("d/e/up", tarfile.SYMTYPE, "../.."), ("d/e/up/../x", tarfile.REGTYPE, "")
        ),
        "'..'",
    ),
    ("device", lambda: archive(("null", tarfile.CHRTYPE, "")), "device"),
    ("pipe", lambda: archive(("pipe", tarfile.FIFOTYPE, "")), "device"),
    ("too many", lambda: archive(*((f"f{n}", tarfile.REGTYPE, "") for n in range(11))), "more than 10 files"),
    ("a bomb", lambda: archive(("zeros", tarfile.REGTYPE, ""), content=bytes(2_000_000)), "more than 1,000,000 bytes"),
    ("no tar", lambda: b"print('hello')", "gzipped tar"),
    ("nothing", lambda: b"", "gzipped tar"),
    ("cut short", lambda: package({"task.py": bytes(range(256)) * 100})[:100], "gzipped tar"),
    ("empty", lambda: archive(), "empty"),
]


@pytest.mark.parametrize(("content", "expected"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_unsafe_package_is_refused_as_a_whole(content: Callable[[], bytes], expected: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "package", tmp_path / "in" / "code"
    file.write_bytes(content())
    with pytest.raises(PackageError, match=expected):
        unpack_package(file, folder, max_bytes=1_000_000, max_files=10)
    assert not folder.exists()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


def test_valid_package_replaces_the_folder(tmp_path: Path) -> None:
    file, folder = tmp_path / "package", tmp_path / "code"
    (folder / "old").mkdir(parents=True)
    file.write_bytes(package({"task.py": b"x = 1", "lib/a.py": b""}))
    unpack_package(file, folder)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == ["lib", "lib/a.py", "task.py"]


def test_a_full_disk_is_not_the_package_s_fault(tmp_path: Path) -> None:
    file = tmp_path / "package"
    file.write_bytes(package({"task.py": b"x" * 10_000}))
    with file_system(tmp_path / "disk", "1m") as disk:
        fill(disk)
        with pytest.raises(OSError, match="No space left") as caught:
            unpack_package(file, disk / "code")
        assert caught.value.errno in DISK_FULL
        assert not (disk / "code").exists()
