"""The exits of ranks: which failure is the cause of the others, and whose fault it is."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.ranks import EXIT_DONE, EXIT_STOPPED, is_about_lost_peer

#: Lines that are searched for the cause: torchrun writes some forty of its own below it.
SEARCHED_LINES = 200
#: Exit codes of a process that SIGKILL ended: for subprocess, for a shell.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|errno: ?98\b", re.IGNORECASE)
#: torch's errors when the other nodes' ranks never came to the rendezvous.
_PEERS_MISSING = re.compile(r"DistStoreError|DistNetworkError: The client socket has timed out|wait timeout after \d+")
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")

#: How torchrun's own report of a failed child begins, and where it names the first one that failed.
_TRACEBACK = "Traceback (most recent call last):"
_CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_ROOT_CAUSE = re.compile(r"Root Cause.*?^ *rank +: (\d+).*?^ *exitcode +: (-?\d+)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process ended. ``at`` orders the exits: the first failure is the cause of the others."""

    rank: int
    code: int
    at: float


def describe_exit(code: int) -> str:
    """Return an exit code in words. A signal n is 128 + n to shells, -n to subprocess."""
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        try:
            return f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return f"was killed by signal {number}"
    return f"ended with exit code {code}"


def find_cause(failure: Exit, lines: Sequence[str]) -> tuple[Exit, tuple[str, ...]]:
    """Return the rank that failed and its lines, without torchrun's own report, which names that rank."""
    reported = next((number for number, line in enumerate(lines) if line.startswith(_CHILD_FAILED)), None)
    if reported is None:
        return failure, tuple(lines)
    begins = max((number for number in range(reported) if lines[number] == _TRACEBACK), default=reported)
    if found := _ROOT_CAUSE.search("\n".join(lines[reported:])):
        failure = Exit(int(found[1]), int(found[2]), failure.at)
    return failure, tuple(lines[:begins])


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Return the first process that failed."""
    failures = [each for each in exits if each.code not in (EXIT_DONE, EXIT_STOPPED)]
    return min(failures, key=lambda each: each.at) if failures else None


def first_own_failure(exits: Sequence[Exit], tail: Callable[[int], Sequence[str]]) -> Exit | None:
    """Return the first process that failed; if it misses a peer, the first one that failed by itself, if any did.

    A rank that breaks may take longer to end than a peer that misses it.

    Args:
        tail: the last lines that a rank printed.
    """
    first = first_failure(exits)
    if first is None or not _misses_peer(tail(first.rank)):
        return first
    # The agent kills those that outlive a failure.
    own = [each for each in exits if each.code not in KILLED and not _misses_peer(tail(each.rank))]
    return first_failure(own) or first


def _misses_peer(lines: Sequence[str]) -> bool:
    return any(is_about_lost_peer(line) for line in lines)


def all_succeeded(exits: Sequence[Exit]) -> bool:
    """Whether every process has finished its work."""
    return all(each.code == EXIT_DONE for each in exits)


def is_infrastructure_failure(started: bool, text: str) -> bool:
    """Whether the run is not at fault: a port was taken meanwhile, the peers were away, or the disk was full.

    Peers that fail report it themselves, and the generation is stopped long before a rank stops waiting for them.
    """
    return not started and any(sign.search(text) for sign in (_PORT_TAKEN, _PEERS_MISSING, _DISK_FULL))
