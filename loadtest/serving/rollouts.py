"""A canary and a shadow under a steady load: the share that they get, and what they cost those who are answered."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from contracts.events.model import ModelDeployFailed
from loadtest.served_models import SUMS
from loadtest.serving.bench import start_bench
from loadtest.serving.client import SteadyClient, answered, p99_s
from services.kit.concurrency import cancel_and_wait

RATE, CANARY_SHARE, SHADOW_SHARE, ROLLOUT_S = 200.0, 0.2, 0.5, 10.0


async def measure_rollouts() -> dict[str, Any]:
    """Return the figures of a sound version that is rolled out, and of one that crashes after a while."""
    shares = {"canary_share": CANARY_SHARE, "shadow_share": SHADOW_SHARE, "rollout_s": ROLLOUT_S}
    with tempfile.TemporaryDirectory() as folder:
        async with start_bench(Path(folder), SUMS, **shares) as bench:
            await bench.deploy("r0")
            client = SteadyClient(bench.door, RATE)
            sending = asyncio.create_task(client.run())
            try:
                await asyncio.sleep(5.0)
                began = time.perf_counter()
                fact = await bench.deploy("r1")
                ended = time.perf_counter()
                broken = await bench.promote("broken", "crash later")
            finally:
                await cancel_and_wait(sending)
    first = min(each.started for each in client.replies if each.version == fact.version)
    before = [each for each in client.replies if each.started < began]
    during = [each for each in client.replies if first <= each.started < min(ended, first + ROLLOUT_S)]
    by_canary = sum(each.version == fact.version for each in during)
    return {
        "canary_share": CANARY_SHARE,
        "shadow_share": SHADOW_SHARE,
        "share_that_the_canary_answered": round(by_canary / len(during), 3),
        "p99_ms_before": round(p99_s(before) * 1000, 2),
        "p99_ms_in_the_rollout": round(p99_s(during) * 1000, 2),
        "bad_canary": broken.stage if isinstance(broken, ModelDeployFailed) else "served",
        "requests": len(client.replies),
        "failed_requests": len(client.replies) - len(answered(client.replies)),
        "wrong_answers": sum(not each.is_right for each in client.replies),
    }
