"""What a program costs as a whole process: seconds from its start to its end, and memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

REPEATS = 5
#: Starts a process and says on stderr how it ended. A process counts the memory of the one that it was forked from as
#: its own: this one is small.
LAUNCHER = """
import os, sys, time
began = time.perf_counter()
to_stdout = [(os.POSIX_SPAWN_DUP2, 1, 2)]
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=to_stdout)
_, status, usage = os.wait4(process, 0)
took_s = time.perf_counter() - began
print(os.waitstatus_to_exitcode(status), took_s, usage.ru_maxrss, file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command needs: the median and the longest time, and the most memory."""

    median_s: float
    longest_s: float
    memory_mb: float


def measure_process(arguments: list[str], environment: Mapping[str, str], exit_code: int = 0) -> Cost:
    """Run a process several times, with ``environment`` over this process's own.

    Before that it runs once, unmeasured: then Python has the byte code of everything, as where it was installed.

    Raises:
        RuntimeError: it ended with another exit code; the text has its output.
    """
    times, memory = [], 0.0
    environment = {**os.environ, "COLUMNS": "160", **environment}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(1 + REPEATS):
        done = subprocess.run(
            [sys.executable, "-S", "-c", LAUNCHER, *arguments], env=environment, capture_output=True, text=True
        )
        code, took_s, size = done.stderr.splitlines()[-1].split()
        if int(code) != exit_code:
            raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {done.stdout}")
        times.append(float(took_s))
        memory = max(memory, int(size) * 1024 / 1e6)
    return Cost(statistics.median(times[1:]), max(times[1:]), memory)
