"""From the loss of a rank to the next step, and from a notice to a checkpoint that is safe.

    python -m loadtest.turnaround --ray-python /path/to/an/environment/with/ray/bin/python

The same loop (two ranks of DDP on gloo, a checkpoint every 20 steps) under trainbus on the embedded stack, torchrun
with ``--max_restarts``, and Ray Train in an environment of its own, one after the other on the same machine. In each,
a rank is killed with SIGKILL and the time taken to the first step that is completed afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog
from rich.console import Console

from loadtest.common import report
from loadtest.turnaround import ours, peers
from tests.e2e.support import connected
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions


async def measure(data_dir: Path, width: int, every: int, repeat: int) -> tuple[ours.Figures, ours.Figures]:
    """(figures of kills, figures of notices)."""
    kills, notices = ours.Figures(), ours.Figures()
    async with connected(data_dir) as stack:
        loop = await ours.Loop.open(stack, width, every)
        await loop.kills(repeat, kills)
        await loop.notices(repeat, notices)
    return kills, notices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--width", type=int, default=512, help="of the perceptron: 512 makes a state of 3.6 MB")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--ray-python", type=Path, help="python with ray[train] 2.60 and torch")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    width, every, repeat = arguments.width, arguments.every, arguments.repeat
    console = Console()
    load_s = min(ours.load_seconds(width) for _ in range(3))
    with tempfile.TemporaryDirectory(prefix="trainbus-turnaround-") as folder, console.status("trainbus"):
        options = StackOptions(Path(folder) / "data")
        with StackProcess(options, output=Path(folder) / "output.log") as stack:
            stack.wait_ready()
            kills, notices = asyncio.run(measure(options.data_dir, width, every, repeat))
    torchrun_s = peer("torchrun", console, lambda: peers.torchrun(width, every, repeat))
    ray_s: list[float] = []
    if arguments.ray_python:
        ray_s = peer("Ray Train", console, lambda: peers.ray(arguments.ray_python, width, every, repeat))
    else:
        console.print("Ray Train is left out: give --ray-python")
    show(kills, notices, load_s, torchrun_s, ray_s)


def peer(name: str, console: Console, measured: Callable[[], list[float]]) -> list[float]:
    """What another system took; nothing if it never went on, which is said."""
    with console.status(name):
        try:
            return measured()
        except RuntimeError as error:
            console.print(f"{name} {error}", markup=False)
            return []


def show(
    kills: ours.Figures, notices: ours.Figures, load_s: float, torchrun_s: list[float], ray_s: list[float]
) -> None:
    own = kills.median("SIGKILL to next step")
    size = notices.median("bytes") / 1e6
    raw = notices.median("raw write of as much")
    rows = [
        ("SIGKILL of a rank to the next step", _text(kills, "SIGKILL to next step"), f"{0.5 + load_s:.2f} s"),
        *((f"  {name}", _text(kills, name), "") for name in kills.seconds if name != "SIGKILL to next step"),
        ("  state taken from", ", ".join(sorted(set(kills.resumed_from))), "memory"),
        ("  steps lost", str(max(kills.steps_lost)), "1"),
        ("torchrun", _compared(torchrun_s, own), "5 times"),
        ("Ray Train", _compared(ray_s, own), "15 times"),
        ("notice to event", _text(notices, "notice to event"), "1 s"),
        (f"notice to durable ({size:.0f} MB)", _text(notices, "notice to durable"), f"{2 * raw:.2f} s (2 raw writes)"),
        *((f"  {name}", _text(notices, name), "") for name in ours.TO_DISK),
        ("  raw write of as much", _text(notices, "raw write of as much"), ""),
        ("notice to committed", _text(notices, "notice to committed"), ""),
        *((f"  {name}", _text(notices, name), "") for name in ours.TO_COMMITTED),
        ("  plain puts of as much", _text(notices, "plain puts of as much"), ""),
        ("steps lost on notice", str(sum(notices.steps_lost)), "0"),
    ]
    figures = {
        "kills_s": dict(kills.seconds),
        "resumed_from": kills.resumed_from,
        "steps_lost": kills.steps_lost,
        "notices_s": dict(notices.seconds),
        "state_load_s": load_s,
        "torchrun_s": torchrun_s,
        "ray_s": ray_s,
    }
    report("turnaround", rows, figures)


def _compared(peer_s: list[float], own_s: float) -> str:
    if not peer_s:
        return "not measured"
    median_s = statistics.median(peer_s)
    return f"{median_s:.2f} s: {median_s / own_s:.1f} times as long"


def _text(figures: ours.Figures, name: str) -> str:
    values = figures.seconds[name]
    return f"{statistics.median(values):.2f} s (best {min(values):.2f}, worst {max(values):.2f})"


if __name__ == "__main__":
    main()
