"""Faults in the commit of checkpoints: kills and failures at every line of the protocol, and changed bytes.

    python -m loadtest.commit_faults --trials 500 --real 20

A trial is one random life of a run's checkpoints (``tests/checkpoint/trials.py``) on a real nats-server and a real
S3: agents that upload chunks and differences, the commit, retention, pins, collection; each is killed or failed at
lines drawn evenly from all of the protocol, and in every third trial a byte in the store is changed. The ``real``
trials kill -9 the service's own process, the nats-server and the S3 server at random moments instead. In every trial
the same promises are held against log and store after each fault.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import structlog
from pydantic import SecretStr
from rich.progress import track

from contracts import subjects
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused
from loadtest.common import report
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.store.objects import ObjectStore
from tests.checkpoint.facts import NODES
from tests.checkpoint.trials import LINES, Trial
from trainbus.embedded.servers import NatsServer, S3Server

SETTLE_S = 90.0


class Stack:
    """A nats-server and an S3 server that may be killed, and the service's process."""

    def __init__(self, folder: Path) -> None:
        nats_port, s3_port = free_ports(2)
        self.nats = NatsServer(folder / "nats", nats_port)
        self.s3 = S3Server(folder / "s3", s3_port, "testkey", "testsecret")
        self.log = folder / "service.log"
        self.service: subprocess.Popen[bytes] | None = None

    def settings(self, bucket: str) -> CheckpointSettings:
        return CheckpointSettings(
            nats_url=self.nats.url,
            s3_endpoint=self.s3.endpoint,
            s3_access_key="testkey",
            s3_secret_key=SecretStr("testsecret"),
            http_port=-1,
            bucket_models=bucket,
        )

    def start_service(self, bucket: str) -> None:
        """Run the service as an operator would, in a process of its own."""
        own = {
            "NATS_URL": self.nats.url,
            "S3_ENDPOINT": self.s3.endpoint,
            "S3_ACCESS_KEY": "testkey",
            "S3_SECRET_KEY": "testsecret",
            "HTTP_PORT": "-1",
            "BUCKET_MODELS": bucket,
        }
        environment = {**os.environ, **{f"TRAINBUS_{name}": value for name, value in own.items()}}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "services.checkpoint"]
            self.service = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill_service(self) -> None:
        if self.service is not None:
            self.service.send_signal(signal.SIGKILL)
            self.service.wait()
            self.service = None

    def stop(self) -> None:
        self.kill_service()
        self.nats.stop()
        self.s3.stop()


async def emulated(stack: Stack, count: int, first_seed: int) -> tuple[list[str], Counter[str]]:
    """Trials in this process: a fault at chosen lines."""
    problems: list[str] = []
    struck: Counter[str] = Counter()
    bus = Bus("faults", stack.settings("models"))
    await bus.connect()
    try:
        for seed in track(range(first_seed, first_seed + count), description="lines of the protocol"):
            settings = stack.settings(f"models-{seed}")
            async with ObjectStore(settings) as objects:
                await objects.ensure_bucket(settings.bucket_models)
                trial = Trial(bus, objects, settings, seed)
                try:
                    await trial.live(steps=4, faults=6, corruptions=int(seed % 3 == 0))
                except Exception as error:
                    problems.append(f"{trial.run_id}: {error!r} after {trial.faults.struck}")
            problems += trial.problems
            struck.update(each.split(" ", 2)[2] for each in trial.faults.struck)
            struck["changed byte"] += len(trial.corrupted)
    finally:
        await bus.close()
    return problems, struck


async def real(stack: Stack, seed: int) -> tuple[list[str], Counter[str]]:
    """One trial with kill -9 of processes, while agents publish four checkpoints."""
    chance = random.Random(seed)
    settings = stack.settings(f"real-{seed}")
    struck: Counter[str] = Counter()
    bus = Bus("faults", settings)
    await bus.connect()
    try:
        async with ObjectStore(settings) as objects:
            await objects.ensure_bucket(settings.bucket_models)
            trial = Trial(bus, objects, settings, seed)
            trial.faults.off = True
            await trial.place()
            stack.start_service(settings.bucket_models)
            steps = [10, 20, 30, 40]
            for step in steps:
                for node in NODES:
                    await trial.agent(node, step)
                await asyncio.sleep(chance.uniform(0, 0.4))
                victim = chance.choice(("service", "service", "nats-server", "S3", "none"))
                struck[f"kill -9 {victim}"] += 1
                if victim == "service":
                    stack.kill_service()
                    stack.start_service(settings.bucket_models)
                elif victim != "none":
                    server: Any = stack.nats if victim == "nats-server" else stack.s3
                    server.kill()
                    await asyncio.to_thread(server.start)
            await settled(bus, trial, len(steps))
            await trial.check(last=True)
    finally:
        stack.kill_service()
        await bus.close()
    return trial.problems, struck


async def settled(bus: Bus, trial: Trial, steps: int) -> None:
    """Wait until every step is committed or refused; what is not by then is a problem."""
    deadline = time.monotonic() + SETTLE_S
    names = [subjects.fact("run", trial.run_id, fact.fact) for fact in (CheckpointCommitted, CheckpointRefused)]
    while len(await bus.read_history(*names)) < steps:
        if time.monotonic() > deadline:
            trial.problems.append(f"{trial.run_id}: a staged step was neither committed nor refused")
            return
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--real", type=int, default=20, help="of them, with processes killed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainbus-faults-") as folder:
        stack = Stack(Path(folder))
        stack.nats.start()
        stack.s3.start()
        try:
            problems, struck = asyncio.run(emulated(stack, given.trials - given.real, given.seed))
            for number in track(range(given.real), description="kill -9"):
                more, killed = asyncio.run(real(stack, 1_000_000 + given.seed + number))
                problems += more
                struck += killed
        finally:
            stack.stop()
    took_s = time.monotonic() - began
    missed = [line for line in LINES if not struck[line]]
    rows = [
        ("broken promises", str(len(problems)), "0"),
        ("trials", str(given.trials), "500"),
        ("faults that struck", str(sum(struck.values())), ""),
        ("lines of the protocol hit", f"{len(LINES) - len(missed)} of {len(LINES)}", f"{len(LINES)}"),
        ("seconds", f"{took_s:.0f}", ""),
        *((line, str(count), "") for line, count in sorted(struck.items())),
    ]
    report(
        "commit-faults",
        rows,
        {"trials": given.trials, "real": given.real, "problems": problems, "struck": dict(struck), "seconds": took_s},
    )
    for problem in problems[:20]:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
