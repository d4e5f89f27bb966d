"""Ends a rank's process. gloo and NCCL can hang in their teardown, so a rank skips it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from contracts.disk_space import SPARE

#: The file that the exit code goes to. Set in ranks forked from a warm process, which may have ended by then; a shell
#: writes the code of a rank that it started.
exit_file: Path | None = None


def hard_exit(code: int) -> NoReturn:
    """End this process now, with its output flushed and its exit code on disk."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed or full log must not keep the process alive
            stream.flush()
    if exit_file is not None:
        with contextlib.suppress(OSError):
            write_exit_file(exit_file, code)
    os._exit(code)


def write_exit_file(path: Path, code: int) -> None:
    """Write ``code`` so that a reader sees all of it or nothing, also on a full disk."""
    spare = path.with_name(path.name + SPARE)
    fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{code}\n".encode())
    finally:
        os.close(fd)
    spare.replace(path)
