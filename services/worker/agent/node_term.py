"""The agent's side of the term of its lease: extended by renewals, watched by the guard, and the gate for starts."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import structlog

import contracts
from contracts.ranks import LAUNCH_VARIABLE
from services.kit.clock import boot_s
from services.kit.concurrency import run_in_thread
from services.worker.launch.lease_term import Term, TermFile, read_boot_id

log = structlog.get_logger(__name__)

#: The folder from which the guard imports ``services``.
PYTHON_ROOT = Path(contracts.__file__).resolve().parent.parent
#: Seconds between two looks whether the guard has come, or has ended.
POLL_S = 0.02


class GuardProcess:
    """The guard of this node's ranks, whichever life of the agent has started it."""

    def __init__(self, folder: Path, runs: Path, term_file: Path) -> None:
        self._folder, self._runs, self._term_file = folder, runs, term_file
        self._lock = folder / "guard.lock"
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    @property
    def is_running(self) -> bool:
        """Whether a guard has its lock."""
        if self._child is not None:
            self._child.poll()  # a guard that has ended is no zombie
        try:
            with self._lock.open("r") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    async def ensure_running(self) -> None:
        """Return once a guard runs, or there is no term to guard any more.

        Raises:
            OSError: none can be started.
        """
        async with self._starting:
            await self._start()

    async def _start(self) -> None:
        child: subprocess.Popen[bytes] | None = None
        while not self.is_running and self._term_file.exists():
            if child is not None and child.poll():
                raise OSError(f"the guard of the ranks cannot run: see {self._folder / 'guard.log'}")
            if child is None or child.poll() is not None:
                child = self._child = self._spawn()
            await asyncio.sleep(POLL_S)

    async def run_to_end(self) -> None:
        """Have a guard end the ranks of a term that is over, and wait until it has."""
        await self.ensure_running()
        for _ in iter(lambda: self.is_running, False):
            await asyncio.sleep(POLL_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = (str(self._runs), str(self._term_file), str(self._lock))
        with (self._folder / "guard.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "services.worker.launch.rank_guard", *paths, LAUNCH_VARIABLE],
                cwd="/",
                env={"PATH": os.defpath, "PYTHONPATH": str(PYTHON_ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


class NodeTerm:
    """The term of this node's lease. Ranks may start while it lasts and a guard watches it."""

    def __init__(self, data_dir: Path, ttl_s: float) -> None:
        folder = data_dir.resolve() / "agent"
        self._ttl_s = ttl_s
        self._file = TermFile(folder / "lease.json")
        self._guard = GuardProcess(folder, data_dir.resolve() / "runs", folder / "lease.json")
        self._term: Term | None = None
        self._is_closed = self._has_joined = False
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the term of an earlier life of the agent."""
        self._term = self._file.read()
        if self._term is None:
            self._file.remove()  # of an earlier boot of the machine

    @property
    def is_over(self) -> bool:
        """Whether the ranks of the term must end, or have ended."""
        return self._term is not None and (boot_s() >= self._term.stop_at or self._file.is_marked)

    @property
    def kill_in_s(self) -> float:
        """Seconds until the guard kills the ranks."""
        return 0.0 if self._term is None else max(self._term.kill_at - boot_s(), 0.0)

    def start_before(self) -> float | None:
        """Return the time of the boot clock before which a rank must start; None: none may start now."""
        if self._term is None or self.is_over or not self._guard.is_running:
            return None
        return self._term.stop_at

    async def extend(self, asked_at: float) -> None:
        """Extend the term by a renewal that was confirmed, unless it is over."""
        if self.is_over or self._is_closed:
            return
        term = Term(read_boot_id(), asked_at, self._trusted_ttl_s)
        async with self._writing:
            await run_in_thread(self._write, term)  # a disk may be busy for long

    def _write(self, term: Term) -> None:
        if not self._is_closed and self._file.write(term):
            self._term = term

    @property
    def _trusted_ttl_s(self) -> float:
        """The scheduler counts by the setting of the incarnation that joined last."""
        return self._ttl_s if self._has_joined or self._term is None else min(self._ttl_s, self._term.ttl_s)

    def note_joined(self) -> None:
        """Note that the scheduler counts by this incarnation's setting from now on."""
        self._has_joined = True

    async def ensure_guard(self) -> None:
        """Return once a guard watches the term."""
        if self._term is not None:
            await self._guard.ensure_running()

    async def settle(self) -> None:
        """Wait until the ranks of a term that is over are dead; the next renewal then begins another one."""
        log.warning("the node's lease is over, waiting until its ranks have ended")
        await self._guard.run_to_end()
        self._file.remove()
        self._term = None

    def close(self) -> None:
        """End the term and its guard: no rank is left, and the agent renews no more."""
        self._is_closed = True
        self._file.remove()
