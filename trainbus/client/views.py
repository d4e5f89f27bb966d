"""What clients see of runs, nodes and models, as the gateway's read model has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from contracts.run_states import TERMINAL_STATES

if TYPE_CHECKING:
    from contracts.checkpoint_ref import CheckpointRef
    from contracts.spec.run import RunSpec
    from contracts.state.node import NodeDrain

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
    last_checkpoint: CheckpointRef | None = None
    #: Of the last checkpoint: the same for the same state on any number of ranks.
    state_digest: str = ""
    logical_ranks: int | None = None
    #: exact or samples-exact; '' before it has started. Why not exact, and since which generation.
    exactness: str = ""
    exactness_reason: str = ""
    inexact_since: int | None = None
    #: What every node reported when the ranks of a generation started: from which step, in which environment.
    starts: list[dict[str, Any]] = field(default_factory=list)
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
    #: The study whose trial it is.
    study: str | None = None
    #: What is probably a mistake in its request; of a single run.
    warnings: tuple[str, ...] = ()
    timeline: list[TimelineEntry] = field(default_factory=list)
    #: Whether it had facts before those of the timeline.
    is_timeline_cut: bool = False
    #: Place in the log of the last fact on its subjects that is in this view; 0 in a list.
    sequence: int = 0
    spec: RunSpec | None = None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def known_step(self) -> int | None:
        """The step; None for a script that has reported none."""
        is_script = self.spec is not None and self.spec.command is not None
        has_trained = self.last_checkpoint is not None or (is_script and self.ended)
        return None if has_trained and not self.step and not self.total_steps else self.step

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


@dataclass(slots=True)
class StudyView:
    """One study as a list of runs shows it, in place of its trials."""

    study_id: str
    name: str
    state: str
    requested_at: datetime | None = None
    reason: str = ""
    #: How many trials it has in the end; 0: not known.
    planned_trials: int = 0
    #: How many trials are in each state.
    trials_by_state: dict[str, int] = field(default_factory=dict)
    #: The metric that is optimised, where there is one alone, and its best value so far.
    objective: str | None = None
    best_value: float | None = None


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
    joined_at: datetime | None = None
    #: Why it is drained, unfit, or under notice.
    reason: str = ""
    #: Who drained it, when and why; None: it is not drained.
    drain: NodeDrain | None = None
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
