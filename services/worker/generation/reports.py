"""The report of a generation's end on this node: which fact it is, and how it is published exactly once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import structlog

from contracts.base import Fact
from contracts.events.run import Artifact, RunExited, RunPlaced, RunReleased
from contracts.tracebacks import shorten_tracebacks
from services.worker import metrics
from services.worker.core.failure_reason import FailureReason, explain_error, explain_exit
from services.worker.core.journal import RankState
from services.worker.core.rank_exits import Exit, find_cause, is_infrastructure_failure
from services.worker.data_dir import GenerationFiles
from services.worker.local_files import read_json, write_if_space
from services.worker.ranks.journal_follower import Publish
from services.worker.retry import retry_transient

log = structlog.get_logger(__name__)

Report = RunExited | RunReleased
REASON_MAX_CHARS = 2000
#: Lines of output that a report has.
TAIL_LINES = 30


class GenerationFailure(Exception):
    """The ranks could not be started, or what runs is unknown."""

    def __init__(self, reason: str, *, infrastructure: bool, permanent: bool = False) -> None:
        """``infrastructure``: the node is at fault, not the run. ``permanent``: another attempt would fail alike."""
        super().__init__(reason)
        self.reason, self.infrastructure, self.permanent = reason, infrastructure, permanent


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far the ranks of a generation got, and the step of the checkpoint that they resumed."""

    step: int
    samples_consumed: int
    resumed_step: int

    @classmethod
    def of(cls, placed: RunPlaced, ranks: Mapping[int, RankState]) -> RunPosition:
        """Return the position of the rank that got furthest."""
        # The checkpoint counts even if ranks took newer state from memory: that state is on no disk yet.
        resumed_step = placed.resume.step if placed.resume and not placed.resume.step_is_count else 0
        resumed_samples = placed.resume.samples_consumed if placed.resume else 0
        steps = [max(state.step or 0, state.kept_step) for state in ranks.values() if state.step is not None]
        samples = max((state.samples_consumed for state in ranks.values()), default=0)
        return cls(max(steps, default=resumed_step), samples or resumed_samples, resumed_step)

    @property
    def reported(self) -> dict[str, Any]:
        """The fields of a report."""
        return {"step": self.step, "samples_consumed": self.samples_consumed}


class ReportBuilder:
    """Builds the report of one node's part of one generation."""

    def __init__(self, placed: RunPlaced, node_id: str) -> None:
        self._placed = placed
        self._place: dict[str, Any] = {"run_id": placed.run_id, "generation": placed.generation, "node_id": node_id}

    def failed(self, failure: GenerationFailure) -> RunExited:
        """Report that no rank ran, or that what ran is unknown."""
        return RunExited(
            **self._place,
            outcome="failed",
            infrastructure_failure=failure.infrastructure,
            permanent=failure.permanent,
            reason=failure.reason[:REASON_MAX_CHARS],
        )

    def crashed(
        self, failure: Exit, ranks: Mapping[int, RankState], lines: Sequence[str], code_folder: PurePath | None = None
    ) -> RunExited:
        """Report that a rank failed by itself; ``lines`` are the last of its output."""
        ended = ranks[failure.rank].ended if failure.rank in ranks else None
        error = ended.error if ended is not None else ""
        failure, printed = find_cause(failure, lines)
        tail = tuple(shorten_tracebacks(printed, code_folder)[-TAIL_LINES:])
        has_started = any(state.started for state in ranks.values())
        reason = (
            explain_error(error)
            if error
            else explain_exit(failure.code, tail, self._placed.spec.command or (), code_folder)
        )
        # A signal comes from outside: the next attempt need not end the same way.
        could_not_start = failure.code > 0 and made_no_step(ranks)
        return RunExited(
            **self._place,
            outcome="failed",
            infrastructure_failure=is_infrastructure_failure(has_started, error + "\n".join(lines))
            or any(state.ended is not None and state.ended.drifted_ranks for state in ranks.values()),
            permanent=any(state.ended is not None and state.ended.permanent for state in ranks.values())
            or self._is_permanent(reason, could_not_start=could_not_start),
            made_no_step=could_not_start,
            reason=reason.text[:REASON_MAX_CHARS],
            rank=failure.rank,
            exit_code=failure.code,
            log_tail=tail,
            **RunPosition.of(self._placed, ranks).reported,
        )

    def _is_permanent(self, reason: FailureReason, *, could_not_start: bool) -> bool:
        slots = self._placed.spec.slots
        return reason.at_any_step or (
            reason.is_permanent and could_not_start and not (reason.depends_on_slots and slots.min < slots.max)
        )

    def succeeded(self, ranks: Mapping[int, RankState], artifacts: tuple[Artifact, ...], notice: str = "") -> RunExited:
        """Report that every rank has finished its work. ``notice``: what its author should know."""
        results = [state.result for _, state in sorted(ranks.items()) if state.result is not None]
        # A script need not name its result: the last values that its first rank has reported stand for it.
        values = ranks[min(ranks)].values if ranks and self._placed.spec.command is not None else {}
        position = RunPosition.of(self._placed, ranks).reported
        if 0 not in ranks and all(state.step is None for state in ranks.values()):
            position["step"] = 0  # here nothing tells how far a script is: rank 0's node does
        return RunExited(
            **self._place,
            outcome="succeeded",
            metrics=results[0].metrics if results else dict(values),
            artifacts=artifacts,
            notice=notice,
            **position,
        )

    def released(self, position: RunPosition, *, clean: bool, detail: str) -> RunReleased:
        """Report that the ranks ended on request."""
        return RunReleased(**self._place, clean=clean, detail=detail, **position.reported)


