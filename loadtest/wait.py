"""How long a person waits on the embedded stack.

    python -m loadtest.wait --repeat 5

Times, on a stack of its own in a temporary folder: start of the stack; published to placed; placed to
the first training step of two ranks; a submitted command to its first line; SIGKILL of a rank to
the next step. Beside them stand figures of Ray 2.60 that were measured once, on another machine with two cores, and
are quoted: its start, a submitted job's first line, `fit()` to the first step of two workers, SIGKILL to the next step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from rich.progress import Progress

from contracts.base import run_id_for
from contracts.envelope import ANONYMOUS_SOURCE
from examples.demo import lake as demo_lake
from examples.demo import main as demo
from examples.demo.project import EXAMPLE
from loadtest.common import report
from services.kit.bus import Bus
from trainbus.client.address import find_address
from trainbus.client.package import pack_project
from trainbus.client.submission import upload_package
from trainbus.embedded.launch import StackProcess
from trainbus.embedded.layout import StackOptions
from trainbus.operate.stack_settings import read_settings

#: Seconds of Ray 2.60.0 on another machine with two cores: quoted, not measured in the run.
QUOTED_RAY_S = {
    "stack ready": 7.0,
    "submitted to first line": 1.4,
    "placed to first step": 14.0,
    "SIGKILL to next step": 12.5,
}
LIMIT_S = 90.0
Waits = dict[str, list[float]]


class Probe:
    """Publishes one run at a time and says when things happened."""

    def __init__(self, bus: Bus, code: dict[str, Any]) -> None:
        self.bus, self.code = bus, code

    async def publish(self, body: dict[str, Any]) -> tuple[str, float]:
        event_id = uuid.uuid4().hex
        at = time.time()
        await self.bus.js.publish("train.requested", json.dumps(body).encode(), headers={"Nats-Msg-Id": event_id})
        return run_id_for(ANONYMOUS_SOURCE, event_id), at

    def training(self, steps: int) -> dict[str, Any]:
        training = {**demo.TRAINING, "epochs": None, "max_steps": steps, "checkpoint_every_steps": 20}
        training = {name: value for name, value in training.items() if value is not None}
        body = demo.example_request("wait", self.code, training, {"min": 2, "max": 2}, 0)
        return {key: value for key, value in body.items() if key not in ("evaluation", "model")}

    async def fact(self, run_id: str, name: str) -> Any:
        return await self._first("FACTS", f"run.{run_id}.*", lambda event: event.fact == name)

    async def step_at(self, run_id: str, generation: int) -> float:
        """The trainer's own time of the first step of a generation."""
        event = await self._first(
            "PROGRESS", f"progress.{run_id}", lambda e: e.generation >= generation and e.kind == "training" and e.points
        )
        return float(min(point.time for point in event.event.points))

    async def line_at(self, run_id: str) -> float:
        return (await self._first("LOGS", f"log.{run_id}.*", lambda event: bool(event.lines))).envelope.time.timestamp()

    async def _first(self, stream: str, subject: str, condition: Callable[[Any], bool]) -> Any:
        async def search() -> Any:
            async for batch in self.bus.follow(stream, (subject,)):
                for message in batch:
                    if condition(message.event):
                        return message
                    if message.event.fact in ("failed", "rejected"):
                        raise RuntimeError(f"{message.event}")
            raise AssertionError("unreachable")

        return await asyncio.wait_for(search(), LIMIT_S)


async def measure(data_dir: Path, repeat: int, waits: Waits, progress: Progress) -> None:
    address = find_address(data_dir)
    settings = read_settings(address)
    bus = Bus("loadtest", settings)
    await bus.connect(reconcile_topology=False)
    await demo_lake.fill_lake(settings, "lake", demo_lake.draw_scans(), lambda _: None)
    package = pack_project(EXAMPLE)
    code = package.code(await upload_package(address, package))
    probe = Probe(bus, code)
    bar = progress.add_task("runs", total=repeat)
    for number in range(repeat):
        run_id, published = await probe.publish({"name": "line", "command": ["echo", "hello"]})
        waits["submitted to first line"].append(await probe.line_at(run_id) - published)
        await probe.fact(run_id, "completed")

        run_id, published = await probe.publish(probe.training(2000))
        placed = (await probe.fact(run_id, "placed")).envelope.time.timestamp()
        if number:  # the first one also prepares the dataset
            waits["published to placed"].append(placed - published)
        else:
            waits["published to placed, data to be prepared"].append(placed - published)
        waits["placed to first step"].append(await probe.step_at(run_id, 1) - placed)
        await probe.fact(run_id, "checkpoint_committed")
        killed = time.time()
        os.kill(_ranks(data_dir, run_id)[-1], signal.SIGKILL)
        waits["SIGKILL to next step"].append(await probe.step_at(run_id, 2) - killed)
        await bus.js.publish("cancel.requested", f'{{"run_id":"{run_id}"}}'.encode())
        await probe.fact(run_id, "cancelled")
        progress.update(bar, advance=1)
    await bus.close()


def _ranks(data_dir: Path, run_id: str) -> list[int]:
    """The processes of a run's ranks, as the agents have noted them."""
    notes = data_dir.glob(f"node-*/runs/{run_id}/g*/processes.json")
    return [process["pid"] for note in notes for process in json.loads(note.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    waits: Waits = defaultdict(list)
    for number in range(arguments.repeat):
        with tempfile.TemporaryDirectory(prefix="trainbus-wait-") as folder, Progress(transient=True) as progress:
            started = time.perf_counter()
            options = StackOptions(Path(folder) / "data")
            with StackProcess(options, output=Path(folder) / "output.log") as stack:
                stack.wait_ready()
                waits["stack ready"].append(time.perf_counter() - started)
                if number == arguments.repeat - 1:
                    asyncio.run(measure(options.data_dir, arguments.repeat, waits, progress))
    rows, figures = [], {}
    for name, values in waits.items():
        median = statistics.median(values)
        quoted = QUOTED_RAY_S.get(name)
        compared = f"Ray {quoted:g} s (quoted): {quoted / median:.1f} times as long" if quoted else ""
        rows.append((name, f"{median:.2f} s (best {min(values):.2f}, worst {max(values):.2f})", compared))
        figures[name.replace(" ", "_")] = {"median_s": median, "all_s": values, "ray_s": quoted, "ray_is_quoted": True}
    report("wait", rows, {"waits": figures})


if __name__ == "__main__":
    main()
