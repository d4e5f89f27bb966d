"""The README's first command, over and over, on machines that are slower or smaller than ours.

    python -m loadtest.demo --rounds 20
    python -m loadtest.demo --rounds 20 --only one-core

Each round is a demo on a fresh stack. It fails if anything that the demo promises was not seen. The time limit of a
round only ends a demo that hangs. Each kind of machine has a result of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.common import report

#: Seconds, on two free cores.
TARGET_MEDIAN_S = 90.0
LIMIT_S = 900.0
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@contextmanager
def busy_loops() -> Iterator[None]:
    """Keep every core busy with a loop of Python."""
    command = [sys.executable, "-c", "while True: pass"]
    cores = sorted(os.sched_getaffinity(0))
    loops = [subprocess.Popen(["taskset", "-c", str(core), *command]) for core in cores]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@dataclass(frozen=True, slots=True)
class Condition:
    """What a machine is like: a prefix of the command, and what runs beside it."""

    key: str
    name: str
    prefix: tuple[str, ...] = ()
    beside: Callable[[], AbstractContextManager[None]] = nullcontext


CONDITIONS = (
    Condition("free", "all cores, and nothing else runs"),
    Condition("one-core", "one core", ("taskset", "-c", str(min(os.sched_getaffinity(0))))),
    Condition("busy", "a busy loop on each core", beside=busy_loops),
    Condition("small-shm", "64 MB of shared memory", ("unshare", "--mount", "sh", "-c", SMALL_SHM, "sh")),
)


def play(condition: Condition) -> tuple[float, list[str]]:
    """Run the demo once; return its seconds, and what it missed (its last lines, if it was broken off)."""
    with tempfile.TemporaryDirectory(prefix="trainbus-demo-") as folder:
        log = Path(folder) / "demo.log"
        command = [
            *condition.prefix,
            sys.executable,
            "-m",
            "trainbus",
            "demo",
            "--data-dir",
            str(Path(folder) / "data"),
        ]
        started = time.monotonic()
        with condition.beside(), log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait()
        seconds = time.monotonic() - started
        lines = log.read_text(errors="replace").splitlines()
    missed = [line.removeprefix("✗ ") for line in lines if line.startswith("✗")]
    return seconds, [] if code == 0 else missed or [f"exit code {code}", *lines[-5:]]


def measure(condition: Condition, rounds: int) -> dict[str, Any]:
    """Return the seconds of each round and what was missed."""
    seconds, missed = [], []
    for number in range(1, rounds + 1):
        took_s, problems = play(condition)
        seconds.append(round(took_s, 1))
        missed += [{"round": number, "problems": problems}] if problems else []
        print(f"{condition.key}, {number} of {rounds}: {took_s:.0f} s {'; '.join(problems)}", flush=True)
    return {"rounds": rounds, "failed": len(missed), "seconds": seconds, "missed": missed}


def rows(condition: Condition, found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table."""
    seconds: Sequence[float] = found["seconds"]
    target = f"target {TARGET_MEDIAN_S:.0f} s" if condition.key == "free" else ""
    times = f"median {statistics.median(seconds):.0f} s, {min(seconds):.0f} to {max(seconds):.0f} s"
    return [
        ("as promised", f"{found['rounds'] - found['failed']} of {found['rounds']}", "all"),
        ("seconds", times, target),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    keys = [condition.key for condition in CONDITIONS]
    parser.add_argument("--only", action="append", choices=keys, help="this kind of machine, once or more")
    arguments = parser.parse_args()
    failed = 0
    for condition in CONDITIONS:
        if condition.key in (arguments.only or keys):
            found = measure(condition, arguments.rounds)
            report(f"demo-{condition.key}", rows(condition, found), {"condition": condition.name, **found})
            failed += found["failed"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
