"""Random histories through the platform: whatever is done to an exact run, it ends with the same bits.

    python -m loadtest.histories --count 200

Each history is a run on an embedded stack (real services, a store, processes) whose ranks, agents, whole nodes and
services are killed with SIGKILL, and which is preempted, shrunk and grown by others' runs, at random times. Every
committed state's digest is compared with the undisturbed run's of the same configuration. Goes on where it was stopped
when the same ``--out`` is given; negative controls come last: plain DDP must differ, and other arithmetic must
be seen as another environment and come to other bits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loadtest.common import report
from services.kit.concurrency import gather_limited
from tests.e2e.history import Case, Config, Result, Theatre, any_config, draw
from tests.e2e.support import connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

NODES, SLOTS = 3, 4
Outcome = dict[str, Any]


class Record:
    """What came out so far, one JSON line a history, so that the rest can be played later."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.outcomes: list[Outcome] = [json.loads(line) for line in lines]

    @property
    def played(self) -> set[int]:
        return {outcome["number"] for outcome in self.outcomes}

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(outcome) + "\n")


async def play_all(data_dir: Path, cases: list[Case], at_a_time: int, record: Record, progress: Progress) -> Outcome:
    """Play ``cases`` and the negative controls."""
    async with connected(data_dir) as stack:
        theatre = await Theatre.open(stack, data_dir.parent / "dataset")
        bar = progress.add_task("histories", total=len(cases), equal=0, unlike=0)

        async def one(case: Case) -> None:
            started = time.perf_counter()
            try:
                result, difference = await theatre.play(case)
            except TimeoutError:
                result, difference = Result(), "not over in time"
            record.add(outcome_of(case, result, difference, time.perf_counter() - started))
            if difference:
                progress.console.print(f"[red]{case}: {difference}")
            unlike = sum(bool(each["difference"]) for each in record.outcomes)
            progress.update(bar, advance=1, unlike=unlike, equal=len(record.outcomes) - unlike)

        await gather_limited((one(case) for case in cases), limit=at_a_time)
        controls = await theatre.negative_controls(Config("CNN", 4))
    return controls


def outcome_of(case: Case, result: Result, difference: str, seconds: float) -> Outcome:
    return {
        "number": case.number,
        "config": str(case.config),
        "slots": case.slots,
        "deeds": result.done,
        "worlds": result.worlds,
        "resumed_from": dict(result.resumed_from),
        "compared_states": len(result.digests),
        "difference": difference,
        "seconds": round(seconds, 2),
    }


def show(outcomes: list[Outcome], controls: Outcome, wall_s: float) -> None:
    deeds = Counter(deed for each in outcomes for deed in each["deeds"])
    resumed = Counter[str]()
    for each in outcomes:
        resumed.update(each["resumed_from"])
    equal = sum(not each["difference"] for each in outcomes)
    worlds = Counter(world for each in outcomes for world in each["worlds"])
    seconds = [each["seconds"] for each in outcomes]
    rows = [
        ("equal to the undisturbed run, to the bit", f"{equal} of {len(outcomes)}", "all of them"),
        ("states compared", str(sum(each["compared_states"] for each in outcomes)), ""),
        ("generations", str(sum(len(each["worlds"]) for each in outcomes)), ""),
        ("ranks in a generation", ", ".join(f"{w}: {n}" for w, n in sorted(worlds.items())), "1 to V"),
        ("what was done", ", ".join(f"{deed} {n}" for deed, n in deeds.most_common()), ""),
        ("state taken from", ", ".join(f"{source} {n}" for source, n in resumed.most_common()), ""),
        ("seconds a history", f"{statistics.median(seconds):.1f} (median), {max(seconds):.1f} (longest)", ""),
        ("wall time", f"{wall_s / 60:.1f} min", "200 in less than 40 min"),
        *((name.replace("_", " "), "yes" if found else "NO", "yes") for name, found in controls.items()),
    ]
    report("histories", rows, {"outcomes": outcomes, "controls": controls, "wall_s": wall_s})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first history")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-a-time", type=int, default=3)
    parser.add_argument("--strategies", default="ddp,zero1,fsdp2")
    parser.add_argument("--out", type=Path, help="file of outcomes, to go on with")
    parser.add_argument("--keep", type=Path, help="folder for the stack's data and logs, kept")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    record = Record(arguments.out)
    numbers = [n for n in range(arguments.first, arguments.first + arguments.count) if n not in record.played]
    config = partial(any_config, strategies=arguments.strategies.split(","))
    cases = [draw(number, arguments.seed, config) for number in numbers]
    columns = (TextColumn("{task.fields[equal]} equal, {task.fields[unlike]} not"), TimeRemainingColumn())
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="trainbus-histories-") as scratch,
        Progress(TextColumn("histories"), BarColumn(), MofNCompleteColumn(), *columns) as progress,
    ):
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options = StackOptions(folder / "data", nodes=NODES, slots=SLOTS)
        with StackProcess(options, output=folder / "output.log") as stack:
            stack.wait_ready()
            controls = asyncio.run(play_all(options.data_dir, cases, arguments.at_a_time, record, progress))
    show(record.outcomes, controls, time.perf_counter() - started)
    failed = [each for each in record.outcomes if each["difference"]]
    for each in failed:
        Console().print(f"[red]history {each['number']} ({each['config']}): {each['difference']}")
    raise SystemExit(1 if failed or not all(controls.values()) else 0)


if __name__ == "__main__":
    main()
