"""Disk space as agents and ranks count it: what a folder takes, and which errors mean that there is none left."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

#: Numbers of the errors of a full disk, or of a share of it that is used up.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Suffix of a file of blanks beside a small one that is to be: its content goes over them when the disk is full.
SPARE = ".spare"


def measure_folder(folder: Path) -> int:
    """Return the bytes of all files below a folder; other processes may remove some meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total
