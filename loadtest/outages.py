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


async def play_all(
    data_dir: Path, numbers: range, seed: int, at_a_time: int, progress: Progress
) -> list[dict[str, Any]]:
    """Play the histories; return a line for each."""
    found: list[dict[str, Any]] = []
    async with connected(data_dir) as stack:
        await stack.fill_lake()
        _, reference = await play(stack)
        bar = progress.add_task("outages", total=len(numbers), unlike=0)

        async def one(number: int) -> None:
            outages, started = draw(number, SECONDS, seed), time.perf_counter()
            difference = await _difference(stack, outages, reference)
            found.append(_line(number, outages, difference, time.perf_counter() - started))
            if difference:
                progress.console.print(f"[red]{number}: {'; '.join(map(str, outages))}: {difference}")
            progress.update(bar, advance=1, unlike=sum(bool(each["difference"]) for each in found))

        await gather_limited((one(number) for number in numbers), limit=at_a_time)
    return sorted(found, key=lambda each: int(each["number"]))


async def _difference(stack: Stack, outages: tuple[Outage, ...], reference: Outcome) -> str:
    """Play one history; return how it differs from the undisturbed run ('': not at all)."""
    try:
        run_id, outcome = await play(stack, outages)
    except Exception as error:  # whatever it was: it is this history's result
        return f"{type(error).__name__}: {error}"[:500]
    return "" if outcome == reference else f"{run_id} ended as {outcome}, not as {reference}"


def _line(number: int, outages: tuple[Outage, ...], difference: str, seconds: float) -> dict[str, Any]:
    done = [str(outage) for outage in outages]
    return {"number": number, "outages": done, "difference": difference, "seconds": round(seconds, 1)}


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
    parser.add_argument("--keep", type=Path, help="folder for the stack's data and logs, kept")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    numbers = range(arguments.first, arguments.first + arguments.count)
    columns = (TextColumn("{task.fields[unlike]} unlike the undisturbed run"), TimeRemainingColumn())
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="trainbus-outages-") as scratch,
        Progress(TextColumn("outages"), BarColumn(), MofNCompleteColumn(), *columns) as progress,
    ):
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options = StackOptions(folder / "data")
        with StackProcess(options, output=folder / "output.log") as stack:
            stack.wait_ready()
            lines = asyncio.run(play_all(options.data_dir, numbers, arguments.seed, arguments.at_a_time, progress))
    outages = [outage for number in numbers for outage in draw(number, SECONDS, arguments.seed)]
    show(lines, outages, time.perf_counter() - started)
    failed = [line for line in lines if line["difference"]]
    for line in failed:
        Console().print(f"[red]{line['number']}: {line['difference']}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
