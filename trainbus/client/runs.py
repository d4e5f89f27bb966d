"""Runs, nodes and models as the log has them: they can be read while every service is down."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from contracts import subjects, topology
from contracts.events import run
from contracts.state.run import TERMINAL_STATES
from trainbus.client.connection import Connection, StoredEvent
from trainbus.client.errors import NotFoundError
from trainbus.client.views import RunView, StackView, fold_facts

#: The facts that a list of runs needs; the many others of long runs stay on the server.
RUN_FACTS = tuple(
    subjects.fact("run", subjects.WILDCARD, name)
    for name in (
        "accepted", "rejected", "prepared", "prepare_failed", "queued", "waiting", "placed", "started", "preempting",
        "cancelling", "released", "exited", "completed", "failed", "cancelled", "evaluated", "promoted", "not_promoted",
        "checkpoint_committed", "checkpoint_deleted",
    )
)  # fmt: skip
NODE_FACTS = (subjects.node(), *(subjects.fact("run", subjects.WILDCARD, name) for name in (
    "accepted", "placed", "released", "exited", "completed", "failed", "cancelled", "queued",
)))  # fmt: skip
#: Ended runs that a list holds unless all are asked for.
MAX_ENDED_RUNS = 20
#: Messages of PROGRESS that are searched first for a run's position.
NEWEST_PROGRESS = 200
#: Batches without an event, a quarter of a second each, after which the end of a run is looked up.
IDLE_BATCHES = 2


class MetricPoint(NamedTuple):
    """The value of one metric at one step."""

    step: int
    value: float
    #: When the trainer measured it, UTC.
    time: datetime


def fold_events(messages: Iterable[StoredEvent]) -> StackView:
    """Return the state that events of the log add up to."""
    return fold_facts((each.sequence, each.envelope.time, each.event) for each in messages)


async def list_runs(connection: Connection, *, include_ended: bool) -> list[RunView]:
    """Return the runs in the order of their requests: those that have not ended and the newest that have, or all."""
    views = list(fold_events(await connection.read(*RUN_FACTS)).runs.values())
    if not include_ended:
        newest = {each.run_id for each in [each for each in views if each.ended][-MAX_ENDED_RUNS:]}
        views = [each for each in views if not each.ended or each.run_id in newest]
    for view in views:
        if not view.ended:
            await add_progress(connection, view)
    return views


async def read_run(connection: Connection, run_id: str) -> RunView:
    """Return one run as it stands, with its timeline and its training's position."""
    view = fold_events(await connection.read(subjects.run(run_id))).runs[run_id]
    if not view.ended:
        await add_progress(connection, view)
    return view


async def find_run(connection: Connection, name: str) -> str:
    """Return the id of the run that ``name`` means: an id, the unique start of one, or a run's name.

    Raises:
        NotFoundError: there is none (the message has the closest names) or more than one.
    """
    if name.isalnum() and await connection.read(subjects.run(name)):
        return name
    state = fold_events(
        await connection.read(
            subjects.fact("run", subjects.WILDCARD, "accepted"), subjects.fact("run", subjects.WILDCARD, "rejected")
        )
    )
    found = state.find(name)
    if len(found) == 1:
        return found[0].run_id
    if found:
        listed = "\n".join(f"  {each.run_id}  {each.name}" for each in found[:10])
        raise NotFoundError(f"{name!r} is the start of {len(found)} runs; give more of it:\n{listed}")
    known = {text for each in state.runs.values() for text in (each.run_id, each.name) if text}
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; `trainbus ps` lists them"
    raise NotFoundError(f"there is no run {name!r}{hint}")


async def read_end(connection: Connection, run_id: str) -> Any | None:
    """Return the fact that ended a run, None while it has not ended."""
    for fact in run.TERMINAL:
        message = await connection.read_last(topology.FACTS, subjects.fact("run", run_id, fact.fact))
        if message is not None:
            return message.event
    return None


