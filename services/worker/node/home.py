"""The home folder of ranks: where libraries keep their caches, on a node whose home folder cannot be written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)


def find_cache_home(environment: Mapping[str, str], data_dir: Path) -> str:
    """Return the folder for the caches of libraries; '' where the home folder can be written, in which they lie."""
    home = environment.get("HOME", "")
    if home and _is_writable(Path(home)):
        return ""
    folder = data_dir.resolve() / "home"
    log.warning("the home folder cannot be written: ranks have their caches elsewhere", home=home, caches=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _is_writable(folder: Path) -> bool:
    # Root may write by the permissions, and a read-only file system still refuses.
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
