"""The agent as a process of its own, to be killed: with the real executor and fake ranks."""

import sys
from pathlib import Path

from services.worker.app import build
from services.worker.launch.executor import ProcessExecutor
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    fake = (sys.executable, str(Path(__file__).parent / "fake_rank.py"))
    build(WorkerSettings(), ProcessExecutor(rank_command=fake)).main()
