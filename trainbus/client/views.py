"""What clients see of runs, nodes and models: the log's facts folded into views. Pure.

``contracts.state`` decides what a fact changes about a life; a view adds what people want to see. It works on any
part of the log and leaves out what that part does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contracts import exactness
from contracts.events import checkpoint, model, node, run
from contracts.manifest import run_of_manifest
from contracts.spec.run import RunSpec
from contracts.state.node import (
    GONE_STATES,
    NodeDrain,
    drain_in_force,
    incarnations_before,
    next_drain,
    next_node_state,
)
from contracts.state.run import TERMINAL_STATES, change_run
from contracts.texts import describe, format_problems

#: The start of the verdict of a run whose promotion waits for somebody.
AWAITING = "awaiting"


@dataclass(slots=True)
class TimelineEntry:
    """One line of a run's timeline."""

    sequence: int
    time: datetime
    fact: str
    text: str


@dataclass(slots=True)
class RunView:
    """One run as it stands."""

    run_id: str
    name: str = ""
    kind: str = "train"
    state: str = "requested"
    requested_at: datetime | None = None
    ended_at: datetime | None = None
    user: str | None = None
    team: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    slots_min: int = 1
    slots_max: int = 1
    slots_got: int = 0
    nodes: tuple[str, ...] = ()
    generation: int = 0
    next_generation: int = 0
    #: Nodes of its placement whose ranks have not ended well.
    unfinished: tuple[str, ...] = ()
    resizes: tuple[int, ...] = ()
    failures: int = 0
    step: int = 0
    samples_consumed: int = 0
    total_steps: int | None = None
    epoch: int = 0
    #: How fast it trains; None while it is not known.
    steps_per_s: float | None = None
    #: Why it waits, or why it ended.
    reason: str = ""
    log_tail: tuple[str, ...] = ()
    dataset_id: str | None = None
    checkpoints: dict[str, run.CheckpointRef] = field(default_factory=dict)
    #: Of each committed checkpoint, deleted ones too: the same for the same state on any number of ranks.
    state_digests: dict[str, str] = field(default_factory=dict)
    logical_ranks: int | None = None
    #: exact or samples-exact; '' before it has started. Why not exact, and since which generation.
    exactness: str = ""
    exactness_reason: str = ""
    inexact_since: int | None = None
    #: What every node reported when the ranks of a generation started: from which step, in which environment.
    starts: list[run.RunStarted] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    champion: dict[str, float] = field(default_factory=dict)
    metric: str | None = None
    verdict: str = ""
    verdict_reason: str = ""
    model: str | None = None
    experiment: str = "default"
    mlflow_run_id: str | None = None
    mlflow_experiment_id: str | None = None
    parent_run_id: str | None = None
    evaluates: str | None = None
    timeline: list[TimelineEntry] = field(default_factory=list)
    spec: RunSpec | None = None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def left_s(self) -> float | None:
        """Seconds of training that are left at its present speed; None while that is not known."""
        if self.state != "running" or self.total_steps is None or not self.steps_per_s:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s

    @property
    def restarts(self) -> int:
        """Placements after the first."""
        return max(0, self.generation - 1)

    @property
    def last_checkpoint(self) -> run.CheckpointRef | None:
        return max(self.checkpoints.values(), key=lambda each: each.step, default=None)


@dataclass(slots=True)
class NodeView:
    """One node as it stands."""

    node_id: str
    state: str = "up"
    slots: int = 0
    accelerator: str = "cpu"
    address: str = ""
    memory_bytes: int = 0
    incarnation: str = ""
    past_incarnations: list[str] = field(default_factory=list)
    joined_at: datetime | None = None
    #: Why it is drained, unfit, or under notice.
    reason: str = ""
    #: Who drained it, when and why; None: it is not drained. And the last decision about that.
    drain: NodeDrain | None = None
    last_drain: NodeDrain | None = None
    #: Nodes with the same digest compute the same last bits.
    machine_digest: str = ""
    #: Slot -> (run_id, rank).
    busy: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: Run that holds slots here -> its name.
    run_names: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ModelView:
    """One registered model and its champion."""

    model: str
    version: int
    run_id: str
    metrics: dict[str, float]
    reason: str
    promoted_at: datetime
    checkpoint_uri: str
    #: The version that answers requests; None: none does. And why it is not the champion.
    served_version: int | None = None
    serving_problem: str = ""


