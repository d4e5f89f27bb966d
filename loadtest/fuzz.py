"""Messages of any kind on the bus of a live stack: afterwards everything works as before.

    python -m loadtest.fuzz --count 100000

Hypothesis draws subjects, headers and bodies from the events' schemas, among them well-formed lies about runs and nodes
that exist. Then a normal run must go through, each command and page must work, each service must be ready, no slot may
be held by nobody, and a scheduler that folds the log anew must come to the same state. Only its own stack, on loopback,
gets the messages.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import structlog
from rich.progress import track

from loadtest.common import report
from tests.e2e.support import DONE_S, connected
from tests.fuzz.siege import Siege
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions

CHUNK = 1000


async def besiege(data_dir: Path, count: int, seed: int) -> tuple[Siege, float]:
    """Publish ``count`` messages and look around; return what was found and the seconds of the publishing."""
    async with connected(data_dir) as stack:
        await stack.fill_lake()
        over = await stack.publish(await stack.slow_run(epochs=1, step_s=0.0))
        await stack.wait_for(over, "completed", DONE_S)
        siege = Siege(stack)
        siege.before_s, started = await siege.time_a_run(), time.perf_counter()
        for chunk in track(range(-(-count // CHUNK)), "thousands of messages"):
            await siege.publish(min(CHUNK, count - chunk * CHUNK), seed + chunk, (over,))
        seconds = time.perf_counter() - started
        await siege.look_around()
    return siege, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the stack's data and logs, kept")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    with tempfile.TemporaryDirectory(prefix="trainbus-fuzz-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        options = StackOptions(folder / "data")
        with StackProcess(options, output=folder / "output.log") as process:
            process.wait_ready()
            siege, seconds = asyncio.run(besiege(options.data_dir, arguments.count, arguments.seed))
    rows = [
        ("messages published", f"{siege.published:,} of {arguments.count:,} drawn", "the client refuses the rest"),
        ("worse afterwards", "; ".join(siege.problems) or "nothing", "nothing"),
        ("a normal run", f"{siege.before_s:.1f} s before, {siege.after_s:.1f} s after", "as before"),
        ("seconds", f"{seconds:.0f}", ""),
    ]
    figures = {"count": arguments.count, "published": siege.published, "problems": siege.problems}
    times = {"seconds": round(seconds), "before_s": round(siege.before_s, 1), "after_s": round(siege.after_s, 1)}
    report("fuzz", rows, {**figures, "seed": arguments.seed, **times})
    sys.exit(1 if siege.problems else 0)


if __name__ == "__main__":
    main()
