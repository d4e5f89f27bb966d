"""Which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from contracts.base import Event
from contracts.best_checkpoint import RankingMetric, find_judged, rank_checkpoints
from contracts.events.checkpoint import CheckpointCommitted, CheckpointPinned
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted, RunCancelled, RunCompleted, RunExited, RunFact, RunFailed, RunPlaced
from contracts.spec.run import RunSpec
from contracts.spec.training import Retention
from contracts.state.run import RunStates

#: Facts from which ``Holds`` derives the checkpoints in use.
HOLDING = (RunAccepted, RunPlaced, RunExited, RunCompleted, RunFailed, RunCancelled, ModelPromoted)
#: While a run goes on, this many of the newest are kept, even if ``retention.last`` is less: the scheduler may be
#: placing the run from the one before the newest at the moment the newest is committed.
NEWEST_KEPT = 2


@dataclass(frozen=True, slots=True)
class Deletion:
    """Remove this checkpoint; ``reason`` says why it is not kept."""

    uri: str
    step: int
    reason: str


def plan(
    committed: Sequence[CheckpointCommitted], deleted: Collection[str], retention: Retention, held: Collection[str]
) -> list[Deletion]:
    """Choose what goes, given a run's commits. Same input, same output.

    Kept are the last N, the best K by metric, every step that is a multiple of ``every_steps``, those in
    ``held`` (or pinned), and the final one. The last are those of the latest generation and step, in whichever order
    they were committed.
    """
    there = sort_by_age(commit for commit in committed if commit.checkpoint.uri not in deleted)
    over = any(commit.final for commit in there)
    last = retention.last if over else max(retention.last, NEWEST_KEPT)
    keep = {commit.checkpoint.uri for commit in there[-last:]} | set(held)
    keep |= {commit.checkpoint.uri for commit in there if commit.final}
    keep |= {commit.checkpoint.uri for commit in best(there, retention)}
    reason = f"not among the last {last}, nor the best {retention.best} by {retention.metric}"
    if (every := retention.every_steps) is not None:
        keep |= {commit.checkpoint.uri for commit in there if commit.checkpoint.step % every == 0}
        reason += f", nor a multiple of {every} steps"
    return [
        Deletion(commit.checkpoint.uri, commit.checkpoint.step, reason)
        for commit in there
        if commit.checkpoint.uri not in keep
    ]


def sort_by_age(commits: Iterable[CheckpointCommitted]) -> list[CheckpointCommitted]:
    """Return the commits with the newest last: after a backlog they are not in this order in the stream."""
    return sorted(commits, key=lambda commit: (commit.generation, commit.checkpoint.step))


def best(commits: Sequence[CheckpointCommitted], retention: Retention) -> list[CheckpointCommitted]:
    """The best K by metric; of equals the newer. What has no such number is not ranked."""
    return rank_checkpoints(commits, RankingMetric(retention.metric, retention.mode))[: retention.best]


def judged_uris(spec: RunSpec, committed: Sequence[CheckpointCommitted], deleted: Collection[str]) -> set[str]:
    """Return the checkpoint that evaluation would measure: it stays, however few ``retention`` keeps."""
    if spec.evaluation is None:
        return set()
    judged = find_judged(spec, sort_by_age(commit for commit in committed if commit.checkpoint.uri not in deleted))
    return set() if judged is None else {judged.checkpoint.uri}


def pinned_uris(facts: Iterable[CheckpointPinned]) -> set[str]:
    """Return what is pinned after these facts of one run, in stream order: the last fact on each counts."""
    last = {fact.uri: fact.pinned for fact in facts}
    return {uri for uri, wanted in last.items() if wanted}


@dataclass(slots=True)
class Holds:
    """Checkpoints that are in use outside their own run. A fold over facts.

    Champions, present and past, are held for ever: a rollback needs them. So is what a completed run began with or has
    measured: its result came from there, and whoever reads that can fetch it. A run that starts from another's
    checkpoint or its weights, or measures one, holds it while it goes on.
    """

    #: What is held for ever.
    named: set[str] = field(default_factory=set)
    by_run: dict[str, set[str]] = field(default_factory=dict)
    #: The runs that have not ended.
    runs: RunStates = field(default_factory=RunStates)

    def apply(self, event: Event) -> None:
        if not isinstance(event, HOLDING):
            return
        if isinstance(event, RunFact) and not self.runs.apply(event):
            return
        match event:
            case ModelPromoted():
                self.named.add(event.checkpoint_uri)
            case RunAccepted():
                measured = event.spec.evaluate.checkpoint_uri if event.spec.evaluate else None
                self._add_holds(event.run_id, {event.spec.resume_from, event.spec.init_from, measured})
            case RunPlaced(resume=resume) if resume is not None:
                # Its own checkpoints a run need not hold: the newest are kept anyway.
                if f"/{event.run_id}/checkpoints/" not in resume.uri:
                    self._add_holds(event.run_id, {resume.uri})
            case RunCompleted():
                self.named |= self.by_run.get(event.run_id, set())
                self._forget(event.run_id)
            case RunFailed() | RunCancelled():
                self._forget(event.run_id)

    def _forget(self, run_id: str) -> None:
        self.by_run.pop(run_id, None)
        self.runs.pop(run_id)

    def _add_holds(self, run_id: str, uris: set[str | None]) -> None:
        if found := {uri for uri in uris if uri}:
            self.by_run.setdefault(run_id, set()).update(found)

    def __contains__(self, uri: str) -> bool:
        """Whether the checkpoint with this manifest is held."""
        return uri in self.named or any(uri in uris for uris in self.by_run.values())
