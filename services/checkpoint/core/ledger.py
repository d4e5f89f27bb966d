"""Who needs which object of the store, by the facts: a fold over the log that is saved between collections.

It holds what lives, not what ever happened. ``forget`` drops what can change no decision of garbage collection:

- What retention removed, once that is older than ``grace``: see rule 4 of ``core/garbage.py``. That it was removed is
  remembered until its manifest is gone from the store: retention deletes the object after the fact, and so nothing
  writes it again.
- What was staged and neither committed nor refused, once its run is over or was placed again, and ``grace`` has passed.
  A commit that comes even later verifies every blob first, as every commit does.
- What is held for ever, once there is neither such a manifest nor a commit that it could be rebuilt from.
- The generation of a run of which there is nothing left: it tells which manifests are superseded.
- That a run is over, after ``ENDED_RUNS_REMEMBERED``. What an agent stages even later stays, as if its run went on.

Inline names of blobs are not held, but where in the log they are: they are read there again for as long as they matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from contracts.base import Event
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointRefused,
    CheckpointStaged,
    FileListing,
)
from contracts.events.run import RunCompleted, RunEvaluated, RunExited, RunFact, RunPlaced
from contracts.manifest import run_of_manifest
from services.checkpoint.core.commit import BLOBS
from services.checkpoint.core.retention import HOLDING, Holds

#: The facts that are folded.
LEDGER_FACTS = (
    *HOLDING,
    RunEvaluated,
    CheckpointStaged,
    CheckpointCommitted,
    CheckpointRefused,
    CheckpointDeleted,
)
ENDED_RUNS_REMEMBERED = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class StagedParts:
    """What the parts of one step name in the store."""

    run_id: str
    generation: int
    #: When the newest part was staged, or retention removed the checkpoint.
    time: datetime
    #: Places in the log of the parts that name blobs themselves.
    sequences: tuple[int, ...] = ()
    listings: tuple[FileListing, ...] = ()

    def add(self, part: CheckpointStaged, time: datetime, sequence: int) -> StagedParts:
        sequences = (*self.sequences, sequence) if part.files else self.sequences
        is_new = part.listing is not None and part.listing not in self.listings
        listings = (*self.listings, part.listing) if is_new and part.listing is not None else self.listings
        return replace(self, time=time, sequences=sequences, listings=listings)


@dataclass(slots=True)
class Ledger:
    """Who needs which object. A fold over ``LEDGER_FACTS`` in stream order."""

    #: The last place in the log that was folded.
    sequence: int = 0
    generations: dict[str, int] = field(default_factory=dict)
    #: Blobs that are artifacts.
    artifacts: set[str] = field(default_factory=set)
    #: Run -> when it ended. What it staged and nobody committed is not committed any more.
    ended: dict[str, datetime] = field(default_factory=dict)
    #: ``step_key`` -> its parts, while they are neither committed nor refused.
    staged: dict[str, StagedParts] = field(default_factory=dict)
    #: Manifest -> its parts, while it is committed.
    committed: dict[str, StagedParts] = field(default_factory=dict)
    #: Manifest -> its parts, since retention removed it.
    removed: dict[str, StagedParts] = field(default_factory=dict)
    #: Manifest -> when retention removed it.
    deleted: dict[str, datetime] = field(default_factory=dict)
    #: A run that was accepted while retention decided may have begun with what it then deleted.
    holds: Holds = field(default_factory=Holds)

    def apply(self, event: Event, time: datetime, sequence: int) -> None:
        """Fold the next fact."""
        self.sequence = max(self.sequence, sequence)
        was_alive = isinstance(event, RunFact) and event.run_id in self.holds.runs
        self.holds.apply(event)
        if isinstance(event, RunFact) and was_alive and event.run_id not in self.holds.runs:
            self.ended[event.run_id] = time
        match event:
            case RunPlaced(run_id=run_id, generation=generation):
                self.generations[run_id] = max(generation, self.generations.get(run_id, 0))
            case CheckpointStaged(run_id=run_id, generation=generation, step=step):
                key = step_key(run_id, generation, step)
                parts = self.staged.get(key, StagedParts(run_id, generation, time))
                self.staged[key] = parts.add(event, time, sequence)
            case CheckpointCommitted(run_id=run_id, generation=generation, checkpoint=checkpoint):
                # From here on its manifest names the blobs. A fact may come twice: the first one has the parts.
                known = self.committed.get(checkpoint.uri, StagedParts(run_id, generation, time))
                key = step_key(run_id, generation, checkpoint.step)
                self.committed[checkpoint.uri] = self.staged.pop(key, known)
            case CheckpointRefused(run_id=run_id, generation=generation, step=step):
                self.staged.pop(step_key(run_id, generation, step), None)
            case CheckpointDeleted(run_id=run_id, uri=uri):
                self.deleted[uri] = time
                parts = self.committed.pop(uri, StagedParts(run_id, 0, time))
                self.removed[uri] = replace(parts, time=time)
            case RunExited() | RunCompleted():
                self.artifacts |= {artifact.uri for artifact in event.artifacts if f"/{BLOBS}" in artifact.uri}
            case RunEvaluated():
                self.artifacts |= {artifact.uri for artifact in event.report if f"/{BLOBS}" in artifact.uri}

    def pending(self, cutoff: datetime) -> Iterator[StagedParts]:
        """Iterate over parts that may still be committed, or were staged or removed after ``cutoff``."""
        yield from (parts for parts in self.staged.values() if self._is_pending(parts, cutoff))
        yield from (parts for parts in self.removed.values() if parts.time > cutoff)

    @property
    def committed_listings(self) -> Iterator[FileListing]:
        """Listings of what is committed: the manifest is rebuilt from them if the store loses it."""
        return (listing for parts in self.committed.values() for listing in parts.listings)

    def is_superseded(self, run_id: str, generation: int) -> bool:
        """Return whether a run was placed again after this generation."""
        return generation < self.generations.get(run_id, 0)

    def forget(self, cutoff: datetime, stored: Collection[str]) -> None:
        """Drop what can change no decision any more, see above.

        Args:
            cutoff: now less ``grace``. Every later collection has a later one.
            stored: the manifests in the store, listed after the facts were read.
        """
        self.staged = {key: parts for key, parts in self.staged.items() if self._is_pending(parts, cutoff)}
        self.removed = {uri: parts for uri, parts in self.removed.items() if parts.time > cutoff}
        self.deleted = {uri: time for uri, time in self.deleted.items() if time > cutoff or uri in stored}
        self.holds.named = {uri for uri in self.holds.named if uri in stored or uri in self.committed}
        self.ended = {run: time for run, time in self.ended.items() if time > cutoff - ENDED_RUNS_REMEMBERED}
        of_parts = {parts.run_id for each in (self.staged, self.committed) for parts in each.values()}
        known = of_parts | {run_of_manifest(uri) for uri in stored} | self.ended.keys() | self.holds.runs.keys()
        self.generations = {run: generation for run, generation in self.generations.items() if run in known}

    def _is_pending(self, parts: StagedParts, cutoff: datetime) -> bool:
        is_over = parts.run_id in self.ended or self.is_superseded(parts.run_id, parts.generation)
        return parts.time > cutoff or not is_over


def step_key(run_id: str, generation: int, step: int) -> str:
    """Return the key of a step's parts."""
    return f"{run_id}/{generation}/{step}"
