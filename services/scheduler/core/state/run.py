"""One run of the scheduler's state, folded from its facts by ``fold.py``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from contracts.events.run import (
    CheckpointRef,
    RunExited,
    RunPrepared,
    RunReserved,
    RunStaging,
    RunStalled,
    RunStopping,
)
from contracts.spec.run import RunSpec
from services.scheduler.core.state.durations import RunKind
from services.scheduler.core.state.slot_spec import SlotSpec
from services.scheduler.core.state.staged_checkpoints import StagedCheckpoints

Ending = Literal["released", "succeeded", "failed", "lost"]
#: A shell ends with this plus the number of the signal that ended its command.
SHELL_SIGNAL_BASE = 128
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Phase(StrEnum):
    """Where a run is in its life."""

    PREPARING = "preparing"
    READY = "ready"
    QUEUED = "queued"
    PLACED = "placed"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


TERMINAL = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED, Phase.REJECTED})


@dataclass(slots=True)
class MemberState:
    """One node's part of a run's current generation."""

    node_id: str
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    ended: Ending | None = None
    exit: RunExited | None = None
    #: It failed on its own: before the generation was asked to stop.
    unprovoked: bool = False
    #: Its ranks have started.
    started: bool = False
    #: The kind of accelerator that the ledger has it under; None: it has had nothing.
    accelerator: str | None = None


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint and the generation that made it."""

    generation: int
    ref: CheckpointRef


