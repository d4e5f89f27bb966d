"""Versions and inputs that are bad: what reaches a client of them, and for how long."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from contracts.events.model import ModelDeployed, ModelDeployFailed
from loadtest.serving.bench import Bench, start_bench
from loadtest.serving.client import SteadyClient, answered
from services.kit.concurrency import cancel_and_wait

#: What is found before a version answers, and what only shows while it does.
BROKEN = ("load", "raise", "wrong", "hang", "leak")
BAD_LATER = ("crash later", "slow later", "leak later")
RATE = 200.0
#: An input that ends the process of any version, and how many of them are sent.
POISON = {"a": 1e9, "b": 0.0, "c": 0.0, "d": 0.0}
POISONS, POISON_GAP_S = 20, 0.25


async def measure_faults() -> dict[str, Any]:
    """Return what became of each. Each part has a service of its own: the one must not prepare it for the other."""
    return {"poison": await _run_beside_load(_measure_poison), "versions": await _run_beside_load(_measure_versions)}


async def _run_beside_load(measure: Callable[[Bench, SteadyClient], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Measure while a client sends sound requests; add what became of those."""
    with tempfile.TemporaryDirectory() as folder:
        async with start_bench(Path(folder), timeout_s=3) as bench:
            await bench.deploy("sound")
            client = SteadyClient(bench.door, RATE)
            sending = asyncio.create_task(client.run())
            try:
                await asyncio.sleep(1.0)
                figures = await measure(bench, client)
            finally:
                await cancel_and_wait(sending)
    failed = [each for each in client.replies if each.status != 200]
    return {
        **figures,
        "requests": len(client.replies),
        "failed_requests": len(failed),
        "failures": sorted({f"{each.status}: {each.problem}"[:200] for each in failed})[:5],
        "wrong_answers": sum(not each.is_right for each in client.replies),
    }


async def _measure_poison(bench: Bench, _: SteadyClient) -> dict[str, Any]:
    """Send inputs that end any process, each a new one and each twice, just after a version has taken over."""
    fact = await bench.deploy("sound-again")
    statuses: list[int] = []
    async with aiohttp.ClientSession() as session:
        for number in range(POISONS):
            row = {**POISON, "b": float(number // 2)}
            async with session.post(bench.door.url, data=json.dumps(row)) as response:
                statuses.append(response.status)
            await asyncio.sleep(POISON_GAP_S)
    described = await bench.describe()
    return {"statuses": statuses, "version_promoted": fact.version, "version_that_answers": described["version"]}


async def _measure_versions(bench: Bench, client: SteadyClient) -> dict[str, Any]:
    return {"of": {each: await _measure_version(bench, client, each) for each in (*BROKEN, *BAD_LATER)}}


async def _measure_version(bench: Bench, client: SteadyClient, defect: str) -> dict[str, Any]:
    began = time.perf_counter()
    fact = await bench.promote(f"bad {defect}".replace(" ", "-"), defect)
    if isinstance(fact, ModelDeployed):  # it breaks later: the watch takes it back
        start = await bench.bus.get_last_sequence(">") + 1
        with suppress(TimeoutError):
            fact = await bench.conclusion(fact.version, start)
    answers = [each for each in answered(client.replies) if each.version == fact.version]
    times = [each.started + each.seconds for each in answers]
    return {
        "stage": fact.stage if isinstance(fact, ModelDeployFailed) else "served",
        "reason": fact.reason if isinstance(fact, ModelDeployFailed) else "",
        "answers": len(answers),
        "wrong_answers": sum(not each.is_right for each in answers),
        "answered_for_s": round(max(times) - min(times), 1) if times else 0.0,
        "seconds_to_the_end": round(time.perf_counter() - began, 1),
    }
