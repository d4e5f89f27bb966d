"""One run as its facts, its progress and its output have it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from contracts import streams, subjects
from contracts.events import run
from contracts.metric_names import describe_absent_metrics
from contracts.pace import TrainingPace
from trainbus.client.connection import Connection
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.run_list import read_run
from trainbus.client.stored_event import StoredEvent
from trainbus.client.views import RunView

#: Messages of LOGS that are searched first for a run's last lines.
NEWEST_OUTPUT = 200
#: Facts before which ranks have printed what they had to.
ENDS: tuple[type[run.RunFact], ...] = (run.RunExited, run.RunReleased, *run.TERMINAL)
#: Empty batches, a quarter of a second each, after which no fact is waited for that the read model lacks, or that this
#: version of the client cannot read.
PATIENCE = 40
#: Batches without an event, a quarter of a second each, after which the end of a run is looked up.
IDLE_BATCHES = 2


class RankLine(NamedTuple):
    """A line of output of one rank."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """Which lines of a run's output are meant; None: all."""

    rank: int | None = None
    #: The last lines alone.
    tail: int | None = None
    #: Printed since then; lines are published together every second or so.
    since: datetime | None = None
    #: A regular expression that is found in the line.
    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise UsageError(f"{self.pattern!r} is no regular expression: {error}") from error

    @property
    def subject_rank(self) -> int | str:
        """The rank in a subject of LOGS."""
        return subjects.WILDCARD if self.rank is None else self.rank

    def select(self, message: StoredEvent) -> list[RankLine]:
        """Return the lines of a message that are meant, ``tail`` apart."""
        if self.since is not None and message.time < self.since:
            return []
        found = re.compile(self.pattern or "").search
        return [RankLine(message.event.rank, line) for line in message.event.lines if found(line)]


class MetricPoint(NamedTuple):
    """The value of one metric at one step."""

    step: int
    value: float
    #: When the trainer measured it, UTC.
    time: datetime


class FollowedRun:
    """A run as it goes on: its view, without a timeline, is read again as facts about it come."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self.view = RunView(run_id)
        self._connection = connection
        #: Place in the log of the last fact that has come.
        self._last = 0
        self._patience = 0

    async def update(self, batch: Iterable[StoredEvent]) -> None:
        """Bring the view up to a batch; after an empty one, up to what the read model did not have before."""
        fresh = [each.sequence for each in batch if isinstance(each.event, run.RunFact)]
        self._last = max([self._last, *fresh])
        self._patience = PATIENCE if fresh else self._patience - 1
        if fresh or (self.view.sequence < self._last and self._patience > 0):
            self.view = await read_run(self._connection, self.view.run_id, timeline=0)

    @property
    def is_complete(self) -> bool:
        """Whether all facts that are in the view have come."""
        return self._last >= self.view.sequence or self._patience <= 0

    @property
    def is_settled(self) -> bool:
        """Whether the run has ended and, where one is due, its verdict is out; and the facts that say so have come."""
        view = self.view
        evaluated = view.spec is not None and view.spec.evaluation is not None
        has_result = view.state != "completed" or not evaluated or bool(view.verdict)
        return view.ended and has_result and self.is_complete


async def read_end(connection: Connection, run_id: str) -> Any | None:
    """Return the fact that ended a run, None while it has not ended."""
    for fact in run.TERMINAL:
        message = await connection.read_last(streams.FACTS, subjects.fact("run", run_id, fact.fact))
        if message is not None:
            return message.event
    return None


async def follow_run(connection: Connection, run_id: str) -> AsyncIterator[tuple[RunView, list[StoredEvent]]]:
    """Yield a run after each batch of its facts, until it has ended and, where one is due, its verdict is out."""
    followed = FollowedRun(connection, run_id)
    async for batch in connection.follow(streams.FACTS, subjects.run(run_id)):
        await followed.update(batch)
        if batch:
            yield followed.view, batch
        if followed.is_settled:
            return


async def follow_output(
    connection: Connection, run_id: str, rank: int | None = 0
) -> AsyncGenerator[tuple[RunView, list[StoredEvent]], None]:
    """Yield a run after each batch of its facts, its progress or its output, until ``follow_run`` ends.

    Facts and progress of the preparation of its data, whose id is the run's, are among them.

    Every line of output comes before the fact that ends the run. ``rank`` None is every rank. An empty batch comes four
    times a second while nothing happens.
    """
    sources = {
        streams.LOGS: (subjects.log(run_id, subjects.WILDCARD if rank is None else rank),),
        streams.PROGRESS: (subjects.progress(run_id), subjects.dataset_progress(run_id)),
    }
    facts = subjects.run(run_id), subjects.fact("dataset", run_id, subjects.WILDCARD)
    position = dict.fromkeys(sources, 0)
    followed, pace = FollowedRun(connection, run_id), TrainingPace()

    async def apply(stream: streams.Stream, batch: list[StoredEvent]) -> None:
        if stream is streams.FACTS:
            await followed.update(batch)
        for message in batch:
            if isinstance(message.event, run.RunProgress) and message.event.kind == "training":
                apply_progress(followed.view, message.event, pace)
            if stream in position:
                position[stream] = message.sequence

    others = {stream: connection.follow(stream, *filters) for stream, filters in sources.items()}
    async with aclosing(_merge({streams.FACTS: connection.follow(streams.FACTS, *facts), **others})) as batches:
        async for stream, batch in batches:
            is_end = stream is streams.FACTS and any(isinstance(message.event, ENDS) for message in batch)
            # A node publishes all output of its ranks before it reports their end.
            for other, filters in sources.items() if is_end else ():
                rest = await connection.read(*filters, stream=other, start_sequence=position[other] + 1)
                await apply(other, rest)
                yield followed.view, rest
            fresh = [each for each in batch if stream not in position or each.sequence > position[stream]]
            await apply(stream, fresh)
            yield followed.view, fresh
            if followed.is_settled:
                return


async def _merge(
    sources: Mapping[streams.Stream, AsyncIterator[list[StoredEvent]]],
) -> AsyncGenerator[tuple[streams.Stream, list[StoredEvent]], None]:
    """Yield the batches of several streams as they come; the empty ones of FACTS alone."""
    arrived: asyncio.Queue[tuple[streams.Stream, list[StoredEvent]]] = asyncio.Queue(maxsize=10)

    async def pump(stream: streams.Stream, batches: AsyncIterator[list[StoredEvent]]) -> None:
        async for batch in batches:
            if batch or stream is streams.FACTS:
                await arrived.put((stream, batch))

    pumps = [asyncio.create_task(pump(stream, batches)) for stream, batches in sources.items()]
    try:
        while True:
            batch = asyncio.create_task(arrived.get())
            done, _ = await asyncio.wait([batch, *pumps], return_when=asyncio.FIRST_COMPLETED)
            if batch not in done:
                batch.cancel()
                await next(iter(done))
                return
            yield batch.result()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def read_output(connection: Connection, run_id: str, choice: OutputChoice) -> list[RankLine]:
    """Return the lines of a run's output that are there, in the order of the log."""
    last = await connection.read_last(streams.LOGS, subjects.log(run_id, choice.subject_rank))
    return [] if last is None else await _read_lines(connection, run_id, choice, last.sequence)