@dataclass(slots=True)
class Run:
    """One run, folded from its facts."""

    run_id: str
    spec: RunSpec
    #: Sequence of its acceptance: the submit order.
    submitted: int
    submitted_at: datetime
    #: What one slot of it needs; and where it may be placed (``place.resource_request``).
    slot_spec: SlotSpec = field(default_factory=SlotSpec)
    request: object = field(default=None, compare=False, repr=False)
    #: The fewest slots that it needs, and the most that it can use.
    least: int = 1
    most: int = 1
    #: Those of its kind take about as long.
    kind: RunKind = field(default_factory=RunKind)
    #: What it was expected to take yet when it was queued, where the policy orders by that.
    predicted_s: float = 0.0
    correlation_id: str = ""
    #: The span of its last fact, within the trace of its acceptance.
    traceparent: str = ""
    phase: Phase = Phase.READY
    dataset: RunPrepared | None = None
    #: All datasets that it reads.
    dataset_ids: frozenset[str] = frozenset()
    #: Where the files of its data are copied before it is queued, and since when; and the nodes that have not answered
    #: -> their incarnations then.
    staging: RunStaging | None = None
    staging_at: datetime = EPOCH
    awaited_nodes: dict[str, str] = field(default_factory=dict)
    prepare_problem: str | None = None
    cancel_reason: str | None = None
    generation: int = 0
    #: The generation that it was queued for last: no other one can be placed.
    queued_generation: int = 0
    failures: int = 0
    queued_at: datetime = EPOCH
    queue_reason: str = "new"
    #: When it was first queued: its data was there. Waiting counts from then; EPOCH: it was not queued yet.
    ready_at: datetime = EPOCH
    #: Sequence at which others last took its slots: where runs take turns it stands behind those that waited then.
    yielded_at: int = 0
    #: The parts of the current generation, also those that ended, until what follows is decided.
    parts: dict[str, MemberState] = field(default_factory=dict)
    placed_at: datetime = EPOCH
    placed_sequence: int = 0
    stopping: RunStopping | None = None
    stopping_at: datetime = EPOCH
    ended_at: datetime | None = None
    checkpoints: dict[str, CommittedCheckpoint] = field(default_factory=dict)
    newest: CommittedCheckpoint | None = None
    committed_at: datetime = EPOCH
    #: The final checkpoint of the current generation, and what its ranks have staged.
    final: CheckpointRef | None = None
    staged: StagedCheckpoints = field(default_factory=StagedCheckpoints)
    #: Where the first generation starts, when the request named a checkpoint.
    initial: CheckpointRef | None = None
    #: Generations in a row that broke without a new checkpoint, and when the last one did.
    setbacks: int = 0
    #: All generations that ended without a request to stop, and the seconds in which it had slots.
    failures_seen: int = 0
    run_s: float = 0.0
    #: Slot-seconds that it has had in parts that are over.
    served_slot_s: float = 0.0
    #: The first run of those that were submitted in one go.
    array_id: str = ""
    #: Its promised start, for the next generation.
    reserved: RunReserved | None = None
    #: Those of them that were no fault of the run.
    infrastructure_failures: int = 0
    #: Where and why the generation before failed, as ``failure_point`` has it.
    last_failure_point: str = ""
    #: How often in a row each node was at fault, by its incarnation: a restart may mend a full disk or a broken driver,
    #: and a node that still fails the run is avoided again after as many failures.
    strikes: Counter[str] = field(default_factory=Counter)
    #: Nodes that the run is to leave out, since it stalled there (``on_stall: exclude``), until it commits a checkpoint
    #: there. By their ids: a restart of the agent does not show that the cause is gone.
    excluded_nodes: set[str] = field(default_factory=set)
    #: Whom its ranks wait for, where, before they can begin; '' once they have.
    held_up: str = ""
    #: Why the current generation must restart: one of its ranks makes no step.
    stalled: RunStalled | None = None
    #: Digest of the machines on which its state came about; '' before it has any.
    machine: str = ""
    #: The same of the checkpoint that it was asked to start from.
    inherited_machine: str = ""
    #: Its ranks have reported that the state is no longer exact to the bit.
    inexact: bool = False
    #: The code of the last ``waiting``, and for which generation.
    waiting_code: str = ""
    waiting_generation: int = 0
    outcome: str = ""
    last_sequence: int = 0
    last_event_id: str = ""

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL

    @property
    def live(self) -> list[MemberState]:
        return [part for part in self.parts.values() if part.ended is None]

    @property
    def culprit(self) -> MemberState | None:
        """The part that failed first, rather than because another part had failed."""
        failed = [part for part in self.parts.values() if part.ended == "failed"]
        return max(failed, key=lambda part: (part.unprovoked, 0 in part.ranks), default=None)

    @property
    def failure_point(self) -> str:
        """The step at which the current generation failed, and why: another attempt changes nothing if it is the same.

        '' if that is not known, and for a process that a signal ended, which came from outside.
        """
        exited = self.culprit.exit if self.culprit else None
        if exited is None or not (exited.step or exited.made_no_step):
            return ""
        code = exited.exit_code or 0
        is_signal = code < 0 or code > SHELL_SIGNAL_BASE
        return "" if is_signal else f"{exited.step}: {exited.reason}"

    @property
    def reads_files(self) -> bool:
        """Whether it is a script with data, which it reads as plain files; a Task reads shards."""
        return bool(self.dataset_ids) and self.spec.command is not None

    @property
    def next_generation(self) -> int:
        return self.generation + 1

    @property
    def awaited_steps(self) -> list[int]:
        """The checkpoints that are to be committed before it is complete, though all its ranks have ended well."""
        succeeded = bool(self.parts) and all(part.ended == "succeeded" for part in self.parts.values())
        return sorted(self.staged.open) if succeeded and not self.terminal else []

    @property
    def slot_count(self) -> int:
        """Slots that this run holds now."""
        held = 0
        for part in self.parts.values():  # asked for all the time: a loop is twice as fast as a sum
            if part.ended is None:
                held += len(part.slots)
        return held

    def ran_s(self, now: datetime) -> float:
        """Seconds in which it has had slots, all in all."""
        return self.run_s + (max((now - self.placed_at).total_seconds(), 0.0) if self.live else 0.0)

    def attained_slot_s(self, now: datetime) -> float:
        """Slot-seconds that it has had, all in all."""
        held = self.slot_count
        return self.served_slot_s + (held * max((now - self.placed_at).total_seconds(), 0.0) if held else 0.0)

    def waited_s(self, now: datetime) -> float:
        """Return the seconds since it was ready in which it had no slots."""
        if self.ready_at == EPOCH:
            return 0.0
        return max((now - self.ready_at).total_seconds() - self.ran_s(now), 0.0)

    @property
    def exact(self) -> bool:
        """Whether it matters on which kind of machine it runs."""
        training = self.spec.training
        exact_mode = (
            training is not None and training.logical_ranks is not None and training.heterogeneous_nodes == "avoid"
        )
        # A run that starts from scratch is exact again.
        lost = self.inexact and self.resume is not None
        return exact_mode and self.spec.kind == "train" and not lost

    @property
    def bound(self) -> bool:
        """Whether it is tied to the kind of machine on which the state came about that it goes on from."""
        return self.exact and bool(self.machine) and self.newest is not None

    @property
    def is_resumable(self) -> bool:
        """Whether it continues from a checkpoint when it gets slots again, rather than start again.

        A run without a grace period makes no checkpoint when it is preempted: it needs one that is committed.
        """
        makes_checkpoints = self.spec.task is not None and self.spec.kind == "train"
        return makes_checkpoints and (self.spec.grace_s > 0 or self.newest is not None)

    @property
    def resume(self) -> CheckpointRef | None:
        """Where its next generation goes on: the last committed checkpoint."""
        if self.newest is not None:
            return self.newest.ref
        return self.initial if self.spec.init_from is None else None

    @property
    def init(self) -> CheckpointRef | None:
        """What its next generation begins with: a Task needs it as long as there is nothing to go on from."""
        if self.spec.init_from is None or (self.newest is not None and self.spec.command is None):
            return None
        return self.initial
