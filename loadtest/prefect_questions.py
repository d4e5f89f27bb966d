"""The questions of ``loadtest.questions``, to a Prefect server on this machine.

Prefect 3 on SQLite, as `pip install prefect` sets it up, with flow runs that ended in the place of runs. It stores
them by its own API, a few hundred a second, so there are fewer of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress

from loadtest.common import percentile
from loadtest.process_cost import measure_process
from services.kit.ports import free_ports

WRITERS = 4
#: What it answers while another writer has its database.
BUSY = 503
READERS, THINK_S, LOAD_S = 50, 1.0, 20.0
READY_S = 120.0


@asynccontextmanager
async def prefect_server(program: str, folder: Path) -> AsyncIterator[dict[str, str]]:
    """Run a server with its data in ``folder``; yield the environment of its clients."""
    port = free_ports(1)[0]
    environment = {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [program, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(READY_S), httpx.AsyncClient(base_url=environment["PREFECT_API_URL"]) as http:
            while True:
                try:
                    if (await http.get("/health")).is_success:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        yield environment
    finally:
        process.terminate()
        await process.wait()


async def fill_server(url: str, count: int, progress: Progress) -> list[str]:
    """Make flow runs that ended and return their ids."""
    bar = progress.add_task("flow runs made", total=count)
    numbers, ids = iter(range(count)), list[str]()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        flow = (await http.post("/flows/", json={"name": "load"})).raise_for_status().json()["id"]

        async def write() -> None:
            for number in numbers:
                name = f"run-{number}"
                body = {"flow_id": flow, "name": name, "idempotency_key": name, "state": {"type": "COMPLETED"}}
                ids.append((await _post_until_taken(http, "/flow_runs/", body))["id"])
                progress.advance(bar)

        await asyncio.gather(*(write() for _ in range(WRITERS)))
    return ids


async def _post_until_taken(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request again while the server is busy, or closes the connection in between."""
    while True:
        with suppress(httpx.TransportError):
            answer = await http.post(path, json=body)
            if answer.status_code != BUSY:
                return dict(answer.raise_for_status().json())
        await asyncio.sleep(0.1)


async def read_server(url: str, ids: list[str]) -> list[float]:
    """Let readers ask for lists and for single runs for a while; return the milliseconds of each answer."""
    took_ms, draw, ends_at = list[float](), random.Random(0), time.perf_counter() + LOAD_S
    newest = {"sort": "START_TIME_DESC", "limit": 50}
    running = {**newest, "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    limits = httpx.Limits(max_connections=READERS)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:

        async def read(delay_s: float) -> None:
            due_s = time.perf_counter() + delay_s
            while due_s < ends_at:
                await asyncio.sleep(due_s - time.perf_counter())
                began, kind = time.perf_counter(), draw.randrange(3)
                if kind == 2:
                    answer = await http.get(f"/flow_runs/{draw.choice(ids)}")
                else:
                    answer = await http.post("/flow_runs/filter", json=(newest, running)[kind])
                answer.raise_for_status()
                took_ms.append(1e3 * (time.perf_counter() - began))
                due_s = max(due_s + THINK_S, time.perf_counter())

        await asyncio.gather(*(read(number * THINK_S / READERS) for number in range(READERS)))
    return took_ms


async def measure_prefect(program: str, count: int, folder: Path, progress: Progress) -> dict[str, Any]:
    """Return what the questions cost when the server has ``count`` flow runs."""
    folder.mkdir()
    async with prefect_server(program, folder) as environment:
        url = environment["PREFECT_API_URL"]
        ids = await fill_server(url, count, progress)
        questions = {
            "flow-run ls": ["flow-run", "ls", "--limit", "20"],
            "flow-run ls --state-type RUNNING": ["flow-run", "ls", "--state-type", "RUNNING"],
            "flow-run inspect ID": ["flow-run", "inspect", ids[count // 2]],
        }
        commands = {
            name: asdict(await asyncio.to_thread(measure_process, [program, *words], environment))
            for name, words in questions.items()
        }
        took_ms = await read_server(url, ids)
    load = {"answers": len(took_ms), "p50_ms": percentile(took_ms, 0.5), "p99_ms": percentile(took_ms, 0.99)}
    return {"runs": count, "commands": commands, "load": load}
