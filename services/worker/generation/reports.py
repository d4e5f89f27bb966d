"""What a node says of the end of its part of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.events.run import Artifact, RunExited, RunPlaced, RunReleased
from services.worker.core.journal import RankState
from services.worker.core.rank_exits import Exit, cause, exit_text, is_infrastructure_failure

Report = RunExited | RunReleased


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why the ranks could not be started."""

    reason: str
    infrastructure_failure: bool
    #: Another attempt would end alike.
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far the ranks of a generation got, and where they had begun."""

    step: int
    samples_consumed: int
    begun_at: int

    @classmethod
    def of(cls, placed: RunPlaced, ranks: Mapping[int, RankState]) -> RankProgress:
        # The checkpoint counts, also where ranks began beyond it: what they took up from memory is on no disk yet.
        begun_at = placed.resume.step if placed.resume else 0
        began_with = placed.resume.samples_consumed if placed.resume else 0
        steps = [state.step for state in ranks.values() if state.step is not None]
        samples = max((state.samples_consumed for state in ranks.values()), default=0)
        return cls(max(steps, default=begun_at), samples or began_with, begun_at)


@dataclass(frozen=True, slots=True)
class ReportBuilder:
    """Makes the report of one node's part of one generation."""

    placed: RunPlaced
    node_id: str

    def failed(self, failure: StartFailure) -> RunExited:
        """Nothing ever ran, or what ran cannot be known."""
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.node_id,
            outcome="failed",
            infrastructure_failure=failure.infrastructure_failure,
            permanent=failure.permanent,
            reason=failure.reason[:2000],
        )

    def crashed(self, failure: Exit, ranks: Mapping[int, RankState], lines: Sequence[str]) -> RunExited:
        """A rank failed by itself; ``lines`` are the last of its output."""
        ended = ranks.get(failure.rank)
        error = ended.ended.error if ended is not None and ended.ended is not None else ""
        failure, tail = cause(failure, lines)
        started = any(state.started for state in ranks.values())
        reached = RankProgress.of(self.placed, ranks)
        reason = f"rank {failure.rank} {exit_text(failure.code)}" + (f": {error}" if error else "")
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.node_id,
            outcome="failed",
            infrastructure_failure=is_infrastructure_failure(failure.code, started, error + "\n".join(lines)),
            permanent=any(state.ended is not None and state.ended.permanent for state in ranks.values()),
            reason=reason[:2000],
            rank=failure.rank,
            exit_code=failure.code,
            log_tail=tail,
            step=reached.step,
            samples_consumed=reached.samples_consumed,
        )

    def succeeded(self, ranks: Mapping[int, RankState], artifacts: tuple[Artifact, ...]) -> RunExited:
        """Every rank is done with its work."""
        results = [state.result for _, state in sorted(ranks.items()) if state.result is not None]
        reached = RankProgress.of(self.placed, ranks)
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.node_id,
            outcome="succeeded",
            step=reached.step,
            samples_consumed=reached.samples_consumed,
            metrics=results[0].metrics if results else {},
            artifacts=artifacts,
        )

    def released(self, reached: RankProgress, *, clean: bool, detail: str) -> RunReleased:
        """The ranks ended because they were asked to."""
        return RunReleased(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.node_id,
            clean=clean,
            step=reached.step,
            samples_consumed=reached.samples_consumed,
            detail=detail,
        )
