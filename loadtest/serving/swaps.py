"""Swaps and rollbacks under a steady load: what a client sees of them."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.common import percentile
from loadtest.served_models import ServedKind
from loadtest.serving.bench import Bench, start_bench
from loadtest.serving.client import Reply, SteadyClient, follow_connection
from services.kit.concurrency import cancel_and_wait

#: Seconds between two swaps, and after a deployment that still count as the swap.
PAUSE_S, SETTLE_S = 1.0, 0.25
#: Connections on which one request follows the other, beside the steady load, and the seconds between two.
CONNECTIONS, GAP_S = 4, 0.05
#: Times that it takes memory.
NEIGHBOURS = 30
#: A process with the priority of one that loads a version. At each line it takes and returns memory, for as long as a
#: swap of the linear model counts.
NEIGHBOUR = """
import os, sys, time
os.nice(10)
for _ in sys.stdin:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.35:
        bytearray(64 * 2**20)
    print(flush=True)
"""


async def measure_swaps(kind: ServedKind, swaps: int, rollbacks: int, rate: float) -> dict[str, Any]:
    """Return the figures of one kind of model."""
    with tempfile.TemporaryDirectory() as folder:
        async with start_bench(Path(folder), kind) as bench:
            runs = [f"run{number}" for number in range(swaps + 1)]
            for run_id in runs:
                bench.refs[run_id] = await bench.store.train(run_id)
            await bench.deploy(runs[0])
            client = SteadyClient(bench.door, rate)
            followed: list[list[Reply]] = [[] for _ in range(CONNECTIONS)]
            sending: list[asyncio.Task[Any]] = [asyncio.create_task(client.run())]
            sending += [asyncio.create_task(follow_connection(bench.door, GAP_S, each)) for each in followed]
            try:
                await asyncio.sleep(3 * PAUSE_S)
                figures = await _swap(bench, client, runs)
                # A rollback brings an older run back, and has a higher version than what it replaces.
                figures |= await _roll_back(bench, client, runs, rollbacks)
                figures |= await _sit_beside(client, min(swaps, NEIGHBOURS))
            finally:
                await cancel_and_wait(*sending)
            everything = client.replies + [reply for each in followed for reply in each]
            return {**figures, **check_answers(bench, everything, followed)}


async def _swap(bench: Bench, client: SteadyClient, runs: Sequence[str]) -> dict[str, Any]:
    windows: list[tuple[float, float]] = []
    first_answers_s: list[float] = []
    for run_id in runs[1:]:
        fact = await bench.deploy(run_id)
        answered = await client.first_answer(fact.version)
        started = bench.promoted_at[fact.version]
        first_answers_s.append(answered - started)
        windows.append((started, time.perf_counter() + SETTLE_S))
        await asyncio.sleep(SETTLE_S + PAUSE_S)
    inside, outside = _split(client, windows)
    return {
        "swaps": len(windows),
        "rate_per_s": client.rate,
        "p50_ms_outside": round(percentile(outside, 0.5) * 1000, 2),
        "p99_ms_outside": round(percentile(outside, 0.99) * 1000, 2),
        "p50_ms_in_a_swap": round(percentile(inside, 0.5) * 1000, 2),
        "p99_ms_in_a_swap": round(percentile(inside, 0.99) * 1000, 2),
        "p99_ratio": round(percentile(inside, 0.99) / percentile(outside, 0.99), 2),
        "first_answer_s_p50": round(percentile(first_answers_s, 0.5), 3),
        "first_answer_s_p99": round(percentile(first_answers_s, 0.99), 3),
    }


async def _sit_beside(client: SteadyClient, times: int) -> dict[str, Any]:
    """Return the p99 while a process of low priority that has nothing to do with serving takes and returns memory.

    Whatever a version's start costs others beyond that is serving's; that much any process costs on this machine.
    """
    neighbour = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NEIGHBOUR, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    windows: list[tuple[float, float]] = []
    try:
        for _ in range(times):
            started = time.perf_counter()
            neighbour.stdin.write(b"\n")
            await neighbour.stdout.readline()
            windows.append((started, time.perf_counter()))
            await asyncio.sleep(PAUSE_S)
    finally:
        neighbour.kill()
        await neighbour.wait()
    inside, outside = _split(client, windows)
    return {
        "p99_ms_beside_a_neighbour": round(percentile(inside, 0.99) * 1000, 2),
        "p99_ratio_beside_a_neighbour": round(percentile(inside, 0.99) / percentile(outside, 0.99), 2),
    }


def _split(client: SteadyClient, windows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the seconds of the requests that began in one of the windows, and of those between them."""
    began, ended = windows[0][0], windows[-1][1] + PAUSE_S
    done = [each for each in client.replies if began <= each.started <= ended]
    inside = [each.seconds for each in done if any(start <= each.started <= end for start, end in windows)]
    outside = [each.seconds for each in done if not any(start <= each.started <= end for start, end in windows)]
    return inside, outside


async def _roll_back(bench: Bench, client: SteadyClient, runs: Sequence[str], count: int) -> dict[str, Any]:
    seconds = []
    for number in range(count):
        fact = await bench.deploy(runs[-2] if number % 2 == 0 else runs[-1])
        seconds.append(await client.first_answer(fact.version) - bench.promoted_at[fact.version])
        await asyncio.sleep(0.3)
    return {
        "rollbacks": count,
        "rollback_s_p50": round(percentile(seconds, 0.5), 3),
        "rollback_s_max": round(max(seconds), 3),
    }


def check_answers(bench: Bench, replies: Sequence[Reply], followed: Sequence[Sequence[Reply]]) -> dict[str, Any]:
    """Return how many answers were missing, wrong, misnamed, or older than one before on their connection."""
    digests = {version: bench.refs[fact.run_id].manifest_sha256 for version, fact in bench.store.promotions.items()}
    versions = [[reply.version for reply in each if reply.version] for each in followed]
    failed = [each for each in replies if each.status != 200]
    return {
        "requests": len(replies),
        "failed_requests": len(failed),
        "failures": sorted({f"{each.status}: {each.problem}"[:200] for each in failed})[:5],
        "wrong_answers": sum(not each.is_right for each in replies),
        "misnamed_answers": sum(each.status == 200 and digests.get(each.version) != each.digest for each in replies),
        "versions_that_went_back": sum(
            later < earlier for each in versions for earlier, later in itertools.pairwise(each)
        ),
    }
