"""The term of the node's lease: until when its ranks may run. It is a file, which needs no living agent to be read.

Each renewal that the bus confirms extends the term, counted from when the renewal was *asked*: the scheduler cannot
have seen it earlier, so it cannot find the lease expired before ``asked_at + ttl_s``. Fixed shares of the lease follow:

- at ``STOP_SHARE`` the agent begins to stop its ranks gracefully,
- at ``GUARD_SHARE`` the guard does so for an agent that has not (it is stopped, dead, or too busy),
- at ``KILL_SHARE`` the guard kills what is left. The rest of the lease is the margin.

Times are those of the boot clock, which goes on while the machine is suspended and which nobody sets. A term that is
over stays over: later renewals save no rank, and nothing is started before all of its ranks are dead.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from services.kit.clock import boot_s
from services.worker.local_files import write_if_space

STOP_SHARE = 0.65
GUARD_SHARE = 0.72
KILL_SHARE = 0.9
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Term:
    """A confirmed renewal, as the file holds it."""

    boot_id: str
    asked_at: float
    ttl_s: float

    @property
    def stop_at(self) -> float:
        """When the agent begins to stop its ranks."""
        return self.asked_at + STOP_SHARE * self.ttl_s

    @property
    def guard_at(self) -> float:
        """When the guard does, if the agent has not."""
        return self.asked_at + GUARD_SHARE * self.ttl_s

    @property
    def kill_at(self) -> float:
        """When every rank that is left is killed."""
        return self.asked_at + KILL_SHARE * self.ttl_s


class TermFile:
    """The file of one node. Its two processes, the agent and the guard, agree by it and by the marker beside it."""

    def __init__(self, path: Path) -> None:
        self._path, self._marker = path, path.with_name("lease.over")

    def read(self) -> Term | None:
        """Return the term; None without one of this boot of the machine: then no rank of it is alive."""
        for attempt in range(3):
            try:
                term = Term(**json.loads(self._path.read_bytes()))
                return term if term.boot_id == read_boot_id() else None
            except FileNotFoundError:
                return None
            except (ValueError, TypeError):
                # A machine that lost power leaves an empty file; on a full disk the agent may just be writing over it.
                time.sleep(0.001 * attempt)
        return None

    def write(self, term: Term) -> bool:
        """Replace the term; return False where a full disk has no space for it."""
        return write_if_space(self._path, json.dumps(asdict(term)))

    def mark_over(self) -> bool:
        """Mark the term as over, unless it has just been extended; return whether it is.

        The agent writes and then looks at the marker, the guard marks and then reads: one of them sees the other.
        """
        self._marker.touch()
        term = self.read()
        if term is None or boot_s() >= term.guard_at:
            return True
        self._marker.unlink(missing_ok=True)
        return False

    @property
    def is_marked(self) -> bool:
        """Whether the guard ends the ranks of the term, or has."""
        return self._marker.exists()

    def remove(self) -> None:
        """Remove term and marker: no rank is left. The guard ends."""
        self._path.unlink(missing_ok=True)
        self._marker.unlink(missing_ok=True)


@cache
def read_boot_id() -> str:
    """Return what identifies this boot of the machine; '' where the system does not say."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""
