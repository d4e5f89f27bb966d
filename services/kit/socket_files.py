"""Paths of Unix sockets, which the system keeps short."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

#: Bytes that the path of a Unix socket may have on every system.
PATH_MAX_BYTES = 100


def socket_path(folder: Path, name: str) -> Path:
    """Return the path of a socket: in ``folder``, or among the temporary files if that path would be too long."""
    path = folder.resolve() / name
    if len(os.fsencode(path)) <= PATH_MAX_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:24]
    private = Path(tempfile.gettempdir()) / f"trainbus-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    return private / f"{digest}.sock"