async def follow_run(connection: Connection, run_id: str) -> AsyncIterator[tuple[RunView, list[StoredEvent]]]:
    """Yield a run's state after each batch of its facts, until it has ended and, where one is due, its verdict is out.

    The state is the same object each time.
    """
    state = StackView()
    view = state.runs[run_id] = RunView(run_id)
    async for batch in connection.follow(topology.FACTS, subjects.run(run_id)):
        for message in batch:
            state.apply(message.sequence, message.envelope.time, message.event)
        if batch:
            yield view, batch
        evaluated = view.spec is not None and view.spec.evaluation is not None
        if view.state in TERMINAL_STATES and (view.state != "completed" or not evaluated or view.verdict):
            return


async def follow_until_ended(
    connection: Connection, run_id: str, stream: topology.Stream, subject: str
) -> AsyncIterator[StoredEvent]:
    """Yield the events on a subject until the run has ended and no more come."""
    idle = 0
    async for batch in connection.follow(stream, subject):
        for message in batch:
            yield message
        idle = 0 if batch else idle + 1
        if idle >= IDLE_BATCHES and await read_end(connection, run_id) is not None:
            return


async def wait_for_event(
    connection: Connection, start_sequence: int, subject: str, accepts: Callable[[Any], bool], timeout_s: float
) -> Any | None:
    """Return the first fact on a subject that is accepted, from a sequence number on; None if none comes in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for batch in connection.follow(topology.FACTS, subject, start_sequence=start_sequence):
                for message in batch:
                    if accepts(message.event):
                        return message.event
    return None


async def add_progress(connection: Connection, view: RunView) -> None:
    """Bring the view of a running run up to where its training is now."""
    subject = subjects.progress(view.run_id)
    last = await connection.read_last(topology.PROGRESS, subject)
    if last is None or last.event.generation < view.generation:
        return
    reach = NEWEST_PROGRESS
    while True:
        # The newest messages may be measurements of the node, and each message has some of the metrics only.
        start = max(1, last.sequence - reach)
        messages = await connection.read(subject, stream=topology.PROGRESS, start_sequence=start)
        trained: list[run.RunProgress] = [
            each.event
            for each in messages
            if each.event.kind == "training" and each.event.generation >= view.generation
        ]
        older_ones_remain = start > 1 and (not messages or messages[0].event.generation >= view.generation)
        if trained or not older_ones_remain:
            break
        reach *= 10
    for event in trained:
        apply_progress(view, event)


def apply_progress(view: RunView, event: run.RunProgress) -> None:
    """Bring a view up to what its training has reported."""
    view.step = max(view.step, event.step)
    view.samples_consumed = max(view.samples_consumed, event.samples_consumed)
    view.total_steps, view.epoch = event.total_steps or view.total_steps, max(view.epoch, event.epoch)
    for point in event.points:
        view.metrics.update(point.values)


async def read_metrics(connection: Connection, run_id: str) -> dict[str, list[MetricPoint]]:
    """Return metric name -> points in the order of their steps.

    A step that was trained again after a restart has the value of the newest placement. The bus keeps points for
    14 days; MLflow keeps them for good.
    """
    newest: dict[tuple[str, int], tuple[int, MetricPoint]] = {}
    for message in await connection.read(subjects.progress(run_id), stream=topology.PROGRESS):
        event: run.RunProgress = message.event
        if event.kind != "training":
            continue
        for point in event.points:
            for name, value in point.values.items():
                known = newest.get((name, point.step))
                if known is None or known[0] <= event.generation:
                    found = MetricPoint(point.step, value, datetime.fromtimestamp(point.time, UTC))
                    newest[name, point.step] = event.generation, found
    series: dict[str, list[MetricPoint]] = {}
    for (name, _), (_, measured) in sorted(newest.items()):
        series.setdefault(name, []).append(measured)
    return series