async def _read_lines(connection: Connection, run_id: str, choice: OutputChoice, end: int) -> list[RankLine]:
    """Return the lines up to the sequence number ``end``; of many, no more is read than ``tail`` needs."""
    subject = subjects.log(run_id, choice.subject_rank)
    reach = end if choice.tail is None else NEWEST_OUTPUT
    while True:
        start = max(1, end - reach)
        messages = await connection.read(subject, stream=streams.LOGS, start_sequence=start)
        lines = [line for message in messages if message.sequence <= end for line in choice.select(message)]
        if start == 1 or (choice.tail is not None and len(lines) >= choice.tail):
            return lines if choice.tail is None else lines[max(0, len(lines) - choice.tail) :]
        reach *= 10


async def follow_lines(connection: Connection, run_id: str, choice: OutputChoice) -> AsyncGenerator[RankLine, None]:
    """Yield the lines of a run's output until it has ended and no more come."""
    subject = subjects.log(run_id, choice.subject_rank)
    last = await connection.read_last(streams.LOGS, subject)
    if last is not None:
        for line in await _read_lines(connection, run_id, choice, last.sequence):
            yield line
    idle, start = 0, 1 if last is None else last.sequence + 1
    async for batch in connection.follow(streams.LOGS, subject, start_sequence=start):
        for message in batch:
            for line in choice.select(message):
                yield line
        idle = 0 if batch else idle + 1
        if idle >= IDLE_BATCHES and await read_end(connection, run_id) is not None:
            return


async def wait_for_event(
    connection: Connection, start_sequence: int, subject: str, accepts: Callable[[Any], bool], timeout_s: float
) -> Any | None:
    """Return the first fact on a subject that is accepted, from a sequence number on; None if none comes in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            async for batch in connection.follow(streams.FACTS, subject, start_sequence=start_sequence):
                for message in batch:
                    if accepts(message.event):
                        return message.event
    return None


async def find_rejection(connection: Connection, subject: str, timeout_s: float) -> str:
    """Return in words that a request was rejected; '' if it was accepted, or no answer came in time.

    A gateway that is away counts as one that gives none: the request is on the bus.

    Args:
        subject: that of all facts of the run or study that was requested.
    """
    with contextlib.suppress(TrainbusError):
        answer = await wait_for_event(
            connection, 1, subject, lambda event: event.fact in ("accepted", "rejected"), timeout_s
        )
        if answer is not None and answer.fact == "rejected":
            from contracts.texts import describe  # it imports every type of event

            return describe(answer)
    return ""


def apply_progress(view: RunView, event: run.RunProgress, pace: TrainingPace) -> None:
    """Bring a view up to what its training has reported; ``pace`` measures its speed."""
    view.step = max(view.step, event.step)
    view.samples_consumed = max(view.samples_consumed, event.samples_consumed)
    view.total_steps, view.epoch = event.total_steps or view.total_steps, max(view.epoch, event.epoch)
    for point in event.points:
        view.metrics.update(point.values)
        pace.add(point.time, point.step)
    view.steps_per_s = pace.steps_per_s
    if view.spec is not None:
        spec = view.spec.model_dump(mode="json", exclude_defaults=True)
        view.warnings = tuple(describe_absent_metrics(spec, view.metrics, epoch=view.epoch))


async def read_metrics(connection: Connection, run_id: str) -> dict[str, list[MetricPoint]]:
    """Return metric name -> points in the order of their steps.

    A step that was trained again after a restart has the value of the newest placement. The bus keeps points for
    14 days; MLflow keeps them for good.
    """
    newest: dict[tuple[str, int], tuple[int, MetricPoint]] = {}
    for message in await connection.read(subjects.progress(run_id), stream=streams.PROGRESS):
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
