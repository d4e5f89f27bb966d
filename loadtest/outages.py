"""Histories with outages: parts that hang or are killed for 1, 20 and 90 seconds, and what must come out all the same.

    python -m loadtest.outages --count 200

Each history is a run on an embedded stack that trains, is evaluated and promoted, while one to three of its services,
servers and agents are stopped (SIGSTOP) or killed (SIGKILL, again and again) for a while at random steps. The state
that it is completed with, its measured metrics and its verdict must be those of the run that nothing was done to, and
each address that its facts name must be there. The same number is the same history, as far as clocks allow. Only
processes of its own stack are touched.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.common import report
from services.kit.concurrency import gather_limited
from tests.e2e.outages import Outage, Outcome, draw, play
from tests.e2e.support import Stack, connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

SECONDS = (1.0, 20.0, 90.0)


class Board:
    """What is known so far, over all stacks."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.lines: list[dict[str, Any]] = []
        self._progress = progress
        self._bar = progress.add_task("outages", total=total, unlike=0)

    def add(self, number: int, outages: tuple[Outage, ...], difference: str, seconds: float) -> None:
        """Add a history that was played."""
        done = [str(outage) for outage in outages]
        self.lines.append({"number": number, "outages": done, "difference": difference, "seconds": round(seconds, 1)})
        if difference:
            self._progress.console.print(f"[red]{number}: {'; '.join(done)}: {difference}")
        unlike = sum(bool(each["difference"]) for each in self.lines)
        self._progress.update(self._bar, advance=1, unlike=unlike)


async def play_all(data_dirs: Sequence[Path], numbers: range, seed: int, at_a_time: int, board: Board) -> None:
    """Play the histories on several stacks side by side."""
    shares = [numbers[place :: len(data_dirs)] for place in range(len(data_dirs))]
    await asyncio.gather(
        *(_play_on(data_dir, share, seed, at_a_time, board) for data_dir, share in zip(data_dirs, shares, strict=True))
    )


async def _play_on(data_dir: Path, numbers: range, seed: int, at_a_time: int, board: Board) -> None:
    async with connected(data_dir) as stack:
        await stack.fill_lake()
        _, reference = await play(stack)

        async def one(number: int) -> None:
            outages, started = draw(number, SECONDS, seed), time.perf_counter()
            difference = await _difference(stack, outages, reference)
            board.add(number, outages, difference, time.perf_counter() - started)

        await gather_limited((one(number) for number in numbers), limit=at_a_time)


async def _difference(stack: Stack, outages: tuple[Outage, ...], reference: Outcome) -> str:
    """Play one history; return how it differs from the undisturbed run ('': not at all)."""
    try:
        run_id, outcome = await play(stack, outages)
    except Exception as error:  # whatever it was: it is this history's result
        return f"{type(error).__name__}: {error}"[:500]
    return "" if outcome == reference else f"{run_id} ended as {outcome}, not as {reference}"


def show(lines: list[dict[str, Any]], outages: list[Outage], wall_s: float) -> None:
    """Print the table and keep it."""
    equal = sum(not line["difference"] for line in lines)
    by_target = Counter(f"{outage.how} {outage.target}" for outage in outages)
    lengths = Counter(outage.seconds for outage in outages)
    seconds = [line["seconds"] for line in lines]
    rows = [
        ("state, metrics, verdict and addresses as undisturbed", f"{equal} of {len(lines)}", "all of them"),
        ("outages", ", ".join(f"{what} {n}" for what, n in by_target.most_common()), ""),
        ("how long", ", ".join(f"{length:g} s: {n}" for length, n in sorted(lengths.items())), ""),
        ("seconds a history", f"{statistics.median(seconds):.0f} (median), {max(seconds):.0f} (longest)", ""),
        ("wall time", f"{wall_s / 60:.0f} min", ""),
    ]
    report("outages", rows, {"histories": lines, "wall_s": round(wall_s)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at-a-time", type=int, default=3, help="histories on the stack at a time, which share outages"
    )
    parser.add_argument("--stacks", type=int, default=1, help="stacks side by side")
    parser.add_argument("--keep", type=Path, help="folder for the stacks' data and logs, kept")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    numbers = range(arguments.first, arguments.first + arguments.count)
    columns = (TextColumn("{task.fields[unlike]} unlike the undisturbed run"), TimeRemainingColumn())
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="trainbus-outages-") as scratch,
        Progress(TextColumn("outages"), BarColumn(), MofNCompleteColumn(), *columns) as progress,
        ExitStack() as stacks,
    ):
        folders = [(arguments.keep or Path(scratch)) / str(place) for place in range(arguments.stacks)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            started_stack = StackProcess(StackOptions(folder / "data"), output=folder / "output.log")
            stacks.enter_context(started_stack).wait_ready()
        board = Board(progress, len(numbers))
        data_dirs = [folder / "data" for folder in folders]
        asyncio.run(play_all(data_dirs, numbers, arguments.seed, arguments.at_a_time, board))
    lines = sorted(board.lines, key=lambda each: int(each["number"]))
    outages = [outage for number in numbers for outage in draw(number, SECONDS, arguments.seed)]
    show(lines, outages, time.perf_counter() - started)
    failed = [line for line in lines if line["difference"]]
    for line in failed:
        Console().print(f"[red]{line['number']}: {line['difference']}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
