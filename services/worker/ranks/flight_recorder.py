"""The flight recorders of ranks that use NCCL: which collectives each rank has begun, and how far they got.

torch keeps the last collectives in a ring in every process. It makes a named pipe for each rank, and a thread of its
own writes the ring to a file when something is written to the pipe, also while the rank hangs in a collective. The file
is a pickle, which the agent never opens: `torchfrtrace` reads the files of all ranks and names the missing one.
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

#: torch's thread polls its pipe once a second, and then queries every stream.
ANSWER_S = 5.0
POLL_S = 0.05
#: A file that has not changed for this long is whole.
QUIET_S = 0.3
#: ``core/rank_environment.py`` sets the names; torch adds the rank and the suffix.
_PIPE = re.compile(r"(flight_g\d+_(\d+))\.pipe")


def write_dumps(folder: Path) -> dict[int, Path]:
    """Make every rank with a recorder in ``folder`` write it; return the files by rank. Takes seconds at most."""
    pipes = {path: name for path in folder.iterdir() if (name := _PIPE.fullmatch(path.name))}
    dumps = {int(name[2]): (pipe, folder / name[1]) for pipe, name in pipes.items()}
    before_ns = {rank: _written_ns(path) for rank, (_, path) in dumps.items()}
    missing = {rank for rank, (pipe, _) in dumps.items() if _request_dump(pipe)}
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


def describe_dump(rank: int, dump: Path, uri: str | None) -> str:
    """Return a line that says where a dump is and what reads it."""
    where = uri or f"{dump} on the node"
    return f"flight recorder of rank {rank}: {where} (`torchfrtrace` reads those of all ranks from one folder)"


def _written_ns(path: Path) -> int:
    """Return when a file was last written; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _request_dump(pipe: Path) -> bool:
    """Write to a rank's pipe; return whether a rank reads it. One that has ended must not be waited for."""
    try:
        end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ENXIO:
            log.warning("a flight recorder cannot be requested", pipe=str(pipe), error=str(error))
        return False
    try:
        return stat.S_ISFIFO(os.fstat(end).st_mode) and os.write(end, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(end)
