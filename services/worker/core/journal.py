"""The events that the bytes of a rank's journal, ring and log amount to.

What is published is cut from the files at offsets that are on disk *before* it is published. After a crash the same
cuts are published again under the same ids, so that nothing is lost and nothing is doubled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contracts.events.run import ProgressPoint, RunHeldUp, RunLog, RunProgress, RunStarved, RunStraggler
from contracts.ranks import (
    JOURNAL_LINE,
    ArtifactLine,
    CheckpointLine,
    EndedLine,
    JournalLine,
    KeepLine,
    MetricsLine,
    ParamsLine,
    RendezvousLine,
    ResultLine,
    StartedLine,
    StarvationLine,
    StragglerLine,
    TagsLine,
)

#: The lines whose values are events of progress.
REPORTED_LINES = (MetricsLine, ParamsLine, TagsLine)
POINTS_PER_BATCH = 200
LINES_PER_BATCH = 200
LINE_MAX_CHARS = 4000
#: Offsets of points found in a command's output begin here, apart from those of the journal.
PATTERN_OFFSET = 2**40
#: Offsets of the records of a rank's ring begin here.
RING_OFFSET = 2**41


class RankState(BaseModel):
    """How far one rank's files are read, and what they contain. It is saved before what was read is published."""

    model_config = ConfigDict(extra="ignore")

    #: [start, end) of each file is being published; everything before it is.
    journal_start: int = 0
    journal_end: int = 0
    #: The same of the ring, in records.
    ring_start: int = 0
    ring_end: int = 0
    log_start: int = 0
    log_end: int = 0
    #: When journal and output between start and end were read: the time of lines and values that have none.
    journal_time: float = 0.0
    log_time: float = 0.0
    #: How often each metric pattern has matched before log_start and before log_end.
    matches_start: dict[str, int] = Field(default_factory=dict)
    matches_end: dict[str, int] = Field(default_factory=dict)
    started: StartedLine | None = None
    ended: EndedLine | None = None
    result: ResultLine | None = None
    step: int | None = None
    #: The last step whose state the script asked to keep: it may report fewer steps than it keeps.
    kept_step: int = 0
    epoch: int = 0
    samples_consumed: int = 0
    total_steps: int | None = None
    #: The last reported values.
    values: dict[str, float] = Field(default_factory=dict)
    #: Checkpoints that are complete on disk and not yet staged.
    checkpoints: list[CheckpointLine] = Field(default_factory=list)
    #: What the script asked to keep, with step, epoch and metrics of that moment; and its artifacts.
    keeps: list[KeepLine] = Field(default_factory=list)
    artifacts: list[str] = Field(default_factory=list)


class JournalSource(NamedTuple):
    """Run, generation and node of a journal: fields of every fact about it."""

    run_id: str
    generation: int
    node_id: str


def whole_lines(content: bytes, *, at_end: bool = False) -> bytes:
    """Return ``content`` up to its last newline; all of it when the file is complete."""
    return content if at_end else content[: content.rfind(b"\n") + 1]


def parse_lines(content: bytes, offset: int, read_at: float = 0.0) -> tuple[list[tuple[int, JournalLine]], list[str]]:
    """Return every valid line with its offset, and the problems of the others.

    ``read_at``: the time of lines that have none.
    """
    lines: list[tuple[int, JournalLine]] = []
    problems: list[str] = []
    for raw in content.splitlines(keepends=True):
        if text := raw.strip():
            try:
                line = JOURNAL_LINE.validate_json(text)
                lines.append((offset, line if line.time else line.model_copy(update={"time": read_at})))
            except ValidationError as error:
                problem = error.errors()[0]
                problems.append(f"at byte {offset}: {'.'.join(map(str, problem['loc']))} {problem['msg']}")
        offset += len(raw)
    return lines, problems


def apply_lines(state: RankState, lines: Iterable[JournalLine]) -> None:
    """Fold lines of the journal into the rank's state."""
    for line in lines:
        match line:
            case MetricsLine():
                state.step, state.samples_consumed = line.step, line.samples_consumed or state.samples_consumed
                state.epoch = line.epoch or state.epoch
                state.total_steps = line.total_steps or state.total_steps
                state.values |= line.values
            case KeepLine():
                state.kept_step = max(line.step or 0, state.kept_step)
                state.keeps.append(
                    line.model_copy(
                        update={
                            "step": state.step if line.step is None else line.step,
                            "epoch": state.epoch if line.epoch is None else line.epoch,
                            "metrics": dict(state.values) if line.metrics is None else line.metrics,
                        }
                    )
                )
            case ArtifactLine():
                if line.path not in state.artifacts:
                    state.artifacts.append(line.path)
            case StartedLine():
                state.started = line
                state.samples_consumed = max(state.samples_consumed, line.samples_consumed)
                state.step = line.step if state.step is None else state.step
            case CheckpointLine():
                state.checkpoints = [each for each in state.checkpoints if each.step != line.step] + [line]
            case ResultLine():
                state.result = line
            case EndedLine():
                state.ended = line
                state.step = line.step or state.step
                state.samples_consumed = line.samples_consumed or state.samples_consumed


