"""An embedded stack under test: publish, wait for facts, kill, and audit what survived."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import math
import os
import signal
import sys
import tarfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.base import run_id_for
from contracts.events.run import RunFact, RunPlaced, RunStarted
from services.kit.bus import Bus, Message
from services.kit.store.objects import ObjectStore
from trainbus.client.address import find_address
from trainbus.embedded.launch import StackProcess, read_stack
from trainbus.embedded.layout import StackOptions
from trainbus.operate.stack_settings import read_settings
from trainbus.ranks.step_hold import StepHold

PROJECT = Path(__file__).parent / "project"
LAKE = "s3://lake/digits-small/"
IMAGES = 300
#: Seconds until a run, alone or among others, has come as far as a test waits for.
DONE_S = 240.0
OVER = ("rejected", "completed", "failed", "cancelled")
Body = dict[str, Any]


def digits(count: int) -> list[tuple[str, bytes]]:
    """``count`` of scikit-learn's handwritten digits as (path, PNG) pairs."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    found = []
    for number in range(count):
        buffer = io.BytesIO()
        Image.fromarray((data.images[number] * 15).astype("uint8")).save(buffer, format="PNG")
        found.append((f"{data.target[number]}/{number:05}.png", buffer.getvalue()))
    return found


def package(files: dict[str, str]) -> bytes:
    """A gzipped tar of text files, by path. Paths are taken as they are, good or evil."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def held(holds: dict[StepHold, int] | None) -> Body:
    """Return the parameter of a task that can be held: after how many steps it waits for the release of each hold."""
    return {"holds": {str(hold.path): step for hold, step in holds.items()}} if holds else {}


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and what it printed: on stdout for programs, on stderr what a person is told besides."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All of it."""
        return self.out + self.err


