"""Run every test: ``python -m tests.suite``, which ``make test`` does.

The lanes run one after the other, the cheapest first, each with its files spread over WORKERS processes. All lanes run,
so that one red test hides no other. A failed test of a server or of a whole stack runs again, alone. The last lines are
the tests that failed and the count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.suite import flaky
from tests.suite.lanes import LANES, Lane
from tests.suite.outcomes import Outcome, read_outcomes

ROOT = Path(__file__).parents[2]
#: pytest's exit codes for "all passed", "some failed" and "none were selected".
EXIT_PASSED, EXIT_FAILED, EXIT_NONE = 0, 1, 5
#: More flaky tests than this in one run: it is the change that is shaky.
MAX_FLAKY = 2


def run_pytest(arguments: list[str], folder: Path) -> tuple[int, list[Outcome]]:
    """Run pytest in a process of its own, without standard input; return its exit code and how each test ended."""
    file = Path(tempfile.mkstemp(dir=folder, suffix=".jsonl")[1])
    # The root is named, because pytest would look for it above each path on its command line.
    options = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), f"--outcomes={file}"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.suite.outcomes", *options, *arguments]
    code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
    return code, read_outcomes(file)


def run_lane(lane: Lane, workers: int, more: list[str], folder: Path) -> list[Outcome]:
    """Run the tests of a lane; what pytest itself cannot do is an outcome, too."""
    print(f"\n=== {lane.name}: {lane.what} ===", flush=True)
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else ["-p", "no:xdist"]
    code, outcomes = run_pytest(["-q", "-m", lane.marker, *spread, *more], folder)
    red = any(outcome.result in ("failed", "broken") for outcome in outcomes)
    if code not in (EXIT_PASSED, EXIT_NONE) and not (code == EXIT_FAILED and red):
        outcomes.append(Outcome(f"lane {lane.name}", "broken", error=f"pytest ended with exit code {code}"))
    return outcomes


def is_flaky(outcome: Outcome, programs: list[str], folder: Path) -> bool:
    """Return whether a failed test passes twice in a row, alone in a fresh process each time."""
    for attempt in (1, 2):
        print(f"\n=== again, alone ({attempt} of 2): {outcome.test} ===", flush=True)
        code, _ = run_pytest(["-q", "-p", "no:xdist", *programs, outcome.test], folder)
        if code != EXIT_PASSED:
            return False
    return True


def retry_failed(lane: Lane, outcomes: list[Outcome], programs: list[str], folder: Path) -> list[Outcome]:
    """Run the failed tests of a lane again, where it may; return the flaky ones. Their result becomes ``passed``.

    Args:
        programs: pytest's options that name programs of the system.
    """
    failed = [outcome for outcome in outcomes if outcome.result in ("failed", "broken")]
    may_retry = lane.retries and len(failed) <= MAX_FLAKY and all(outcome.result == "failed" for outcome in failed)
    found = []
    for outcome in failed if may_retry else []:
        if not outcome.is_hypothesis and is_flaky(outcome, programs, folder):
            outcome.result = "passed"
            found.append(outcome)
    return found


def print_summary(outcomes: list[Outcome], flaky_tests: list[Outcome], problems: list[str]) -> None:
    """Print the failed tests, and last the count."""
    red = [outcome for outcome in outcomes if outcome.result in ("failed", "broken")]
    skipped = [outcome for outcome in outcomes if outcome.result == "skipped"]
    print("\n=== summary ===")
    for outcome in skipped:
        print(f"SKIPPED {outcome.test}: {outcome.error}")
    for outcome in flaky_tests:
        print(f"FLAKY {outcome.test}: {outcome.error.splitlines()[0] if outcome.error else ''}")
    for outcome in red:
        print(f"FAILED {outcome.test}")
        print(f"    {outcome.error.splitlines()[0] if outcome.error else 'no message'}")
        for line in outcome.lines:
            print(f"    | {line}")
    for problem in problems:
        print(f"FAILED {problem}")
    passed = sum(outcome.result == "passed" for outcome in outcomes)
    counts = f"{passed} passed, {len(red) + len(problems)} failed"
    print(counts + (f", {len(skipped)} skipped" if skipped else ""), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("--workers", type=int, default=3, help="processes a lane; 0: pytest's own (default: 3)")
    parser.add_argument("--lane", action="append", choices=[lane.name for lane in LANES], help="only this lane")
    parser.add_argument("--with", action="append", default=[], dest="programs", help="a program (tests/conftest.py)")
    known, more = parser.parse_known_args()
    programs = [f"--with={program}" for program in known.programs]
    outcomes: list[Outcome] = []
    flaky_tests: list[Outcome] = []
    seconds: dict[str, tuple[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for lane in LANES:
            if known.lane and lane.name not in known.lane:
                continue
            started = time.monotonic()
            found = run_lane(lane, known.workers, [*programs, *more], Path(folder))
            flaky_tests += retry_failed(lane, found, programs, Path(folder))
            outcomes += found
            seconds[lane.name] = (len(found), time.monotonic() - started)
    problems = flaky.record(flaky_tests, MAX_FLAKY)
    for name, (count, took_s) in seconds.items():
        print(f"lane {name}: {count} tests in {took_s:.0f} s")
    if not outcomes:
        problems.append("no test was selected")
    print_summary(outcomes, flaky_tests, problems)
    return 1 if problems or any(outcome.result in ("failed", "broken") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
