"""File systems of a few megabytes, for what happens when they are full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.worker import local_files


@contextmanager
def file_system(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size; skip the test where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    # Its device may have the number of an earlier one, of which the log has had its message.
    local_files._logged_at.clear()
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte of the file system; return the file whose removal frees it."""
    filler = folder / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return filler
