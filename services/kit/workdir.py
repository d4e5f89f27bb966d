"""Working folders that do not outlive their process, even when it is killed."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path
from typing import Self

LOCK = ".lock"


class Workdir:
    """A folder of this process's own under ``root``; use it as an async context manager.

    It holds a file lock, which the kernel drops however the process ends: folders whose lock is
    free were left behind, and are removed on entering.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        if self._path is None:
            raise RuntimeError("the working folder is not open: use it as a context manager")
        return self._path

    def temporary(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        """Create a folder inside for one piece of work."""
        return tempfile.TemporaryDirectory(dir=self.path, prefix=prefix, ignore_cleanup_errors=True)

    async def __aenter__(self) -> Self:
        self._root.mkdir(parents=True, exist_ok=True)
        # One newcomer at a time: a folder just made and not yet locked must not be taken for left behind.
        with (self._root / LOCK).open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for folder in self._root.iterdir():
                if folder.is_dir() and _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            self._path = Path(tempfile.mkdtemp(dir=self._root))
            self._lock = (self._path / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    async def __aexit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
