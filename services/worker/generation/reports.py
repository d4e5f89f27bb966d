"""What a node says of the end of its part of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.events.run import Artifact, RunExited, RunPlaced, RunReleased
from services.worker.core import rank_environment as core
from services.worker.core.journal import RankState

Report = RunExited | RunReleased


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the ranks could not be started."""

    reason: str
    infrastructure_failure: bool
    #: Another attempt would end alike.
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Reached:
    """How far the ranks of a generation got, and where they had begun."""

    step: int
    samples_consumed: int
    begun_at: int

    @classmethod
    def of(cls, placed: RunPlaced, ranks: Mapping[int, RankState]) -> Reached:
        # The checkpoint counts, also where ranks began beyond it: what they took up from memory is on no disk yet.
        begun_at = placed.resume.step if placed.resume else 0
        began_with = placed.resume.samples_consumed if placed.resume else 0
        steps = [state.step for state in ranks.values() if state.step is not None]
        samples = max((state.samples_consumed for state in ranks.values()), default=0)
        return cls(max(steps, default=begun_at), samples or began_with, begun_at)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Makes the report of one node's part of one generation."""

    placed: RunPlaced
    node_id: str

    def failed(self, failure: Failure) -> RunExited:
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

    def crashed(self, failure: core.Exit, ranks: Mapping[int, RankState], lines: Sequence[str]) -> RunExited:
        """A rank failed by itself; ``lines`` are the last of its output."""
        ended = ranks.get(failure.rank)
        error = ended.ended.error if ended is not None and ended.ended is not None else ""
        failure, tail = core.cause(failure, lines)
        started = any(state.started for state in ranks.values())
        reached = Reached.of(self.placed, ranks)
        reason = f"rank {failure.rank} {core.exit_text(failure.code)}" + (f": {error}" if error else "")
        return RunExited(
            run_id=self.placed.run_id,
            generation=self.placed.generation,
            node_id=self.node_id,
            outcome="failed",
            infrastructure_failure=core.is_infrastructure_failure(failure.code, started, error + "\n".join(lines)),
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
        reached = Reached.of(self.placed, ranks)
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

    def released(self, reached: Reached, *, clean: bool, detail: str) -> RunReleased:
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