@dataclass
class Stack:
    """Handles on a running stack."""

    data_dir: Path
    bus: Bus
    objects: ObjectStore
    #: Every run that this test has asked for.
    published: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name this stack to its own services and commands."""
        address = find_address(self.data_dir)
        settings = read_settings(address)
        assert settings.s3_secret_key is not None
        named = {
            "gateway_url": address.gateway_url,
            "nats_url": settings.nats_url,
            "s3_endpoint": settings.s3_endpoint,
            "s3_access_key": settings.s3_access_key,
            "s3_secret_key": settings.s3_secret_key.get_secret_value(),
        }
        return {f"TRAINBUS_{name.upper()}": value for name, value in named.items() if value is not None}

    # -- input --------------------------------------------------------------

    async def fill_lake(self) -> None:
        await asyncio.gather(*(self.objects.put(f"{LAKE}{path}", png) for path, png in digits(IMAGES)))

    async def upload(self, body: bytes) -> Body:
        """Store a code package; return the request's ``code``."""
        digest = hashlib.sha256(body).hexdigest()
        uri = f"s3://code/packages/{digest}.tar.gz"
        await self.objects.put(uri, body)
        return {"uri": uri, "sha256": digest}

    def hold(self) -> StepHold:
        """Make a hold for runs to wait for: what must happen in mid-run happens before its end, however slow."""
        return StepHold(self.data_dir / f"hold-{uuid.uuid4().hex}")

    async def slow_run(
        self, *, epochs: int = 8, step_s: float = 0.03, holds: dict[StepHold, int] | None = None, **changes: Any
    ) -> Body:
        """A request that trains ``epochs`` times over the small digits, in 15 steps each.

        ``holds``: after how many steps it waits for the release of each.
        """
        params = {"step_s": step_s, **held(holds)}
        code = await self.upload(package({"slow_task.py": (PROJECT / "slow_task.py").read_text()}))
        body: Body = {
            "name": "slow",
            "experiment": "e2e",
            "code": code,
            "task": "slow_task:Slow",
            "params": params,
            "slots": {"min": 1, "max": 2},
            "data": {"source": LAKE, "format": "images"},
            "training": {"epochs": epochs, "global_batch": 16, "checkpoint_every_steps": 20},
            "model": f"m-{uuid.uuid4().hex[:6]}",
            "evaluation": {"metric": "test/accuracy", "mode": "max"},
            "env": {"TRAINBUS_RECORD_SAMPLES": "1"},
            "max_attempts": 5,
            "grace_s": 10,
        }
        return {**body, **changes}

    async def publish(
        self, body: Body | bytes, subject: str = "train.requested", headers: dict[str, str] | None = None
    ) -> str:
        """Publish a bare body under an id of its own; return the run's id."""
        event_id = uuid.uuid4().hex
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.bus.js.publish(subject, raw, headers={"Nats-Msg-Id": event_id, **(headers or {})})
        self.published.append(run_id_for("nats", event_id))
        return self.published[-1]

    async def sleeper(self, *, seconds: float, priority: int = 0) -> str:
        """Publish a command that has one slot for a while; return its run's id."""
        command = ["sleep", str(seconds)]
        return await self.publish({"name": "sleeper", "command": command, "priority": priority})

    async def occupant(self, hold: StepHold, priority: int = 0) -> str:
        """Publish a command that has one slot until the hold is released; return its run's id."""
        command = ["sh", "-c", 'while [ -e "$0" ]; do sleep 0.05; done', str(hold.path)]
        return await self.publish({"name": "occupant", "command": command, "priority": priority})

    async def end_runs(self) -> None:
        """Cancel what still runs of this test, and wait for its end: the next test finds every slot free."""
        for run_id in self.published:
            facts = [message.event.fact for message in await self.facts(run_id)]
            if "accepted" in facts and not set(facts) & set(OVER):
                await self.bus.js.publish("cancel.requested", json.dumps({"run_id": run_id}).encode())
                await self.wait_for(run_id, OVER[-1], or_else=OVER)

    async def request(self, subject: str, body: Body) -> str:
        """Publish another kind of request; return the id of the run that it makes, if it makes one."""
        return await self.publish(body, subject)

    async def cli(self, *arguments: str, timeout_s: float = 300.0) -> Done:
        """Run ``trainbus`` against this stack, as a person in a shell would."""
        command = (sys.executable, "-m", "trainbus", *arguments, "--data-dir", str(self.data_dir))
        return await self.shell(*command, timeout_s=timeout_s)

    async def shell(self, *command: str, timeout_s: float = 300.0) -> Done:
        """Run a command to its end."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")},
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())

    # -- output -------------------------------------------------------------

    async def facts(self, run_id: str) -> list[Message[Any]]:
        return await self.bus.read_history(f"run.{run_id}.*")

    async def wait_for(
        self,
        run_id: str,
        fact: str,
        timeout_s: float = DONE_S,
        condition: Callable[[Any], bool] = lambda _: True,
        or_else: tuple[str, ...] = (),
    ) -> Any:
        """Wait for a fact of a run, or one of ``or_else``; fail at once when the run is over without it."""
        deadline = time.monotonic() + timeout_s
        seen: list[str] = []
        async for batch in self.bus.follow("FACTS", (f"run.{run_id}.*",)):
            for message in batch:
                event: RunFact = message.event
                seen.append(event.fact)
                if event.fact in (fact, *or_else) and condition(event):
                    return event
                assert event.fact not in OVER or fact in ("evaluated", "promoted", "not_promoted"), (
                    f"{run_id} is over without {fact}: {event}"
                )
            assert time.monotonic() < deadline, f"no {fact} of {run_id} within {timeout_s:.0f} s; seen: {seen}"
        raise AssertionError("unreachable")

    async def wait_for_step(self, run_id: str, step: int, timeout_s: float = DONE_S, generation: int = 1) -> None:
        """Wait until training has reported ``step`` in this generation or a later one."""
        deadline = time.monotonic() + timeout_s
        async for batch in self.bus.follow("PROGRESS", (f"progress.{run_id}",)):
            for message in batch:
                if message.event.generation >= generation and message.event.step >= step:
                    return
            assert time.monotonic() < deadline, f"{run_id} did not reach step {step} within {timeout_s:.0f} s"

    async def wait_for_node(self, node_id: str, fact: str, *, after: int = 0, timeout_s: float = 120.0) -> None:
        """Wait for a fact of a node behind a place in the log."""
        deadline = time.monotonic() + timeout_s
        async for batch in self.bus.follow("FACTS", (f"node.{node_id}.{fact}",), after + 1):
            if batch:
                return
            assert time.monotonic() < deadline, f"no {fact} of {node_id} within {timeout_s:.0f} s"

    # -- faults -------------------------------------------------------------

    def pid(self, name: str) -> int:
        """The process of a server, service or node of the stack.

        Raises:
            ProcessLookupError: it has ended and is not started again yet.
        """
        info = read_stack(self.data_dir)
        assert info is not None
        found = next((int(p["pid"]) for p in info.processes if p["name"] == name and p["pid"]), None)
        if found is None:
            raise ProcessLookupError(f"{name} is just being started again")
        return found

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    async def kill_for(self, name: str, seconds: float) -> None:
        """Keep a server away: it is restarted by the supervisor, and killed again, until the time is over."""
        deadline = time.monotonic() + seconds
        last = None
        while time.monotonic() < deadline:
            info = read_stack(self.data_dir)
            pid = next((p["pid"] for p in info.processes if p["name"] == name), None) if info else None
            if pid is not None and pid != last:
                last = pid
                with contextlib.suppress(ProcessLookupError):  # it is dead, and the supervisor has not noted it yet
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)

    def rank_pids(self, run_id: str) -> list[int]:
        """The processes of a run's ranks, as the agents have noted them."""
        notes = self.data_dir.glob(f"node-*/runs/{run_id}/g*/processes.json")
        return [process["pid"] for note in notes for process in json.loads(note.read_text())]

    # -- audit --------------------------------------------------------------

    async def audit(self, run_id: str, *, epochs: int) -> None:
        """The promises: every sample once an epoch, one promotion, every metric once."""
        facts = await self.facts(run_id)
        counts = Counter(message.event.fact for message in facts)
        assert counts["completed"] == 1, counts
        trained = self._surviving_samples(run_id, [r.event for r in facts if isinstance(r.event, RunPlaced)], facts)
        repeats = Counter(trained.values())
        assert repeats == {epochs: len(trained)}, f"samples trained a wrong number of times: {repeats}"
        prepared = next(r.event for r in facts if r.event.fact == "prepared")
        assert len(trained) == prepared.train_samples
        verdict = await self.wait_for(run_id, "promoted")
        promotions = [
            r for r in await self.bus.read_history(f"model.{verdict.model}.promoted") if r.event.run_id == run_id
        ]
        assert len(promotions) == 1
        await self._audit_metrics(run_id, last_step=math.ceil(prepared.train_samples * epochs / 16))

    def _surviving_samples(self, run_id: str, placed: list[RunPlaced], facts: list[Message[Any]]) -> Counter[str]:
        """How often each sample was trained in the history that led to the result."""
        trained: Counter[str] = Counter()
        starts = {p.generation: (p.resume.step if p.resume else 0) for p in placed}
        # Ranks that took up state from memory began beyond the checkpoint that they were given.
        starts |= {r.event.generation: r.event.step for r in facts if isinstance(r.event, RunStarted) and r.event.step}
        for generation, start in starts.items():
            later = [starts[other] for other in starts if other > generation]
            end = min(later) if later else None
            for path in self.data_dir.glob(f"node-*/runs/{run_id}/g{generation}/samples_rank_*.jsonl"):
                for line in path.read_text().splitlines():
                    entry = json.loads(line)
                    if entry["step"] > start and (end is None or entry["step"] <= end):
                        trained.update(entry["keys"])
        return trained

    async def _audit_metrics(self, run_id: str, last_step: int) -> None:
        """MLflow has exactly one loss a step, and no step is missing."""
        history = await self.tracked(run_id, "train/loss")
        assert sorted(history["train/loss"]) == list(range(1, last_step + 1))

    async def tracked(self, run_id: str, *names: str) -> dict[str, dict[int, float]]:
        """What MLflow holds of a run once it has ended there: each metric by step, none of them twice."""
        from mlflow import MlflowClient

        info = read_stack(self.data_dir)
        assert info is not None
        deadline = time.monotonic() + 120
        while True:
            tracked = [r.event for r in await self.facts(run_id) if r.event.fact == "tracked"]
            # Not before the fact: where there is no database yet, a client begins to make one.
            if tracked:
                client = MlflowClient(info.mlflow_tracking_uri)
                if client.get_run(tracked[-1].mlflow_run_id).info.status in ("FINISHED", "FAILED", "KILLED"):
                    break
            assert time.monotonic() < deadline, "the run has not ended in MLflow"
            await asyncio.sleep(0.2)
        found: dict[str, dict[int, float]] = {}
        for name in names:
            points = client.get_metric_history(tracked[-1].mlflow_run_id, name)
            found[name] = {point.step: point.value for point in points}
            assert len(found[name]) == len(points), f"{name} is there twice"
        return found


@contextlib.asynccontextmanager
async def connected(data_dir: Path) -> AsyncIterator[Stack]:
    """Connect to the stack on a data folder."""
    settings = read_settings(find_address(data_dir))
    bus = Bus("e2e", settings)
    await bus.connect(reconcile_topology=False)
    try:
        async with ObjectStore(settings) as objects:
            yield Stack(data_dir, bus, objects)
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def own_stack(folder: Path) -> AsyncIterator[Stack]:
    """Start a stack for one test, with images in its lake."""
    options = StackOptions(folder / "data")
    with StackProcess(options, output=folder / "output.log") as process:
        process.wait_ready()
        async with connected(options.data_dir) as stack:
            await stack.fill_lake()
            yield stack
