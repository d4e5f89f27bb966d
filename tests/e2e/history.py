"""Random histories of exact runs: what is killed, preempted and resized when, and what must come out all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from contracts.datasets import dataset_uri, shard_uri
from tests.e2e.support import OVER, Body, Stack, package
from tests.trainbus.support import exact_dataset
from trainbus.embedded.launch import read_stack

TASKS = Path(__file__).parent.parent / "trainbus" / "exact_tasks.py"
#: Seconds a history may take, however often it is broken off.
HISTORY_S = 180.0
#: The longest wait before a deed, counted from when the generation's ranks have started.
LONGEST_WAIT_S = 1.2
SERVICES = ("scheduler", "checkpoint", "tracking", "gateway")

Deed = Literal["rank", "node", "agent", "service", "preempt", "shrink"]
#: What happens, as often as it stands here: the crash of a rank is the commonest.
DEEDS: tuple[Deed, ...] = ("rank", "rank", "rank", "agent", "node", "service", "preempt", "shrink", "shrink")


@dataclass(frozen=True, slots=True)
class Config:
    """What is trained. Everything that decides the result is in it; where and how often it was broken off is not."""

    task: str = "MLP"
    logical_ranks: int = 4
    strategy: str = "ddp"
    precision: str = "fp32"
    steps: int = 90

    def training(self) -> Body:
        """``training`` of the request. Each setting that is hard to keep exact is on in some of the configurations."""
        return {
            "max_steps": self.steps,
            "global_batch": 26,
            "logical_ranks": self.logical_ranks,
            "strategy": self.strategy,
            "precision": self.precision,
            "clip_norm": 1.0,
            "ema_decay": 0.9 if self.logical_ranks == 7 else None,
            "accumulate": 2 if self.logical_ranks == 4 else 1,
            "buffers": "mean" if self.logical_ranks == 12 else "first",
            "checkpoint_every_steps": 20,
            "validate_every_steps": 30,
            "log_every_steps": 5,
            "seed": 3,
        }

    def __str__(self) -> str:
        return f"{self.task}/{self.strategy}/{self.precision}/V={self.logical_ranks}"


@dataclass(frozen=True, slots=True)
class Case:
    """One history: what is trained, on how many slots at most, and what is done to it (what, when, to whom)."""

    number: int
    config: Config
    slots: int
    deeds: tuple[tuple[Deed, float, float], ...]

    def __str__(self) -> str:
        return f"{self.number}: {self.config} on {self.slots}: {', '.join(deed for deed, _, _ in self.deeds)}"


def any_config(rng: random.Random, strategies: Sequence[str] = ("ddp", "zero1", "fsdp2")) -> Config:
    """One of all that there are."""
    task, precision = rng.choice([("MLP", "fp32"), ("CNN", "fp32"), ("GPT", "fp32"), ("GPT", "bf16")])
    return Config(task, rng.choice((4, 7, 12)), rng.choice(strategies), precision)


def draw(number: int, seed: int = 0, config: Callable[[random.Random], Config] = any_config) -> Case:
    """The history of that number. The same number is the same history, as far as clocks allow."""
    rng = random.Random(f"{seed}/{number}")
    drawn = config(rng)
    deeds = tuple(
        (rng.choice(DEEDS), rng.uniform(0.05, LONGEST_WAIT_S), rng.random()) for _ in range(rng.randint(1, 4))
    )
    return Case(number, drawn, rng.randint(1, min(drawn.logical_ranks, 6)), deeds)


@dataclass(slots=True)
class Result:
    """What came out of one run."""

    run_id: str = ""
    #: Committed states by step.
    digests: dict[int, str] = field(default_factory=dict)
    final: str = ""
    exactness: str = ""
    #: What decides the last bits of arithmetic, as a hash, in each generation.
    environments: set[str] = field(default_factory=set)
    ended: str = ""
    reason: str = ""
    #: Ranks in each generation.
    worlds: list[int] = field(default_factory=list)
    resumed_from: Counter[str] = field(default_factory=Counter)
    done: list[str] = field(default_factory=list)

    def difference(self, reference: Result) -> str:
        """Why this is not the same training as the reference; '' if it is."""
        if self.ended != "completed":
            return f"{self.run_id} is {self.ended}: {self.reason}"
        if not self.final or not reference.final:
            return f"{self.run_id} or its reference has no final state digest"
        for step in sorted(self.digests.keys() & reference.digests.keys()):
            if self.digests[step] != reference.digests[step]:
                return f"{self.run_id} differs from {reference.run_id} at step {step}"
        return "" if self.final == reference.final else f"{self.run_id} differs from {reference.run_id} at the end"


class Theatre:
    """Plays histories on a stack; runs the undisturbed one of each configuration once."""

    def __init__(self, stack: Stack, code: Body, dataset_id: str) -> None:
        self.stack, self._code, self._dataset_id = stack, code, dataset_id
        self._references: dict[Config, asyncio.Task[Result]] = {}
        #: Killing an agent that is just being restarted would only test the supervisor's patience.
        self._killing = asyncio.Lock()

    @classmethod
    async def open(cls, stack: Stack, folder: Path) -> Theatre:
        """Put code and data where runs find them."""
        dataset = exact_dataset(folder)
        for split in dataset.manifest.splits.values():
            for shard in split.shards:
                await stack.objects.upload(folder / shard.path, shard_uri("datasets", shard.sha256))
                await stack.objects.upload(folder / shard.index_path, shard_uri("datasets", shard.index_sha256))
        # The manifest last: with it, the dataset is there.
        await stack.objects.upload(folder / "manifest.json", dataset_uri("datasets", dataset.dataset_id))
        code = await stack.upload(package({TASKS.name: TASKS.read_text()}))
        return cls(stack, code, dataset.dataset_id)

    def body(self, config: Config, slots: int, **changes: Any) -> Body:
        """The request for a run of ``config`` on up to ``slots`` slots."""
        training = {name: value for name, value in config.training().items() if value is not None}
        return {
            "name": str(config),
            "experiment": "histories",
            "code": self._code,
            "task": f"{TASKS.stem}:{config.task}",
            "slots": {"min": 1, "max": slots},
            "data": {"dataset_id": self._dataset_id},
            "training": training,
            "max_attempts": 10,
            "grace_s": 10,
            **changes,
        }

    async def undisturbed(self, config: Config) -> Result:
        """The configuration's run that nothing was done to."""
        if config not in self._references:
            self._references[config] = asyncio.create_task(self.run(self.body(config, 1)))
        return await asyncio.shield(self._references[config])

    async def play(self, case: Case) -> tuple[Result, str]:
        """Play one history; return what came out and how it differs from the undisturbed run ('' : not at all)."""
        reference = await self.undisturbed(case.config)
        result = await self.run(self.body(case.config, case.slots), case.deeds)
        difference = result.difference(reference)
        if not difference and result.exactness != "exact":
            difference = f"{result.run_id} is {result.exactness}, not exact"
        return result, difference

    async def negative_controls(self, config: Config) -> dict[str, bool]:
        """What must not be equal, or not be called exact. True: it is found out."""
        plain = self.body(config, 1)
        for name in ("logical_ranks", "buffers"):
            plain["training"].pop(name)
        plain["training"]["strategy"] = "ddp"
        one, two = await asyncio.gather(self.run(plain), self.run({**plain, "slots": {"min": 2, "max": 2}}))
        reference = await self.undisturbed(config)
        # A processor that is said to know fewer instructions: what a run on such a node would start with.
        other = await self.run(self.body(config, 1, env={"ATEN_CPU_CAPABILITY": "default"}))
        return {
            "plain_ddp_on_two_ranks_differs": bool(one.final) and bool(two.final) and one.final != two.final,
            "plain_ddp_is_not_called_exact": one.exactness == two.exactness == "samples-exact",
            "other_arithmetic_is_another_environment": other.environments.isdisjoint(reference.environments),
            "other_arithmetic_differs": bool(other.final) and other.final != reference.final,
        }

    async def run(self, body: Body, deeds: tuple[tuple[Deed, float, float], ...] = ()) -> Result:
        """Publish a run, do to it what is to be done, and follow it to its end."""
        result = Result(run_id=await self.stack.publish(body))
        started = asyncio.Event()
        async with _beside(self._disturb(result, started, deeds)):
            async with asyncio.timeout(HISTORY_S):
                await self._follow(result, started)
        return result

    async def _follow(self, result: Result, started: asyncio.Event) -> None:
        async for batch in self.stack.bus.follow("FACTS", (f"run.{result.run_id}.*",), idle_s=1.0):
            for message in batch:
                event = message.event
                match event.fact:
                    case "placed":
                        result.worlds.append(event.world_size)
                        started.clear()
                    case "started":
                        if len(result.worlds) > sum(result.resumed_from.values()):  # one of each generation's nodes
                            result.resumed_from[event.resumed_from] += 1
                        result.environments.add(event.environment_digest or "")
                        started.set()
                    case "checkpoint_committed":
                        result.digests[event.checkpoint.step] = event.state_digest or ""
                        result.exactness = event.exactness
                        result.final = event.state_digest or "" if event.final else result.final
                if event.fact in OVER:
                    result.ended, result.reason = event.fact, getattr(event, "reason", "")
                    return

    # -- deeds --------------------------------------------------------------

    async def _disturb(
        self, result: Result, started: asyncio.Event, deeds: tuple[tuple[Deed, float, float], ...]
    ) -> None:
        for deed, wait_s, whom in deeds:
            await started.wait()
            await asyncio.sleep(wait_s)
            with contextlib.suppress(ProcessLookupError):  # it was to be killed and is just being started again
                if await self._do(deed, whom, result):
                    result.done.append(deed)

    async def _do(self, deed: Deed, whom: float, result: Result) -> bool:
        """Do it to the one that ``whom`` (0 to 1) falls on; False if there was nobody to do it to."""
        async with self._killing:
            match deed:
                case "rank":
                    return self._kill(_pick(self._ranks(result), whom)[1:])
                case "node":
                    node, *_ = _pick(self._ranks(result), whom) or ("",)
                    ranks = [pid for at, *pids in self._ranks(result) if at == node for pid in pids]
                    return bool(node) and self._kill([self.stack.pid(str(node)), *ranks])
                case "agent":
                    node, *_ = _pick(self._ranks(result), whom) or ("",)
                    return bool(node) and self._kill([self.stack.pid(str(node))])
                case "service":
                    return self._kill([self.stack.pid(SERVICES[int(whom * len(SERVICES))])])
                case "preempt" | "shrink":
                    info = read_stack(self.stack.data_dir)
                    assert info is not None
                    total = info.nodes * info.slots
                    count = total if deed == "preempt" else 1 + int(whom * (total - 1))
                    for _ in range(count):
                        await self.stack.sleeper(seconds=0.2 + 0.4 * whom, priority=10)
                    return True

    def _ranks(self, result: Result) -> list[tuple[Any, ...]]:
        """(node, pid) of the ranks of the run's newest generation that are alive."""
        found = []
        for note in self.stack.data_dir.glob(f"node-*/runs/{result.run_id}/g{len(result.worlds)}/processes.json"):
            node = note.parts[-5]
            found += [(node, each["pid"]) for each in json.loads(note.read_text()) if _lives(each)]
        return sorted(found)

    def _kill(self, pids: list[Any] | tuple[Any, ...]) -> bool:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)


def _pick(found: list[tuple[Any, ...]], whom: float) -> tuple[Any, ...]:
    return found[int(whom * len(found))] if found else ()


def _lives(process: dict[str, Any]) -> bool:
    """Whether it is the very process that was noted: its number may be somebody else's by now."""
    try:
        return bool(abs(psutil.Process(process["pid"]).create_time() - process["created"]) < 0.05)
    except psutil.Error:
        return False


@contextlib.asynccontextmanager
async def _beside(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
