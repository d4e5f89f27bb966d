"""The flight recorders of ranks that use NCCL: which collectives each has begun, and how far they got.

torch keeps the last ones in a ring in every process. It makes a named pipe for each rank, and writes the ring to a
file when somebody writes to the pipe; a thread of its own does that, also while the rank hangs in a collective. The
file is a pickle, so nobody here opens it: `torchfrtrace` reads those of all ranks together and names the one that is
missing.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

#: The thread looks at its pipe once a second; then it asks every stream how far it is.
ANSWER_S = 5.0
POLL_S = 0.05
#: A file that nobody has written to for so long is whole.
QUIET_S = 0.3
#: ``core/ranks.py`` gives the names; torch adds the rank and the ending.
_PIPE = re.compile(r"(flight_g\d+_(\d+))\.pipe")


def dumps(folder: Path) -> dict[int, Path]:
    """Have every rank that has a recorder in ``folder`` write it down; the files, by rank. Takes seconds at most."""
    pipes = {path: name for path in folder.iterdir() if (name := _PIPE.fullmatch(path.name))}
    dumps = {int(name[2]): (pipe, folder / name[1]) for pipe, name in pipes.items()}
    before_ns = {rank: _written_ns(path) for rank, (_, path) in dumps.items()}
    missing = {rank for rank, (pipe, _) in dumps.items() if _ask(pipe)}
    found: dict[int, Path] = {}
    deadline = time.monotonic() + ANSWER_S
    while missing and time.monotonic() < deadline:
        time.sleep(POLL_S)
        for rank in list(missing):
            path = dumps[rank][1]
            if before_ns[rank] < _written_ns(path) < time.time_ns() - QUIET_S * 1e9:
                found[rank] = path
                missing.remove(rank)
    if missing:
        log.warning("flight recorders did not answer", ranks=sorted(missing))
    return found


def told(rank: int, dump: Path, uri: str | None) -> str:
    """What people are told of a dump, and what to do with it."""
    where = uri or f"{dump} on the node"
    return f"flight recorder of rank {rank}: {where} (`torchfrtrace` reads those of all ranks from one folder)"


def _written_ns(path: Path) -> int:
    """When a file was last written; 0: there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _ask(pipe: Path) -> bool:
    """Whether a rank was asked: one that is gone reads no more, and must not make us wait."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ENXIO:
            log.warning("a flight recorder cannot be asked", pipe=str(pipe), error=str(error))
        return False
    try:
        return stat.S_ISFIFO(os.fstat(end).st_mode) and os.write(end, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(end)
