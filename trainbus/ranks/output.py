"""The output of a rank, which goes to a file on the node's disk: a full disk costs lines, and not the run."""

from __future__ import annotations

import io
import sys
from typing import Any

from contracts.disk_space import DISK_FULL


class LossyFile(io.FileIO):
    """A descriptor to write to; what a full disk has no space for is dropped."""

    def write(self, data: Any, /) -> int:
        """Write the data, or what there is space for; return how many bytes are dealt with, None as FileIO."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            return memoryview(data).nbytes


def drop_output_on_full_disk() -> None:
    """Let ``print`` and tracebacks of this process succeed while the disk of its log is full."""
    sys.stdout, sys.stderr = (_open_lossy(stream) for stream in (sys.stdout, sys.stderr))


def _open_lossy(stream: Any) -> Any:
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream  # captured
    stream.flush()
    binary = io.BufferedWriter(LossyFile(number, "w", closefd=False))
    return io.TextIOWrapper(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
