"""Candidates that end at once while evaluation, tracking and the gateway are killed by SIGKILL again and again.

    python -m loadtest.promotions --candidates 100 --trials 2

A trial is one of ``tests/evaluation/promotion_trial.py``, on a nats-server and an S3 of its own. In the end the log
must have one order of promotions (versions 1 to n without a gap, each better than the one before) and one outcome of
each candidate; MLflow must have the same numbers, each once, and the gateway must show the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import structlog
from pydantic import SecretStr

from loadtest.common import report
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.evaluation.promotion_trial import PromotionTrial
from trainbus.embedded.servers import NatsServer, S3Server

#: Service -> how often it is killed in a trial.
KILLS = {"evaluation": 12, "tracking": 6, "gateway": 8}
KEY, SECRET = "testkey", "testsecret"


def run_trial(candidates: int, seed: int) -> tuple[int, Counter[str], str]:
    """Return how many candidates were promoted, the kills, and what did not agree ('' if everything did)."""
    with tempfile.TemporaryDirectory(prefix="trainbus-promotions-") as name:
        folder = Path(name)
        nats_port, s3_port = free_ports(2)
        nats, s3 = NatsServer(folder / "nats", nats_port), S3Server(folder / "s3", s3_port, KEY, SECRET)
        settings = Settings(
            nats_url=nats.url,
            data_dir=folder / "data",
            http_port=-1,
            s3_endpoint=s3.endpoint,
            s3_access_key=KEY,
            s3_secret_key=SecretStr(SECRET),
        )
        nats.start()
        s3.start()
        try:
            return asyncio.run(_run_on(settings, candidates, seed))
        finally:
            nats.stop()
            s3.stop()


async def _run_on(settings: Settings, candidates: int, seed: int) -> tuple[int, Counter[str], str]:
    bus = Bus("promotions", settings)
    await bus.connect()
    try:
        async with ObjectStore(settings) as objects:
            for bucket in (settings.bucket_models, settings.bucket_code, settings.bucket_lake):
                await objects.ensure_bucket(bucket)
            trial = PromotionTrial(bus, objects, settings, candidates, KILLS, seed)
            try:
                return len(await trial.run()), trial.killed, ""
            except (AssertionError, TimeoutError) as error:
                return 0, trial.killed, f"trial {seed}: {error!r}"
    finally:
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=100)
    parser.add_argument("--trials", type=int, default=2)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.monotonic()
    promoted, killed, problems = 0, Counter[str](), []
    for seed in range(given.trials):
        versions, kills, problem = run_trial(given.candidates, seed)
        promoted, killed = promoted + versions, killed + kills
        problems += [problem] if problem else []
    seconds = time.monotonic() - began
    rows = [
        ("trials in which log, MLflow and gateway do not agree", str(len(problems)), "0"),
        ("candidates, all settled", str(given.candidates * given.trials), ""),
        ("promotions", str(promoted), ""),
        *((f"kill -9 {service}", str(count), "") for service, count in sorted(killed.items())),
        ("seconds", f"{seconds:.0f}", ""),
    ]
    figures = {"candidates": given.candidates, "trials": given.trials, "promotions": promoted, "killed": dict(killed)}
    report("promotions", rows, {**figures, "problems": problems, "seconds": seconds})
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
