"""MLflow's server and Ray Serve with the same linear model: the rate that each sustains, and what an update loses."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from loadtest.served_models import COLUMNS, SUMS, draw_rows, label
from loadtest.serving.bench import QUERIES, start_bench
from loadtest.serving.client import Door, Query, SteadyClient, find_rate
from loadtest.serving.overload import LIMIT_S, TRIAL_S
from services.kit.concurrency import cancel_and_wait
from services.kit.ports import free_ports

#: Requests a second while versions are updated; all of them sustain that.
RATE, SETTLE_S = 50.0, 1.0
START_S = 120.0
RAY_SCRIPT = Path(__file__).with_name("ray_script.py")
Update = Callable[[int], Awaitable[None]]
Peer = Callable[[Path], Any]


async def measure_peer(start: Peer, updates: int) -> dict[str, Any]:
    """Return the rate of a server, and the requests that were lost in its updates."""
    with tempfile.TemporaryDirectory() as name:
        async with start(Path(name)) as (door, update):
            rate, tried = await find_rate(door, LIMIT_S, TRIAL_S)
            client = SteadyClient(door, RATE)
            sending = asyncio.create_task(client.run())
            try:
                for number in range(updates):
                    await update(number)
                    await asyncio.sleep(SETTLE_S)
            finally:
                await cancel_and_wait(sending)
    lost = [each for each in client.replies if each.status != 200]
    return {
        "rate_per_s": round(rate, 1),
        "rates_tried": tried,
        "updates": updates,
        "requests": len(client.replies),
        "lost": len(lost),
        "wrong_answers": sum(not each.is_right for each in client.replies),
    }


@asynccontextmanager
async def start_trainbus(folder: Path) -> AsyncIterator[tuple[Door, Update]]:
    async with start_bench(folder, SUMS) as bench:
        await bench.deploy("r0")

        async def update(number: int) -> None:
            await bench.deploy(f"update{number}")

        yield bench.door, update


@asynccontextmanager
async def start_mlflow(folder: Path) -> AsyncIterator[tuple[Door, Update]]:
    """``mlflow models serve`` has no update: the server ends, and one with the other model starts."""
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    (port,) = free_ports(1)
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]))
        model.bias.zero_()
    signature = ModelSignature(Schema([TensorSpec(np.dtype(np.float32), (-1, len(COLUMNS)))]))
    for name in ("odd", "even"):
        mlflow.pytorch.save_model(model, folder / name, signature=signature, serialization_format="pickle")
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local", "-p", str(port), "-m"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "mlflow.log").open("wb") as log:

        def start(number: int) -> subprocess.Popen[bytes]:
            target = str(folder / ("odd" if number % 2 else "even"))
            return subprocess.Popen([*command, target], env=environment, stdout=log, stderr=log, start_new_session=True)

        server = start(0)
        rows = draw_rows(QUERIES, 7)
        queries = [_query({"inputs": [[row[name] for name in COLUMNS]]}, label(row)) for row in rows]
        door = Door(f"http://127.0.0.1:{port}/invocations", queries, _best_of_logits)

        async def update(number: int) -> None:
            nonlocal server
            _end(server)
            server = start(number + 1)
            await _wait_ready(f"http://127.0.0.1:{port}/ping")

        try:
            await _wait_ready(f"http://127.0.0.1:{port}/ping")
            yield door, update
        finally:
            _end(server)


def start_ray(python: Path) -> Peer:
    """Return how Ray Serve of that environment starts. It updates a deployment by a rolling update of its own."""

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[tuple[Door, Update]]:
        (port,) = free_ports(1)
        with (folder / "ray.log").open("wb") as log:
            server = await asyncio.create_subprocess_exec(
                str(python),
                str(RAY_SCRIPT),
                str(port),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
            assert server.stdin is not None
            assert server.stdout is not None
            reply = server.stdout

            async def update(number: int) -> None:
                assert server.stdin is not None
                server.stdin.write(f"{number + 1}\n".encode())
                async with asyncio.timeout(START_S):
                    while not (line := await reply.readline()).startswith(b"updated"):
                        assert line, "Ray Serve has ended; see its log"

            rows = draw_rows(QUERIES, 7)
            queries = [_query([row[name] for name in COLUMNS], label(row)) for row in rows]
            try:
                await update(-1)
                yield Door(f"http://127.0.0.1:{port}/", queries, lambda content: int(content["prediction"])), update
            finally:
                server.stdin.close()
                await server.wait()

    return start


def versions(ray_python: Path | None) -> dict[str, str]:
    """Return which versions of the peers were measured."""
    found = {"mlflow": importlib.metadata.version("mlflow")}
    if ray_python is not None:
        command = [str(ray_python), "-c", "import ray; print(ray.__version__)"]
        found["ray"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return found


def _query(body: Any, answer: int) -> Query:
    return Query(json.dumps(body).encode(), "application/json", answer)


def _best_of_logits(content: Any) -> int:
    low, high = content["predictions"][0]
    return int(high > low)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()


async def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")
