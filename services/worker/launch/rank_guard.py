"""The guard of a node: ends its ranks once the term of the node's lease is over, whatever has become of the agent.

A small process in a session of its own, which outlives the agent: ``python -m services.worker.launch.rank_guard``. It
ends with its work: after a term that was over, or when the agent has removed the term because no rank is left. The
agent starts another one for the next term, and starts no rank without one.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO

from services.kit.clock import boot_s
from services.worker.launch.lease_term import Term, TermFile, read_boot_id
from services.worker.launch.processes import find_processes, find_sessions, read_processes
from services.worker.local_files import take_held_space

#: Seconds between two looks at the term, and at the ranks while they end. Sleep does not count while the machine is
#: suspended, so a longer one would come too late after that.
POLL_S = 0.1
#: Seconds to get the lock, which the agent takes for a moment to see whether there is a guard.
LOCK_PATIENCE_S = 2.0
#: The request to stop in a generation's folder, and the guard's own file beside it, as the agent may write the request
#: in the same moment: when the guard signalled the ranks, and whether it killed them.
STOP_NAME, SIGNALS_NAME = "stop.json", "guard.json"
REASON = "the node's lease is over, and its agent did not stop the ranks"


class RankGuard:
    """Watches one term, and ends the ranks in ``runs`` when it is over."""

    def __init__(self, runs: Path, term_file: Path, launch_variable: str) -> None:
        self._runs, self._term_file, self._launch_variable = runs, TermFile(term_file), launch_variable
        self._asked: set[Path] = set()
        self._killed: set[Path] = set()

    def run(self) -> None:
        """Wait until the term is over, and end the ranks; return at once when there is no term."""
        while (term := self._term_file.read()) is not None:
            if boot_s() >= term.guard_at and self._term_file.mark_over():
                self._end_ranks(term)
                return
            time.sleep(POLL_S)

    def _end_ranks(self, term: Term) -> None:
        is_done = False
        while not is_done:
            try:
                is_done = self._end_found(term)
            except Exception as error:  # a file that cannot be read must not keep the ranks alive
                _log(repr(error))
            time.sleep(POLL_S)

    def _end_found(self, term: Term) -> bool:
        """Ask the ranks that are found to end, or kill them; return whether there were none."""
        found = self._find_ranks()
        for folder, pids in found.items():
            if boot_s() >= term.kill_at:
                self._kill(folder, pids)
            elif folder not in self._asked:
                self._asked.add(folder)
                self._terminate(folder, pids, term.kill_at - boot_s())
        return not found

    def _find_ranks(self) -> dict[Path, set[int]]:
        launched = (path.parent for path in self._runs.glob("*/g*/launch.json"))
        sessions = {
            folder: find_sessions(read_processes(folder)) for folder in launched if not (folder / "done.json").exists()
        }
        found: dict[Path, set[int]] = {}
        for folder, pid in find_processes(sessions, self._launch_variable) if sessions else ():
            found.setdefault(folder, set()).add(pid)
        return found

    def _terminate(self, folder: Path, pids: Collection[int], grace_s: float) -> None:
        """Ask the ranks to end, unless the agent has: a second SIGTERM ends some scripts at once."""
        stop = folder / STOP_NAME
        if stop.exists():
            return
        _log(f"{folder}: {REASON}")
        _note_signal(folder, killed=False)
        _write_json(stop, _stop_request(grace_s))
        sessions = find_sessions(read_processes(folder))
        for session in sessions:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGTERM)
        for pid in () if sessions else pids:  # the agent was held while it started them
            _signal(pid, signal.SIGTERM)

    def _kill(self, folder: Path, pids: Collection[int]) -> None:
        if folder not in self._killed:
            self._killed.add(folder)
            _log(f"{folder}: killed {sorted(pids)}")
            _note_signal(folder, killed=True)
            if not (folder / STOP_NAME).exists():
                _write_json(folder / STOP_NAME, _stop_request(0.0))
        for pid in pids:
            _signal(pid, signal.SIGKILL)


def _log(text: str) -> None:
    with suppress(OSError):  # a full disk
        print(text, flush=True)


def _note_signal(folder: Path, *, killed: bool) -> None:
    """Note why the ranks end: the agent must not take it for an end of their own."""
    _write_json(folder / SIGNALS_NAME, {"signalled_at": time.time(), "killed": killed})


def _stop_request(grace_s: float) -> dict[str, object]:
    """Return what the agent writes when it stops a generation (``StopRequest``)."""
    times = {"grace_s": grace_s, "deadline": boot_s() + grace_s, "boot_id": read_boot_id()}
    return {**times, "reason": REASON, "bounds_upload": False}


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _write_json(path: Path, content: dict[str, object]) -> None:
    partial = path.with_name(f".{path.name}.guard")
    data = json.dumps(content).encode()
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:  # a full disk must not keep the ranks alive
        partial.unlink(missing_ok=True)
        take_held_space(path, data)


def hold_lock(path: Path) -> IO[str] | None:
    """Lock the file for as long as this process lives; return None if another guard has it."""
    handle = path.open("a")
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)


def main() -> None:
    runs, term_file, lock, launch_variable = sys.argv[1:]
    with suppress(OSError):  # the last process that the kernel may take; only root may ask for that
        Path("/proc/self/oom_score_adj").write_text("-1000")
    held = hold_lock(Path(lock))
    if held is not None:
        RankGuard(Path(runs), Path(term_file), launch_variable).run()


if __name__ == "__main__":
    main()
