"""Run every test: ``python -m tests.suite``, which ``make test`` does.

The files are spread over WORKERS processes, those of cores first, then those that take longest. All tests run, so that
one red test hides no other. A failed test of a server or of a whole stack runs again, alone. The last lines are the
tests that failed and the count.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.suite import flaky, longest
from tests.suite.lanes import LANES
from tests.suite.outcomes import Outcome, read_outcomes
from tests.suite.pauses import pause_children

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


def run_lanes(names: list[str], workers: int, more: list[str], folder: Path) -> list[Outcome]:
    """Run the tests of some lanes; what pytest itself cannot do is an outcome, too."""
    marker = " or ".join(f"({lane.marker})" for lane in LANES if lane.name in names)
    # One run of pytest for all: a worker imports what the tests need once.
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers else ["-p", "no:xdist"]
    code, outcomes = run_pytest(["-q", "-m", marker, *spread, *more], folder)
    red = any(outcome.is_red for outcome in outcomes)
    if code not in (EXIT_PASSED, EXIT_NONE) and not (code == EXIT_FAILED and red):
        outcomes.append(Outcome("tests", "broken", error=f"pytest ended with exit code {code}"))
    return outcomes


def is_flaky(outcome: Outcome, programs: list[str], folder: Path) -> bool:
    """Return whether a failed test passes twice in a row, alone in a fresh process each time."""
    for attempt in (1, 2):
        print(f"\n=== again, alone ({attempt} of 2): {outcome.test} ===", flush=True)
        code, _ = run_pytest(["-q", "-p", "no:xdist", *programs, outcome.test], folder)
        if code != EXIT_PASSED:
            return False
    return True


def retry_failed(outcomes: list[Outcome], programs: list[str], folder: Path) -> list[Outcome]:
    """Run the failed tests again, where they may; return the flaky ones. Their result becomes ``passed``.

    Args:
        programs: pytest's options that name programs of the system.
    """
    failed = [outcome for outcome in outcomes if outcome.is_red]
    found: list[Outcome] = []
    if len(failed) > MAX_FLAKY or any(outcome.result == "broken" for outcome in failed):
        return found
    lanes = {lane.name: lane for lane in LANES}
    for outcome in failed:
        if lanes[outcome.lane].retries and not outcome.is_hypothesis and is_flaky(outcome, programs, folder):
            outcome.result = "passed"
            found.append(outcome)
    return found


def print_lanes(names: list[str], outcomes: list[Outcome], took_s: float) -> None:
    """Print what each lane cost. Its seconds are those of all processes together."""
    print()
    for lane in LANES:
        if lane.name not in names:
            continue
        seconds = [outcome.seconds for outcome in outcomes if outcome.lane == lane.name]
        print(f"lane {lane.name} ({lane.needs}): {len(seconds)} tests, {sum(seconds):.0f} s of the processes")
    print(f"all after {took_s:.0f} s")


def print_summary(outcomes: list[Outcome], flaky_tests: list[Outcome], problems: list[str]) -> None:
    """Print the failed tests, and last the count."""
    red = [outcome for outcome in outcomes if outcome.is_red]
    skipped = [outcome for outcome in outcomes if outcome.result == "skipped"]
    print("\n=== summary ===")
    for outcome in skipped:
        print(f"SKIPPED {outcome.test}: {outcome.error}")
    for outcome in flaky_tests:
        print(f"FLAKY {outcome.test}: {outcome.first_line}")
    for outcome in red:
        print(f"FAILED {outcome.test}")
        print(f"    {outcome.first_line}")
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
    parser.add_argument(
        "--pauses", type=float, metavar="SECONDS", help="stop the tests' processes at random, each for up to this long"
    )
    parser.add_argument("--note-longest", action="store_true", help="write tests/longest.txt, which the order follows")
    known, more = parser.parse_known_args()
    programs = [f"--with={program}" for program in known.programs]
    names = known.lane or [lane.name for lane in LANES]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with pause_children(known.pauses) if known.pauses else nullcontext():
            outcomes = run_lanes(names, known.workers, [*programs, *more], Path(folder))
        flaky_tests = retry_failed(outcomes, programs, Path(folder))
    problems = flaky.record(flaky_tests, MAX_FLAKY)
    if known.note_longest:
        longest.note(outcomes)
    print_lanes(names, outcomes, time.monotonic() - started)
    if not outcomes:
        problems.append("no test was selected")
    print_summary(outcomes, flaky_tests, problems)
    return 1 if problems or any(outcome.is_red for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
