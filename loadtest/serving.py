"""Swaps of a served model under load, and broken models: what users see.

    python -m loadtest.serving [--swaps 100] [--rate 200]

A serving service of its own, on a NATS server and an object store of its own, answers requests of a client that sends
them at a fixed rate, whether or not earlier ones are answered. Meanwhile versions are promoted, rolled back, and
promoted although they are broken. Every answer is compared with the true one.

Targets: no failed request; p99 within a swap at most 1.2 times the p99 outside of one; from a promotion to the first
answer of the new version at most 1 s; a rollback within 0.2 s; a broken version never answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from contracts.events.model import ModelDeployed, ModelDeployFailed
from loadtest.common import percentile, report
from loadtest.served_models import ModelStore, draw_rows, label
from services.kit.bus import Bus
from services.kit.concurrency import cancel_and_wait
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from trainbus.embedded.servers import NatsServer, S3Server

KEYS = ("loadtest", "loadtest-secret")
DEFECTS = ("load", "raise", "wrong", "hang", "leak", "crash later")
PATIENCE_S = 120.0
#: Seconds between two swaps, and after a deployment that still count as the swap.
PAUSE_S, SETTLE_S = 1.0, 0.25


def name_run(defect: str) -> str:
    """Return the id of the run with a defect."""
    return f"broken-{defect.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client saw it; ``version`` 0 is a failure."""

    started: float
    seconds: float
    version: int
    is_right: bool