@dataclass(slots=True)
class StackView:
    """The views of one stack. ``apply`` folds facts, in the order of the log."""

    runs: dict[str, RunView] = field(default_factory=dict)
    nodes: dict[str, NodeView] = field(default_factory=dict)
    models: dict[str, ModelView] = field(default_factory=dict)

    def apply(self, sequence: int, time: datetime, event: Any) -> None:
        """Fold one fact. Facts that no view needs are ignored."""
        if isinstance(event, run.RunFact):
            view = self.runs.setdefault(event.run_id, RunView(event.run_id))
            if view.requested_at is None:
                view.requested_at = time
            before = view.state
            counts = self._change_life(view, event)
            if counts and (change := _RUN.get(type(event))) is not None:
                change(view, event)
            if view.ended and before not in TERMINAL_STATES:
                view.ended_at = time
            if not isinstance(event, checkpoint.CheckpointStaged):
                view.timeline.append(TimelineEntry(sequence, time, event.fact, describe(event)))
            if counts:
                self._occupy(event)
        elif isinstance(event, node.NodeFact):
            self._on_node(event, time)
        elif isinstance(event, model.ModelPromoted):
            known = self.models.get(event.model)
            self.models[event.model] = ModelView(
                event.model, event.version, event.run_id, event.metrics, event.reason, time, event.checkpoint_uri
            )
            self.models[event.model].served_version = known.served_version if known is not None else None
        elif isinstance(event, model.ModelDeployed) and event.model in self.models:
            self.models[event.model].served_version, self.models[event.model].serving_problem = event.version, ""
        elif isinstance(event, model.ModelDeployFailed) and event.model in self.models:
            self.models[event.model].served_version = event.serving_version
            self.models[event.model].serving_problem = f"version {event.version}: {event.reason}"

    @staticmethod
    def _change_life(view: RunView, event: run.RunFact) -> bool:
        """Bring the run's state, generation and reason up to date; False if the fact does not count."""
        changes = change_run(view, event)
        for name, value in (changes or {}).items():
            setattr(view, name, "" if value is None else value)
        if view.ended:
            view.slots_got, view.nodes = 0, ()
        return changes is not None

    def _occupy(self, event: run.RunFact) -> None:
        """Update the busy slots of the nodes."""
        if isinstance(event, run.RunPlaced):
            for member in event.members:
                there = self.nodes.setdefault(member.node_id, NodeView(member.node_id))
                there.busy.update(
                    {slot: (event.run_id, rank) for slot, rank in zip(member.slots, member.ranks, strict=False)}
                )
        elif isinstance(event, run.RunReleased | run.RunExited):
            self._free(event.run_id, event.node_id)
        elif isinstance(event, run.RunCompleted | run.RunFailed | run.RunCancelled | run.RunQueued):
            for node_id in self.nodes:
                self._free(event.run_id, node_id)

    def _free(self, run_id: str, node_id: str) -> None:
        if (there := self.nodes.get(node_id)) is not None:
            there.busy = {slot: held for slot, held in there.busy.items() if held[0] != run_id}

    def _on_node(self, event: node.NodeFact, time: datetime) -> None:
        known = self.nodes.get(event.node_id)
        # A node that was only seen in placements has no incarnation yet.
        before = known if known is not None and known.incarnation else None
        state, last_drain = next_node_state(before, event), next_drain(before, event)
        if state is None and known is None:
            return
        there = self.nodes.setdefault(event.node_id, NodeView(event.node_id))
        there.last_drain = last_drain
        if state is not None:
            self._enter(there, state, event, time)
        there.drain = drain_in_force(there)

    @staticmethod
    def _enter(there: NodeView, state: str, event: node.NodeFact, time: datetime) -> None:
        """Change the state of a node to what the fact makes of it."""
        there.state = state
        if isinstance(event, node.NodeJoined):
            running = {run_id for run_id, _ in event.running}
            there.busy = {slot: held for slot, held in there.busy.items() if held[0] in running}
            there.past_incarnations = incarnations_before(there) if there.incarnation else []
            there.incarnation, there.joined_at = event.incarnation, time
            there.slots, there.accelerator = event.slots, event.accelerator
            there.address, there.memory_bytes = event.address, event.memory_bytes
            there.machine_digest, there.reason = event.machine_digest, ""
        else:
            there.reason = describe(event) if state != "up" else ""
            if state in GONE_STATES:
                there.busy = {}


def fold_facts(events: Iterable[tuple[int, datetime, Any]]) -> StackView:
    view = StackView()
    for sequence, time, event in events:
        view.apply(sequence, time, event)
    return view


# -- how each fact changes a run ---------------------------------------------


def apply_spec(view: RunView, spec: RunSpec) -> None:
    """Set what a request or its acceptance has of the run."""
    view.name, view.kind, view.priority, view.model = spec.name, spec.kind, spec.priority, spec.model
    view.user, view.team, view.params = spec.user, spec.team, dict(spec.params)
    view.slots_min, view.slots_max, view.experiment = spec.slots.min, spec.slots.max, spec.experiment
    view.metric = spec.evaluation.metric if spec.evaluation else None
    view.evaluates = spec.evaluate.run_id if spec.evaluate else None
    view.logical_ranks = spec.training.logical_ranks if spec.training else None
    view.spec = spec


