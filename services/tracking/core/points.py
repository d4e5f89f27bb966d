"""Which metric points go to MLflow: those that no later generation can take back.

A generation that resumes at step 30 takes back what earlier ones reported beyond 30; its ranks report where it resumed
when they have started, since state in memory may be newer than the checkpoint they were given. So a point may be logged
once a checkpoint at or beyond its step is committed, or once the run has ended. The cursor records what was
logged; it is stored after the points, so after a crash some are logged again, which MLflow does not mind
(identical points are one row).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from contracts.events.run import RunProgress
from services.tracking.core.describe import clean_key
from services.tracking.core.fold import Run

#: A ceiling above every step: nothing of the generation can be taken back any more.
NO_CEILING = 2**63 - 1
#: A ceiling below every step: nothing of the generation may be logged.
NOTHING = -1
#: What MLflow's columns hold: 64-bit steps, milliseconds of time.
MAX_STEP = 2**63 - 2
MAX_TIME_S = 253_402_300_000.0


@dataclass(frozen=True, slots=True)
class Point:
    """One row of MLflow's metrics."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """What of PROGRESS is in MLflow.

    Of everything up to sequence ``read``, what survives ``generation`` having committed ``step`` is logged.
    ``start`` is where the next reading must begin: the first batch that holds something still withheld.
    """

    generation: int = 0
    step: int = NOTHING
    read: int = 0
    start: int = 1

    def to_tag(self) -> str:
        return json.dumps({"generation": self.generation, "step": self.step, "read": self.read, "start": self.start})

    @classmethod
    def from_tag(cls, tag: str | None) -> Cursor:
        """The stored cursor; one that cannot be read counts as none, which costs only time."""
        try:
            found = json.loads(tag or "{}")
            return cls(**{name: int(found[name]) for name in ("generation", "step", "read", "start")})
        except (ValueError, TypeError, KeyError):
            return cls()


def horizon(run: Run, generation: int) -> int:
    """The step up to which the points of ``generation`` are final, were it the last one."""
    if run.live or run.ended is not None or generation < run.start_generation(run.generation):
        return NO_CEILING
    committed = run.committed.get(generation)
    return committed.step if committed else NOTHING


def ceilings(run: Run, generation: int, step: int) -> dict[int, int]:
    """The highest surviving step of each generation, given that ``generation`` is final up to ``step``."""
    durable = step
    if step == NOTHING:
        # What it took up from memory can still be lost; the checkpoint that it was given cannot.
        given = run.placed_step(generation)
        durable = NOTHING if given is None else given
    found: dict[int, int] = {}
    bound = NO_CEILING
    for number in sorted((n for n in run.placements if n <= generation), reverse=True):
        found[number] = step if number == generation else min(bound, durable)
        resume = run.resume_step(number)
        bound = min(bound, NOTHING if resume is None else resume)
    return found


@dataclass(slots=True)
class Selector:
    """Goes through the batches of one reading, in the order of the stream."""

    run: Run
    generation: int
    cursor: Cursor
    #: The highest step that MLflow has of each key; kept up as points are chosen.
    heads: dict[str, int]
    read: int = 0
    held: int | None = None
    dropped: int = 0
    #: What the script has set besides points.
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def select(self, batches: Iterable[tuple[int, RunProgress]]) -> list[Point]:
        """The points of ``batches`` (sequence, batch) to log now."""
        final = ceilings(self.run, self.generation, horizon(self.run, self.generation))
        logged = ceilings(self.run, self.cursor.generation, self.cursor.step)
        some_day = ceilings(self.run, self.generation, NO_CEILING)
        chosen: dict[Point, None] = {}
        for sequence, batch in batches:
            self.read = max(self.read, sequence)
            known = sequence <= self.cursor.read
            if batch.kind == "system":
                if not known:
                    chosen.update(dict.fromkeys(self._system(batch)))
                continue
            ceiling = final.get(batch.generation, NOTHING)
            floor = logged.get(batch.generation, NOTHING) if known else NOTHING
            # A batch may come before the fact that its generation was placed: then it is read once more.
            highest = NO_CEILING if batch.generation > self.generation else some_day.get(batch.generation, NOTHING)
            described = bool(batch.params or batch.tags)
            if floor == NOTHING < ceiling:
                for name, value in batch.params.items():
                    self.params.setdefault(name, value)
                self.tags |= batch.tags
            held = described and ceiling == NOTHING < highest
            if held or any(ceiling < point.step <= highest for point in batch.points):
                self.held = sequence if self.held is None else min(self.held, sequence)
            for point in self._select_training_points(batch, floor, ceiling):
                chosen[point] = None
        return list(chosen)

    def next_cursor(self) -> Cursor:
        """The cursor once everything selected is in MLflow."""
        read = max(self.read, self.cursor.read)
        step = horizon(self.run, self.generation)
        return Cursor(self.generation, step, read, read + 1 if self.held is None else self.held)

    def _select_training_points(self, batch: RunProgress, floor: int, ceiling: int) -> Iterable[Point]:
        resume = self.run.resume_step(batch.generation)
        for point in batch.points:
            if not floor < point.step <= ceiling:
                continue
            if not _is_storable(point.step, point.time):
                self.dropped += len(point.values)
                continue
            for name, value in point.values.items():
                key = clean_key(name)
                # A resumed generation may repeat what belongs to the checkpoint it started from (a validation,
                # say): it counts only if the earlier one did not get that far.
                # What a command's attempt reported is logged already, also beyond the state that it kept: its next
                # attempt begins behind that.
                repeats = resume is not None and (self.run.live or point.step <= resume)
                if repeats and self.heads.get(key, NOTHING) >= point.step:
                    continue
                self.heads[key] = max(self.heads.get(key, NOTHING), point.step)
                yield Point(key, value, round(point.time * 1000), point.step)

    def _system(self, batch: RunProgress) -> Iterable[Point]:
        began_s = started_at_s(self.run)
        for point in batch.points:
            if not _is_storable(point.step, point.time):
                self.dropped += len(point.values)
                continue
            step = max(round(point.time - began_s), 0)
            for name, value in point.values.items():
                key = clean_key(f"system/{batch.node_id}/{name.removeprefix('system/')}")
                yield Point(key, value, round(point.time * 1000), step)


def started_at_s(run: Run) -> float:
    """Seconds since the epoch at which the run was first placed (or accepted)."""
    return run.placements[min(run.placements)].at_s if run.placements else run.accepted_at_s


def result_points(metrics: Mapping[str, float], prefix: str, step: int, timestamp_ms: int) -> list[Point]:
    """A run's result as points; keys that have ``prefix`` already keep it. No step is beyond what MLflow can store."""
    step = min(max(step, 0), MAX_STEP)
    keyed = {clean_key(name if name.startswith(prefix) else prefix + name): value for name, value in metrics.items()}
    return [Point(key, value, timestamp_ms, step) for key, value in keyed.items()]


def _is_storable(step: int, time_s: float) -> bool:
    """Whether MLflow can store it; a database error over nonsense would hold up everybody's metrics."""
    return 0 <= step <= MAX_STEP and 0 <= time_s <= MAX_TIME_S
