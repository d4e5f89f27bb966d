"""Batching: the rate at an equal p99, with requests that wait predicted together, and one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from loadtest.served_models import ServedKind
from loadtest.serving.bench import start_bench
from loadtest.serving.client import find_rate
from loadtest.serving.overload import LIMIT_S, TRIAL_S


async def measure_batching(kind: ServedKind) -> dict[str, Any]:
    """Return the rates."""
    rates: dict[str, Any] = {}
    for name, size in (("on", 32), ("off", 1)):
        with tempfile.TemporaryDirectory() as folder:
            async with start_bench(Path(folder), kind, max_batch=size) as bench:
                await bench.deploy("r0")
                rates[f"{name}_per_s"], rates[f"{name}_tried"] = await find_rate(bench.door, LIMIT_S, TRIAL_S)
    return rates
