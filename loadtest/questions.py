"""What a question to the gateway costs when much has happened.

    python -m loadtest.questions [--runs 100000] [--rows 1000000] [--prefect .../bin/prefect]

The facts of ``--runs`` runs go through a real nats-server into the read model of a gateway; then each command is timed
as a process of its own, readers and submissions are put on the API, and events are followed. After that the read
model alone is filled with ``--rows`` runs, and the commands are timed again.

Targets: 0.5 s and 100 MB for a command; under 50 readers and 20 submissions a second a p99 of 100 ms and a read model
at most 1 s behind; an event printed within 0.1 s. Beside them stands what an interpreter needs that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from contracts.base import Fact
from contracts.events.node import NodeJoined
from contracts.events.run import Member, RunLog
from contracts.spec.run import RunSpec
from loadtest.common import percentile, report
from loadtest.prefect_questions import measure_prefect
from loadtest.process_cost import Cost, measure_process
from loadtest.run_facts import make_run_facts
from loadtest.server import nats_server
from services.gateway.core.fold import Rows
from services.gateway.core.rows import Run
from services.gateway.projection import Projection
from services.gateway.settings import GatewaySettings
from services.gateway.store import Store
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from tests.gateway.gateway_process import spawn_gateway

NODES, SLOTS = 50, 8
#: Runs at the end of the log that still wait or train.
LIVE_RUNS = 100
TEAMS, USERS, MODELS = ("vision", "speech", "text/small", "text/large"), 40, 25
#: Facts that are sent before the server is waited for.
PORTION = 2_000
READERS, THINK_S, SUBMISSIONS_PER_S, LOAD_S = 50, 1.0, 20, 30.0
EVENTS = 40
#: The load test stops by itself after so long, whatever happens.
TIME_LIMIT_S = 1500.0
#: Stands in the facts of a run that are written once for the id of each.
ANY_RUN = "anyrun"
START_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def name_of(number: int) -> str:
    return f"{TEAMS[number % len(TEAMS)].partition('/')[0]}-m{number % MODELS}-{number}"


def spec_of(number: int) -> RunSpec:
    return RunSpec(
        name=name_of(number),
        command=["python", "train.py"],
        user=f"user{number % USERS}",
        team=TEAMS[number % len(TEAMS)],
        model=f"m{number % MODELS}",
        params={"lr": 0.1, "layers": number % 7},
    )


def facts_of(count: int) -> Iterator[tuple[str, bytes]]:
    """Yield the subject and the body of every fact; the last runs wait, or train."""
    for number in range(NODES):
        joined = NodeJoined(node_id=f"n{number}", incarnation="i", address="127.0.0.1", slots=SLOTS, lease_ttl_s=3)
        yield joined.subject, joined.model_dump_json(exclude_defaults=True).encode()
    period = len(TEAMS) * USERS * MODELS * 7
    texts: dict[int, list[tuple[str, str]]] = {}
    for number in range(count):
        kind = number % period
        if kind not in texts:
            node = Member(node_id=f"n{kind % NODES}", slots=(0,), ranks=(0,))
            facts = make_run_facts(ANY_RUN, spec_of(kind), (node,))
            texts[kind] = [(fact.subject, fact.model_dump_json(exclude_defaults=True)) for fact in facts]
        left = count - number
        shown = texts[kind] if left > LIVE_RUNS else texts[kind][: 4 if left % 2 else 2]
        for subject, text in shown:
            named = text.replace(f'"{name_of(kind)}"', f'"{name_of(number)}"')
            yield subject.replace(ANY_RUN, f"r{number:07}"), named.replace(ANY_RUN, f"r{number:07}").encode()


async def publish_facts(bus: Bus, count: int, progress: Progress) -> int:
    """Publish the facts of ``count`` runs and return their number once the server has stored them all."""
    bar = progress.add_task("facts published", total=7 * count)
    sent = 0
    for subject, body in facts_of(count):
        await bus.nc.publish(subject, body, headers={"ce-source": "loadtest", "ce-id": str(sent)})
        sent += 1
        if sent % PORTION == 0:
            await wait_until_stored(bus, sent - 2 * PORTION)
            progress.update(bar, completed=sent)
    await wait_until_stored(bus, sent)
    return sent


async def wait_until_stored(bus: Bus, count: int) -> None:
    await bus.nc.flush(timeout=60)
    while (await bus.js.stream_info("FACTS")).state.messages < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def measure_commands(url: str, count: int) -> dict[str, Cost]:
    """Time every question of the issue, and beside it an interpreter that does nothing."""
    trainbus = [sys.executable, "-m", "trainbus"]
    middle = name_of(count // 2)
    questions: dict[str, tuple[list[str], int]] = {
        "ps": (["ps"], 0),
        "ps --state running": (["ps", "--state", "running"], 0),
        "nodes": (["nodes"], 0),
        "show NAME": (["show", middle], 0),
        "why NAME": (["why", middle], 0),
        "why WAITING": (["why", name_of(count - 2)], 0),
        "show TYPO": (["show", f"{middle[:-2]}x{middle[-1]}"], 2),
    }
    place = {"TRAINBUS_GATEWAY_URL": url}
    found = {name: measure_process([*trainbus, *words], place, code) for name, (words, code) in questions.items()}
    nothing = {"python -c pass": measure_process([sys.executable, "-c", "pass"], place)}
    return {**nothing, "trainbus --version": measure_process([*trainbus, "--version"], place), **found}


@dataclass(slots=True)
class Load:
    """What was seen of the API under load."""

    answers_ms: dict[str, list[float]] = field(default_factory=dict)
    submissions_ms: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        everything = [each for found in self.answers_ms.values() for each in found] + self.submissions_ms
        return {
            "answers": len(everything),
            "p50_ms": percentile(everything, 0.5),
            "p99_ms": percentile(everything, 0.99),
            "p50_ms_by_question": {name: percentile(found, 0.5) for name, found in self.answers_ms.items()},
            "p99_ms_by_question": {name: percentile(found, 0.99) for name, found in self.answers_ms.items()},
            "submission_p99_ms": percentile(self.submissions_ms, 0.99),
            "submissions_per_s": len(self.submissions_ms) / LOAD_S,
            "behind_s_max": max(self.behind_s),
        }


async def put_load(url: str, count: int) -> Load:
    """Let readers ask and others submit for a while."""
    # A collection here, 60 ms, would count as the gateway's.
    gc.collect()
    gc.freeze()
    found, ends_at = Load(), time.perf_counter() + LOAD_S
    draw = random.Random(0)

    def question() -> tuple[str, str]:
        number = draw.randrange(count)
        return draw.choice(
            [
                ("list", "/training-runs?limit=50"),
                ("running", "/training-runs?state=running"),
                ("of a team", "/training-runs?team=speech&limit=50"),
                ("nodes", "/nodes"),
                ("run by name", f"/training-runs/{name_of(number)}"),
                ("run by id", f"/training-runs/r{number:07}"),
                ("why", f"/training-runs/{name_of(number)}/why"),
            ]
        )

    limits = httpx.Limits(max_connections=READERS + SUBMISSIONS_PER_S)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as http:

        async def read(delay_s: float) -> None:
            # By the clock: readers that one stall has held up would ask in step from then on.
            due_s = time.perf_counter() + delay_s
            while due_s < ends_at:
                await asyncio.sleep(due_s - time.perf_counter())
                name, path = question()
                began = time.perf_counter()
                (await http.get(path)).raise_for_status()
                found.answers_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
                due_s = max(due_s + THINK_S, time.perf_counter())

        async def submit(number: int) -> None:
            began = time.perf_counter()
            body = {"name": f"load-{number}", "command": ["true"]}
            (await http.post("/training-runs", json=body)).raise_for_status()
            found.submissions_ms.append(1e3 * (time.perf_counter() - began))

        async def submit_all() -> None:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(int(LOAD_S * SUBMISSIONS_PER_S)):
                    await asyncio.sleep(began + number / SUBMISSIONS_PER_S - time.perf_counter())
                    group.create_task(submit(number))

        async def watch() -> None:
            while time.perf_counter() < ends_at:
                text = (await http.get("/metrics")).text
                for family in text_string_to_metric_families(text):
                    if family.name == "trainbus_gateway_projection_lag_seconds":
                        found.behind_s.append(max(sample.value for sample in family.samples))
                await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            for number in range(READERS):
                group.create_task(read(number * THINK_S / READERS))
            group.create_task(submit_all())
            group.create_task(watch())
    return found


async def time_lines(bus: Bus, url: str, words: list[str], events: Iterable[Fact]) -> list[float]:
    """Return the seconds from publishing each event to its line of a command that follows them."""
    environment = {**os.environ, "TRAINBUS_GATEWAY_URL": url, "PYTHONUNBUFFERED": "1"}
    command = (sys.executable, "-m", "trainbus", *words)
    process: Process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE)
    assert process.stdout is not None
    took = []
    try:
        for number, event in enumerate(events):
            began = time.perf_counter()
            await bus.publish(event)
            while b"followed" not in await asyncio.wait_for(process.stdout.readline(), 60):
                pass  # what it prints before
            if number:  # at the first one the process may still have been starting
                took.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)
    finally:
        process.kill()
        await process.wait()
    return took


async def time_followers(bus: Bus, url: str, count: int) -> dict[str, list[float]]:
    """Return what ``time_lines`` finds of each command that follows; the last run but one waits."""
    run_id, name = f"r{count - 2:07}", name_of(count - 2)
    joined = [
        NodeJoined(node_id="followed", incarnation=f"i{number}", address="a", slots=1, lease_ttl_s=3)
        for number in range(EVENTS + 1)
    ]
    printed = [
        RunLog(run_id=run_id, generation=1, rank=0, offset=number, lines=(f"followed {number}",))
        for number in range(2 * EVENTS + 2)
    ]
    return {
        "events -f": await time_lines(bus, url, ["events", "-f", "--tail", "1"], joined),
        "logs -f": await time_lines(bus, url, ["logs", "-f", name, "--tail", "1"], printed[: EVENTS + 1]),
        "attach": await time_lines(bus, url, ["attach", name], printed[EVENTS + 1 :]),
    }


async def fill_rows(bus: Bus, settings: GatewaySettings, count: int, progress: Progress) -> None:
    """Fill the read model alone with ended runs."""
    bar = progress.add_task("rows written", total=count)
    async with Store(settings.database_url) as store:
        await Projection(bus, store).adopt()
        blank = Run("", state="completed", slots_min=1, slots_max=1, generation=1, metrics={"loss": 0.25})
        for first in range(0, count, 10_000):
            runs = {}
            for number in range(first, min(first + 10_000, count)):
                spec, at = spec_of(number), START_S + number
                runs[f"r{number:07}"] = replace(
                    blank,
                    run_id=f"r{number:07}",
                    state="completed" if count - number > LIVE_RUNS else "queued",
                    name=spec.name,
                    user=spec.user,
                    team=spec.team,
                    model=spec.model,
                    spec=spec.model_dump(mode="json", exclude_defaults=True),
                    requested_at=at,
                    ended_at=at + 60,
                )
            async with store.engine.begin() as connection:
                await store.save(connection, Rows(), Rows(runs=runs))
            progress.update(bar, advance=len(runs))


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"runs": arguments.runs, "rows": arguments.rows}
    with Progress(transient=True) as progress:
        for name, count in (("log", arguments.runs), ("rows", arguments.rows)):
            if not count:
                continue
            part = folder / name
            with nats_server(part / "nats") as server:
                plain = Settings(nats_url=server.url, http_port=-1, data_dir=part)
                settings, bus = GatewaySettings.of(plain), Bus("loadtest", plain)
                await bus.connect(reconcile_topology=True)
                began = time.perf_counter()
                if name == "log":
                    found["facts"] = await publish_facts(bus, count, progress)
                else:
                    await fill_rows(bus, settings, count, progress)
                found[f"{name}_written_s"], began = time.perf_counter() - began, time.perf_counter()
                port, bar = free_ports(1)[0], progress.add_task("the read model catches up", total=None)
                url = f"http://127.0.0.1:{port}"
                async with spawn_gateway(settings, port, part / "gateway.log"):
                    progress.remove_task(bar)
                    found[f"{name}_ready_s"] = time.perf_counter() - began
                    costs = await asyncio.to_thread(measure_commands, url, count)
                    found[f"{name}_commands"] = {name: asdict(cost) for name, cost in costs.items()}
                    if name == "log":
                        found["lines_s"] = await time_followers(bus, url, count)
                        found["load"] = (await put_load(url, count)).figures()
                await bus.close()
        if arguments.prefect:
            found["prefect"] = await measure_prefect(
                arguments.prefect, arguments.prefect_runs, folder / "prefect", progress
            )
    return found


def show(found: dict[str, Any]) -> None:
    rows = []
    for part, what in (("log", f"{found['runs']:,} runs"), ("rows", f"{found['rows']:,} runs in SQL alone")):
        for name, cost in found.get(f"{part}_commands", {}).items():
            figure = f"{cost['median_s']:.2f} s (longest {cost['longest_s']:.2f}), {cost['memory_mb']:.0f} MB"
            rows.append((f"{name}, {what}", figure, "0.5 s, 100 MB"))
    if (load := found.get("load")) is not None:
        rows += [
            ("answers under load", f"p50 {load['p50_ms']:.0f} ms, p99 {load['p99_ms']:.0f} ms", "p99 100 ms"),
            ("submissions", f"{load['submissions_per_s']:.0f} /s, p99 {load['submission_p99_ms']:.0f} ms", "20 /s"),
            ("the read model is behind at most", f"{load['behind_s_max']:.2f} s", "1 s"),
            *(
                (f"event to line of {name}", f"{statistics.median(took):.3f} s, longest {max(took):.3f} s", "0.1 s")
                for name, took in found["lines_s"].items()
            ),
            ("facts into the read model", f"{found['facts'] / found['log_ready_s']:,.0f} /s", ""),
        ]
    if (prefect := found.get("prefect")) is not None:
        what = f"Prefect, {prefect['runs']:,} flow runs"
        ours = found.get("log_commands", {}).get("ps", {}).get("median_s")
        for name, cost in prefect["commands"].items():
            figure = f"{cost['median_s']:.2f} s (longest {cost['longest_s']:.2f}), {cost['memory_mb']:.0f} MB"
            rows.append((f"{name}, {what}", figure, f"{cost['median_s'] / ours:.1f} times `ps`" if ours else ""))
        took = prefect["load"]
        rows.append((f"answers under load, {what}", f"p50 {took['p50_ms']:.0f} ms, p99 {took['p99_ms']:.0f} ms", ""))
    report("questions", rows, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--prefect", metavar="PROGRAM", help="the command of an installed Prefect, to ask it as well")
    parser.add_argument("--prefect-runs", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainbus-questions-") as folder:
        show(asyncio.run(asyncio.wait_for(measure(arguments, Path(folder)), TIME_LIMIT_S)))


if __name__ == "__main__":
    main()