@dataclass(slots=True)
class Client:
    """Sends requests at a fixed rate."""

    url: str
    rate: float
    requests: list[Request] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    #: Version -> when its first answer arrived.
    first_answers: dict[int, asyncio.Future[float]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Send until cancelled."""
        rows = draw_rows(500, seed=7)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            due = time.perf_counter()
            try:
                for number in range(10**9):
                    task = asyncio.create_task(self._send(session, rows[number % len(rows)]))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    due += 1 / self.rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
            finally:
                await asyncio.gather(*self._tasks)

    def first_answer(self, version: int) -> asyncio.Future[float]:
        """Return when the first answer of a version arrived, or will have."""
        return self.first_answers.setdefault(version, asyncio.get_running_loop().create_future())

    async def _send(self, session: aiohttp.ClientSession, row: dict[str, float]) -> None:
        started = time.perf_counter()
        version, is_right = 0, True
        try:
            async with session.post(f"{self.url}/predict", json={"rows": [row]}) as response:
                content = await response.json()
            if response.status == 200:
                version = content["version"]
                is_right = content["predictions"][0]["prediction"] == label(row)
            else:
                self.failures.append(f"{response.status}: {content}")
        except (aiohttp.ClientError, OSError) as error:
            self.failures.append(repr(error))
        now = time.perf_counter()
        if version and not (first := self.first_answer(version)).done():
            first.set_result(now)
        self.requests.append(Request(started, now - started, version, is_right))


@dataclass(slots=True)
class Bench:
    """The service under test and what publishes to it."""

    store: ModelStore
    bus: Bus
    client: Client
    promoted_at: dict[int, float] = field(default_factory=dict)

    async def promote(self, run_id: str, ref: Any) -> ModelDeployed | ModelDeployFailed:
        """Promote, and return how the deployment ended."""
        start = await self.bus.get_last_sequence(">") + 1
        self.promoted_at[max(self.store.promotions, default=0) + 1] = time.perf_counter()
        version = await self.store.promote(run_id, ref)
        return await self.conclusion(version, start)

    async def conclusion(self, version: int, start: int) -> ModelDeployed | ModelDeployFailed:
        """Return the next fact about the deployment of a version."""
        async with asyncio.timeout(PATIENCE_S):
            async for batch in self.bus.follow("FACTS", ("model.sums.*",), start, idle_s=0.05):
                for message in batch:
                    event = message.event
                    if isinstance(event, (ModelDeployed, ModelDeployFailed)) and event.version == version:
                        return event
        raise TimeoutError(f"version {version} is neither deployed nor refused")


@asynccontextmanager
async def start_bench(folder: Path, rate: float) -> AsyncIterator[Bench]:
    """Start the servers and the service; stop them at the end."""
    nats = NatsServer(folder / "nats", free_ports(1)[0])
    s3 = S3Server(folder / "s3", free_ports(1)[0], *KEYS)
    port, health = free_ports(2)
    nats.start()
    s3.start()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")},
        "TRAINBUS_NATS_URL": nats.url,
        "TRAINBUS_S3_ENDPOINT": s3.endpoint,
        "TRAINBUS_S3_ACCESS_KEY": KEYS[0],
        "TRAINBUS_S3_SECRET_KEY": KEYS[1],
        "TRAINBUS_DATA_DIR": str(folder / "serving"),
        "TRAINBUS_HTTP_PORT": str(health),
        "TRAINBUS_SERVING_PORT": str(port),
        "TRAINBUS_SERVING_TIMEOUT_S": "3",
    }
    (folder / "serving").mkdir()
    service: asyncio.subprocess.Process | None = None
    try:
        settings = Settings(
            nats_url=nats.url,
            s3_endpoint=s3.endpoint,
            s3_access_key=KEYS[0],
            s3_secret_key=Settings(s3_secret_key=KEYS[1]).s3_secret_key,  # type: ignore[arg-type]
            data_dir=folder / "client",
        )
        bus = Bus("loadtest", settings)
        await bus.connect()
        async with ObjectStore(settings) as objects:
            for name in ("lake", "datasets", "models", "code"):
                await objects.ensure_bucket(name)
            with (folder / "serving.log").open("wb") as log:
                command = [sys.executable, "-m", "services.serving"]
                service = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
            store = ModelStore(bus, objects, settings)
            await store.write_shared()
            yield Bench(store, bus, Client(f"http://127.0.0.1:{port}", rate))
        await bus.close()
    finally:
        if service is not None:
            service.terminate()
            await service.wait()
        s3.stop()
        nats.stop()


async def measure(swaps: int, rollbacks: int, rate: float) -> dict[str, Any]:
    """Return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        async with start_bench(Path(folder), rate) as bench:
            runs = [f"run{number}" for number in range(swaps + 1)]
            refs = {run_id: await bench.store.train(run_id) for run_id in runs}
            broken = {defect: await bench.store.train(name_run(defect), defect) for defect in DEFECTS}
            first = await bench.promote(runs[0], refs[runs[0]])
            assert isinstance(first, ModelDeployed), first
            sending = asyncio.create_task(bench.client.run())
            try:
                await asyncio.sleep(3 * PAUSE_S)
                figures = await _measure_swaps(bench, runs, refs)
                figures |= await _measure_rollbacks(bench, runs, refs, rollbacks)
                figures |= await _measure_broken(bench, broken)
            finally:
                await cancel_and_wait(sending)
            done = bench.client.requests
            figures["requests"] = len(done)
            figures["failed_requests"] = sum(1 for each in done if not each.version)
            figures["wrong_answers"] = sum(1 for each in done if not each.is_right)
            figures["failures"] = bench.client.failures[:5]
            return figures


async def _measure_swaps(bench: Bench, runs: list[str], refs: dict[str, Any]) -> dict[str, Any]:
    windows: list[tuple[float, float]] = []
    first_answers_s: list[float] = []
    began = time.perf_counter()
    for run_id in runs[1:]:
        fact = await bench.promote(run_id, refs[run_id])
        assert isinstance(fact, ModelDeployed), fact
        answered = await bench.client.first_answer(fact.version)
        started = bench.promoted_at[fact.version]
        first_answers_s.append(answered - started)
        windows.append((started, time.perf_counter() + SETTLE_S))
        await asyncio.sleep(SETTLE_S + PAUSE_S)
    ended = time.perf_counter()
    done = [each for each in bench.client.requests if began <= each.started <= ended]
    inside = [each.seconds for each in done if any(start <= each.started <= end for start, end in windows)]
    outside = [each.seconds for each in done if not any(start <= each.started <= end for start, end in windows)]
    return {
        "swaps": len(windows),
        "rate_per_s": bench.client.rate,
        "p50_ms_outside": round(percentile(outside, 0.5) * 1000, 2),
        "p99_ms_outside": round(percentile(outside, 0.99) * 1000, 2),
        "p50_ms_in_a_swap": round(percentile(inside, 0.5) * 1000, 2),
        "p99_ms_in_a_swap": round(percentile(inside, 0.99) * 1000, 2),
        "p99_ratio": round(percentile(inside, 0.99) / percentile(outside, 0.99), 2),
        "first_answer_s_p50": round(percentile(first_answers_s, 0.5), 3),
        "first_answer_s_p99": round(percentile(first_answers_s, 0.99), 3),
    }


async def _measure_rollbacks(bench: Bench, runs: list[str], refs: dict[str, Any], count: int) -> dict[str, Any]:
    seconds = []
    for number in range(count):
        run_id = runs[-2] if number % 2 == 0 else runs[-1]
        fact = await bench.promote(run_id, refs[run_id])
        assert isinstance(fact, ModelDeployed), fact
        answered = await bench.client.first_answer(fact.version)
        seconds.append(answered - bench.promoted_at[fact.version])
        await asyncio.sleep(0.3)
    return {
        "rollbacks": count,
        "rollback_s_p50": round(percentile(seconds, 0.5), 3),
        "rollback_s_max": round(max(seconds), 3),
    }


async def _measure_broken(bench: Bench, broken: dict[str, Any]) -> dict[str, Any]:
    outcomes = {}
    for defect, ref in broken.items():
        start = await bench.bus.get_last_sequence(">") + 1
        fact = await bench.promote(name_run(defect), ref)
        if isinstance(fact, ModelDeployed):  # it breaks later: the watch takes it back
            start = await bench.bus.get_last_sequence(">") + 1
            with suppress(TimeoutError):
                fact = await bench.conclusion(fact.version, start)
        answers = sum(1 for each in bench.client.requests if each.version == fact.version)
        failed = isinstance(fact, ModelDeployFailed)
        outcomes[defect] = {
            "stage": fact.stage if isinstance(fact, ModelDeployFailed) else "served",
            "answers": answers,
        }
        assert failed, fact
    return {"broken": outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--rollbacks", type=int, default=20)
    parser.add_argument("--rate", type=float, default=200.0)
    arguments = parser.parse_args()
    loads = [os.getloadavg()[0]]
    figures = asyncio.run(measure(arguments.swaps, arguments.rollbacks, arguments.rate))
    loads.append(os.getloadavg()[0])
    figures["load_average_before_and_after"] = [round(each, 1) for each in loads]
    rows = [
        (f"failed requests in {figures['swaps']} swaps", str(figures["failed_requests"]), "none"),
        ("p99 in a swap / outside", f"{figures['p99_ratio']:g}", "at most 1.2"),
        (
            "promoted to first answer, p50 / p99",
            f"{figures['first_answer_s_p50']} / {figures['first_answer_s_p99']} s",
            "1 s",
        ),
        ("rollback, p50 / max", f"{figures['rollback_s_p50']} / {figures['rollback_s_max']} s", "0.2 s"),
        ("wrong answers", str(figures["wrong_answers"]), "none"),
        *(
            (f"broken: {name}", f"{each['stage']}, {each['answers']} answers", "refused")
            for name, each in figures["broken"].items()
        ),
    ]
    report("serving", rows, figures)


if __name__ == "__main__":
    main()