def made_no_step(ranks: Mapping[int, RankState]) -> bool:
    """Whether no rank has reported a step, or anything to keep, beyond the point where it started."""
    return not any(state.checkpoints or _has_stepped(state) for state in ranks.values())


def _has_stepped(state: RankState) -> bool:
    return state.step is not None and (state.started is None or state.step > state.started.step)


class ReportPublisher:
    """Writes a generation's report to disk, publishes it and marks it as published.

    A report that is published again after a crash is the same fact, with the same id.
    """

    def __init__(
        self, files: GenerationFiles, publish: Publish, is_published: Callable[[Fact], Awaitable[bool]]
    ) -> None:
        """``is_published``: whether the stream has this very fact already."""
        self._files, self._publish, self._is_published = files, publish, is_published
        self._written: Report | None = None

    def read(self) -> Report | None:
        """Return the report that was written, by an earlier life of the agent perhaps."""
        if self._written is not None:
            return self._written
        stored = read_json(self._files.report)
        if stored is None:
            return None
        model = RunExited if stored["kind"] == "exited" else RunReleased
        return model.model_validate(stored["fact"])

    async def is_done(self, report: Report) -> bool:
        """Whether an earlier life published the report; it is then marked as published."""
        if not self._files.report.exists() or not await self._is_published(report):
            return False
        self.mark_done(_outcome(report))
        return True

    def write(self, report: Report) -> None:
        """Make the report durable."""
        self._written = report
        stored = {"kind": report.fact, "fact": report.model_dump(mode="json")}
        write_if_space(self._files.report, json.dumps(stored))

    async def publish(self, report: Report) -> None:
        """Publish the report, however long the bus is away."""
        await retry_transient(partial(self._publish, report), "the bus does not accept the report")
        self.mark_done(_outcome(report))
        reason = report.reason if isinstance(report, RunExited) else report.detail
        log.info("generation reported", outcome=_outcome(report), reason=reason)

    def mark_done(self, outcome: str) -> None:
        """Note that nothing remains to be done for the generation."""
        write_if_space(self._files.done, json.dumps({"outcome": outcome}))
        metrics.PLACEMENTS.labels(outcome).inc()


def is_complete(report: Report) -> bool:
    """Whether the next generation finds all state of this one in a committed checkpoint, or there is no next one."""
    return report.clean if isinstance(report, RunReleased) else report.outcome == "succeeded"


def _outcome(report: Report) -> str:
    return report.outcome if isinstance(report, RunExited) else "released"