def have_diverged(ranks: Mapping[int, RankState]) -> bool:
    """Whether a rank has ended since its state was no longer finite, or not that of the others."""
    return any(state.ended is not None and state.ended.diverged for state in ranks.values())


def apply_last_record(state: RankState, last: MetricsLine) -> None:
    """Fold the last of some records of the ring into the rank's state, unless a line was newer."""
    if state.step is None or last.step >= state.step:
        apply_lines(state, (last,))


def apply_matches(state: RankState, matches: Iterable[tuple[int, str, float]]) -> None:
    """Fold values that were found in one part of the output into the rank's state.

    Metrics that are printed at different intervals count their own steps: the largest is the position.
    """
    for step, name, value in matches:
        state.step = max(step, state.step or 0)
        state.values[name] = value


def rank_event(
    source: JournalSource, homes: Mapping[int, str], line: StragglerLine | StarvationLine
) -> RunStraggler | RunStarved:
    """Return the event of a straggler or of a rank that waits for its data, with the node of that rank."""
    event = RunStraggler if isinstance(line, StragglerLine) else RunStarved
    place = source._replace(node_id=homes.get(line.rank, source.node_id))
    return event(**place._asdict(), **line.model_dump(exclude={"kind", "time"}))


def held_up_event(source: JournalSource, homes: Mapping[int, str], line: RendezvousLine) -> RunHeldUp:
    """Return the event of a rank, or of a node before its ranks, that waits for others, with the nodes of those."""
    nodes = dict.fromkeys(homes[rank] for rank in line.missing if rank in homes)
    return RunHeldUp(
        **source._asdict(),
        address=line.address,
        missing_ranks=line.missing,
        missing_nodes=tuple(nodes),
        waited_s=line.waited_s,
    )


def progress_events(
    source: JournalSource, rank: int, lines: Iterable[tuple[int, JournalLine]]
) -> Iterator[RunProgress]:
    """Yield metrics, parameters and tags as events. The same lines give the same events."""
    found = [(offset, line) for offset, line in lines if isinstance(line, REPORTED_LINES) and line.values]
    for first in range(0, len(found), POINTS_PER_BATCH):
        part = found[first : first + POINTS_PER_BATCH]
        metrics = [line for _, line in part if isinstance(line, MetricsLine)]
        last = metrics[-1] if metrics else MetricsLine(step=0, values={})
        params = [line.values for _, line in part if isinstance(line, ParamsLine)]
        tags = [line.values for _, line in part if isinstance(line, TagsLine)]
        yield RunProgress(
            **source._asdict(),
            rank=rank,
            offset=part[0][0],
            points=tuple(ProgressPoint(step=line.step, time=line.time, values=line.values) for line in metrics),
            step=last.step,
            total_steps=last.total_steps,
            epoch=last.epoch,
            samples_consumed=last.samples_consumed,
            params={name: value for values in params for name, value in values.items()},
            tags={name: value for values in tags for name, value in values.items()},
        )


def log_lines(content: bytes) -> list[str]:
    """Return output as lines to show: the last state of progress bars, long lines cut off."""
    text = content.decode("utf-8", errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    return [line if len(line) <= LINE_MAX_CHARS else line[:LINE_MAX_CHARS] + " […]" for line in lines]


def log_events(source: JournalSource, rank: int, content: bytes, offset: int) -> Iterator[RunLog]:
    """Yield output as events. The same bytes at the same offset give the same events."""
    raw = content.splitlines(keepends=True)
    for first in range(0, len(raw), LINES_PER_BATCH):
        part = b"".join(raw[first : first + LINES_PER_BATCH])
        yield RunLog(
            run_id=source.run_id,
            generation=source.generation,
            rank=rank,
            offset=offset,
            lines=tuple(log_lines(part)),
        )
        offset += len(part)


def pattern_event(
    source: JournalSource,
    rank: int,
    offset: int,
    time: float,
    matches: Iterable[tuple[int, str, float]],
    reached: int = 0,
) -> RunProgress | None:
    """Return the matches in one part of the output as an event; None without a match.

    Args:
        reached: the step at which the rank was before.
    """
    points: dict[int, dict[str, float]] = {}
    for step, name, value in matches:
        # In the order of the output: who reads the last point has the newest value, also where steps begin anew.
        points[step] = {**points.pop(step, {}), name: value}
    if not points:
        return None
    return RunProgress(
        **source._asdict(),
        rank=rank,
        offset=PATTERN_OFFSET + offset,
        points=tuple(ProgressPoint(step=step, time=time, values=values) for step, values in points.items()),
        step=max(reached, *points),
    )