def _apply_accepted(view: RunView, event: run.RunAccepted) -> None:
    apply_spec(view, event.spec)
    resumed = run_of_manifest(event.spec.resume_from) if event.spec.kind == "train" else None
    view.parent_run_id = event.parent_run_id or resumed


def _apply_rejected(view: RunView, event: run.RunRejected) -> None:
    view.name = event.name or view.name
    view.reason = format_problems(event)


def _apply_queued(view: RunView, event: run.RunQueued) -> None:
    view.slots_got, view.nodes = 0, ()


def _apply_waiting(view: RunView, event: run.RunWaiting) -> None:
    if view.state not in ("stopping", "cancelling"):
        view.reason = event.message


def _apply_placed(view: RunView, event: run.RunPlaced) -> None:
    view.slots_got = event.world_size
    view.nodes = tuple(member.node_id for member in event.members)
    view.resizes = (*view.resizes, event.world_size)


def _apply_started(view: RunView, event: run.RunStarted) -> None:
    if all(known.event_id != event.event_id for known in view.starts):
        view.starts.append(event)
    if (reading := exactness.assess(view.spec, view.starts)) is not None:
        view.exactness, view.exactness_reason, view.inexact_since = reading.exactness, reading.why, reading.since
    view.step, view.samples_consumed = max(view.step, event.step), max(view.samples_consumed, event.samples_consumed)


def _apply_end(view: RunView, event: run.RunReleased | run.RunExited) -> None:
    view.step = max(view.step, event.step)
    view.samples_consumed = max(view.samples_consumed, event.samples_consumed)
    if isinstance(event, run.RunExited):
        view.metrics.update(event.metrics)


def _apply_committed(view: RunView, event: checkpoint.CheckpointCommitted) -> None:
    view.checkpoints[event.checkpoint.uri] = event.checkpoint
    if event.state_digest is not None:
        view.state_digests[event.checkpoint.uri] = event.state_digest
    if not event.checkpoint.step_is_count:
        view.step = max(view.step, event.checkpoint.step)
    view.epoch = max(view.epoch, event.checkpoint.epoch)
    view.samples_consumed = max(view.samples_consumed, event.checkpoint.samples_consumed)


def _apply_evaluated(view: RunView, event: run.RunEvaluated) -> None:
    view.evaluation, view.champion = dict(event.metrics), dict(event.champion_metrics)


def _apply_pending(view: RunView, event: run.RunPromotionPending) -> None:
    if not view.verdict or view.verdict.startswith(AWAITING):
        view.verdict, view.verdict_reason, view.model = f"{AWAITING} {event.awaits}", event.reason, event.model


def _apply_promoted(view: RunView, event: run.RunPromoted) -> None:
    view.verdict, view.verdict_reason, view.model = f"champion v{event.version}", event.reason, event.model


def _apply_not_promoted(view: RunView, event: run.RunNotPromoted) -> None:
    view.verdict, view.verdict_reason, view.model = "not promoted", event.reason, event.model


def _apply_tracked(view: RunView, event: run.RunTracked) -> None:
    view.mlflow_run_id, view.mlflow_experiment_id = event.mlflow_run_id, event.mlflow_experiment_id


def _copy(name: str) -> Callable[[RunView, Any], None]:
    """Return a change that takes one field from the fact."""
    return lambda view, event: setattr(view, name, getattr(event, name))


_RUN: dict[type[Any], Callable[[RunView, Any], object]] = {
    run.RunAccepted: _apply_accepted,
    run.RunRejected: _apply_rejected,
    run.RunPrepared: _copy("dataset_id"),
    run.RunQueued: _apply_queued,
    run.RunFailed: _copy("log_tail"),
    run.RunTracked: _apply_tracked,
    run.RunWaiting: _apply_waiting,
    run.RunPlaced: _apply_placed,
    run.RunStarted: _apply_started,
    run.RunReleased: _apply_end,
    run.RunExited: _apply_end,
    checkpoint.CheckpointCommitted: _apply_committed,
    checkpoint.CheckpointDeleted: lambda view, event: view.checkpoints.pop(event.uri, None),
    run.RunCompleted: lambda view, event: view.metrics.update(event.metrics),
    run.RunEvaluated: _apply_evaluated,
    run.RunPromotionPending: _apply_pending,
    run.RunPromoted: _apply_promoted,
    run.RunNotPromoted: _apply_not_promoted,
}
