"""Histories with outages: parts that hang or are killed for a while, in mid-run, and what must come out all the same.

A part that is stopped (SIGSTOP) keeps its connections and its leases until they run out, and goes on where it was: what
a network partition, a machine that swaps, or a live migration does. One that is killed is started again by the
supervisor, and killed again until its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import psutil

from contracts.manifest import files_of
from services.kit.bus import TransientError
from services.kit.store.uris import blob_sha256
from tests.e2e.support import Body, Stack
from tests.suite.pauses import paused

EPOCHS = 8
#: The fewest steps that they take; how many it is depends on the split.
STEPS = 15 * EPOCHS
SERVICES = ("scheduler", "ingestion", "sharding", "checkpoint", "tracking", "evaluation", "gateway")
#: What can be away, as often as it stands here: the result depends on some more than on others.
TARGETS = (*SERVICES, "checkpoint", "evaluation", "nats", "nats", "s3", "s3", "node-0", "node-1")
#: Seconds that a history may take besides its outages: it only ends what hangs.
LIMIT_S = 600.0

How = Literal["stop", "kill"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outage:
    """A part is away for some seconds, from when the run has come to a step."""

    target: str
    how: How
    seconds: float
    step: int

    def __str__(self) -> str:
        return f"{self.how} {self.target} for {self.seconds:g} s at step {self.step}"


def draw(number: int, seconds: Sequence[float] = (1.0, 20.0, 90.0), seed: int = 0) -> tuple[Outage, ...]:
    """Return the outages of the history of that number: one to three."""
    rng = random.Random(f"{seed}/{number}")
    hows: tuple[How, ...] = ("stop", "kill")
    count = rng.randint(1, 3)
    targets = rng.sample(sorted(set(TARGETS)), count) if count > 1 else [rng.choice(TARGETS)]
    return tuple(
        Outage(target, rng.choice(hows), rng.choice(list(seconds)), rng.randint(1, STEPS)) for target in targets
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: all that must not depend on outages."""

    #: The digest of the state that it is completed with, and that state's step.
    state: str
    step: int
    metrics: tuple[tuple[str, float], ...]
    verdict: str


async def play(stack: Stack, outages: Sequence[Outage] = ()) -> tuple[str, Outcome]:
    """Train, evaluate and promote a model while parts are away; return the run and what came of it.

    Raises:
        AssertionError: the run did not end well, or something that its facts name cannot be fetched.
    """
    run_id = await stack.publish(await request(stack))
    limit_s = LIMIT_S + sum(outage.seconds for outage in outages)
    async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
        for outage in outages:
            group.create_task(_strike(stack, run_id, outage, limit_s))
        group.create_task(stack.wait_for(run_id, "completed", limit_s))
    verdict = await stack.wait_for(run_id, "promoted", limit_s, or_else=("not_promoted",))
    history = await _patiently(lambda: stack.facts(run_id))
    facts = [message.event for message in history]
    disputed = [m.event for m in history if m.event.fact == "released" and m.envelope.source == "trainbus/scheduler"]
    assert not disputed, f"the scheduler and an agent disagree: {disputed}"
    [completed] = [fact for fact in facts if fact.fact == "completed"]
    [evaluated] = [fact for fact in facts if fact.fact == "evaluated"]
    commits = {fact.checkpoint.uri: fact for fact in facts if fact.fact == "checkpoint_committed"}
    commit = commits[completed.checkpoint.uri]
    await _patiently(lambda: _fetch_all(stack, run_id, facts))
    metrics = tuple(sorted(evaluated.metrics.items()))
    return run_id, Outcome(commit.state_digest or "", completed.checkpoint.step, metrics, verdict.fact)


async def request(stack: Stack) -> Body:
    """A run whose final state is the same to the bit, however often and wherever it is placed."""
    body = await stack.slow_run(epochs=EPOCHS)
    # A checkpoint at the end of each epoch and no others.
    body["training"] |= {"logical_ranks": 2, "seed": 3, "checkpoint_every_steps": None, "checkpoint_every_s": 3600}
    # Measured at the end alone: which of the others was written in time is a matter of luck, and so is the best one.
    body["training"]["validate_every_steps"] = 100 * STEPS
    body["max_attempts"] = 10
    return body


async def _strike(stack: Stack, run_id: str, outage: Outage, limit_s: float) -> None:
    await stack.wait_for_step(run_id, outage.step, limit_s)
    if outage.how == "kill":
        await stack.kill_for(outage.target, outage.seconds)
        return
    while True:
        # One that is just being started again can be stopped in a moment.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            with paused(psutil.Process(stack.pid(outage.target))):
                await asyncio.sleep(outage.seconds)
            return
        await asyncio.sleep(0.05)


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Do what needs the bus or the store, which the history beside may have stopped."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(TransientError):
                return await work()
            await asyncio.sleep(0.2)


async def _fetch_all(stack: Stack, run_id: str, facts: Sequence[Any]) -> None:
    """Fetch what the facts about a run's end name, down to the last blob."""
    promotions = [message.event for message in await stack.bus.read_history("model.*.promoted")]
    checkpoints = {fact.checkpoint_uri for fact in promotions if fact.run_id == run_id}
    files = []
    for fact in facts:
        if fact.fact == "completed":
            checkpoints.add(fact.checkpoint.uri)
            files += fact.artifacts
        elif fact.fact == "evaluated":
            files += fact.report
    for file in files:
        assert hashlib.sha256(await stack.objects.get(file.uri)).hexdigest() == file.sha256
    for uri in checkpoints:
        manifest = await stack.objects.get(uri)
        for blob in {blob for file in files_of(manifest) for blob in file.uris}:
            assert hashlib.sha256(await stack.objects.get(blob)).hexdigest() == blob_sha256(blob)
