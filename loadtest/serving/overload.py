"""Three times the load that a server can sustain: what it still answers, and whether anything of it ends."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.served_models import ServedKind
from loadtest.serving.bench import start_bench
from loadtest.serving.client import Door, Reply, SteadyClient, answered, find_rate, p99_s

#: The p99 up to which a rate counts as sustained, and for how long each is tried.
LIMIT_S, TRIAL_S = 0.05, 3.0
FACTOR = 3
#: Of the sustained rate, after the overload, and for how long; the seconds of one look whether it is served again, and
#: how many good ones in a row are needed.
AFTERWARDS, RECOVERY_S, LOOK_S, GOOD_LOOKS = 0.8, 10.0, 0.25, 4


async def measure_overload(kind: ServedKind, seconds: float) -> dict[str, Any]:
    """Return the figures of one kind of model."""
    with tempfile.TemporaryDirectory() as folder:
        async with start_bench(Path(folder), kind) as bench:
            await bench.deploy("r0")
            await bench.deploy("r1")
            before = await bench.describe()
            sustained, tried = await find_rate(bench.door, LIMIT_S, TRIAL_S)
            processes = bench.processes()
            replies = await SteadyClient(bench.door, FACTOR * sustained).run(seconds)
            recovery_s = await _recover(bench.door, AFTERWARDS * sustained)
            after = await bench.describe()
            good = answered(replies)
            statuses: dict[str, int] = {}
            for each in replies:
                statuses[str(each.status)] = statuses.get(str(each.status), 0) + 1
            span_s = max(each.started + each.seconds for each in good) - min(each.started for each in good)
            return {
                "sustained_per_s": round(sustained, 1),
                "rates_tried": tried,
                "sent_per_s": round(FACTOR * sustained, 1),
                "seconds": seconds,
                "goodput_per_s": round(len(good) / span_s, 1),
                "goodput_ratio": round(len(good) / span_s / sustained, 3),
                "p99_ms_of_answers": round(p99_s(replies) * 1000, 1),
                "statuses": statuses,
                "wrong_answers": sum(not each.is_right for each in replies),
                "processes_ended": len(processes - bench.processes()),
                "version_before_and_after": [before["version"], after["version"]],
                "recovery_s": recovery_s,
            }


async def _recover(door: Door, rate: float) -> float:
    """Return the seconds until a second begins of which every quarter is answered, with a p99 within the limit."""
    client = SteadyClient(door, rate)
    began = time.perf_counter()
    looks: list[list[Reply]] = [[] for _ in range(int(RECOVERY_S / LOOK_S))]
    for each in await client.run(RECOVERY_S):
        looks[min(int((each.started - began) / LOOK_S), len(looks) - 1)].append(each)
    is_good = [len(answered(each)) == len(each) and p99_s(each) <= LIMIT_S for each in looks]
    firsts = (number for number in range(len(looks) - GOOD_LOOKS + 1) if all(is_good[number : number + GOOD_LOOKS]))
    return next(firsts, len(looks)) * LOOK_S
