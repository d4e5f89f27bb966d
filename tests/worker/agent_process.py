"""The agent as a process of its own, to be killed: with the real executor and fake ranks.

The wall clock is off by as many seconds as the file says that SKEW_FILE names, from one moment to the next.
"""

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from services.kit.clock import SystemClock
from services.worker.app import build
from services.worker.launch.executor import ProcessExecutor
from services.worker.settings import WorkerSettings

SKEW_FILE = "SKEW_FILE"


def skewed_now(_: SystemClock) -> datetime:
    path = Path(os.environ[SKEW_FILE])
    skew_s = float(path.read_text()) if path.exists() else 0.0
    return datetime.now(UTC) + timedelta(seconds=skew_s)


if __name__ == "__main__":
    fake = (sys.executable, str(Path(__file__).parent / "fake_rank.py"))
    if SKEW_FILE in os.environ:
        SystemClock.now = skewed_now  # type: ignore[assignment,method-assign]
    build(WorkerSettings(), ProcessExecutor(rank_command=fake)).main()
