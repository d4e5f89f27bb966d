"""Compare a recorded run's states with those of a second training of the same request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts import exactness
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointRefused, CheckpointStaged
from contracts.events.run import CheckpointRef, RunAccepted, RunCompleted, RunPrepared, RunStarted
from contracts.events.train import TrainRequested
from contracts.spec.data import DatasetRef
from contracts.spec.resources import Slots
from contracts.spec.run import RunSpec
from contracts.state.placements import Placements
from trainbus.client.errors import UsageError

#: Steps that ``training.checkpoint_at_steps`` may list.
MAX_STEPS = 10_000
#: The tag of a reproduction that names the run it repeats.
TAG = "reproduces"
#: The parts of a state, those first from which the others follow.
PARTS = ("model", "optimizer", "ema", "state")


class NotReproducibleError(UsageError):
    """The run cannot be repeated to the bit; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RecordedState:
    """One committed state of the recorded run."""

    step: int
    digest: str
    commit: CheckpointCommitted


@dataclass(slots=True)
class RecordedRun:
    """The run to repeat, as the log has it."""

    run_id: str
    spec: RunSpec | None = None
    dataset_id: str | None = None
    #: By step, the newest generation's; only states that are exact and have a digest.
    states: dict[int, RecordedState] = field(default_factory=dict)
    committed: int = 0
    #: Checkpoints that are still in the store, by step.
    kept: dict[int, CheckpointRef] = field(default_factory=dict)
    starts: list[RunStarted] = field(default_factory=list)
    last_step: int | None = None

    def apply(self, event: Any) -> None:
        """Fold one fact, in the order of the log."""
        match event:
            case RunAccepted() if self.spec is None:
                self.spec = event.spec
            case RunPrepared():
                self.dataset_id = event.dataset_id
            case RunStarted():
                self.starts.append(event)
            case CheckpointCommitted(checkpoint=ref):
                self.committed += 1
                self.kept[ref.step] = ref
                if event.exactness == "exact" and event.state_digest is not None:
                    self.states[ref.step] = RecordedState(ref.step, event.state_digest, event)
            case CheckpointDeleted():
                self.kept = {step: ref for step, ref in self.kept.items() if ref.uri != event.uri}
            case RunCompleted():
                self.last_step = event.checkpoint.step if event.checkpoint else None

    @property
    def reading(self) -> exactness.Assessment | None:
        return exactness.assess(self.spec, self.starts)

    def environment(self, generation: int) -> Mapping[str, str]:
        """Return the environment that a generation reported at its start."""
        return next((start.environment for start in self.starts if start.generation == generation), {})


@dataclass(frozen=True, slots=True)
class ReproductionPlan:
    """The request of the second training, and the states that it must reach."""

    request: TrainRequested
    wanted: dict[int, RecordedState]
    kept: frozenset[int]
    #: Whether the last state is the run's end, where the reproduction ends by itself.
    to_the_end: bool
    note: str = ""


def plan_reproduction(recorded: RecordedRun, start_step: int | None, slots: int | None) -> ReproductionPlan:
    """Plan how to repeat the run, from the beginning or from one of its checkpoints.

    Raises:
        NotReproducibleError: it was not exact, or its data, states or checkpoint are gone.
    """
    spec = recorded.spec
    if spec is None:
        raise NotReproducibleError(f"run {recorded.run_id} was never accepted, so there is nothing to repeat")
    if spec.task is None or spec.training is None or spec.kind != "train":
        raise NotReproducibleError(
            f"run {recorded.run_id} is no training of a Task: only those can be repeated to the bit"
        )
    logical = spec.training.logical_ranks
    if logical is None:
        raise NotReproducibleError(
            f"run {recorded.run_id} was trained in fast mode, which is exact in its samples alone: a second training "
            "differs in the last bits. Submit it with training.logical_ranks (for example 4, 8 or 12) to have one that "
            "can be reproduced (docs/exact-training.md)"
        )
    if slots is not None and not 1 <= slots <= logical:
        raise NotReproducibleError(f"--slots {slots}: the run has {logical} logical ranks, so give 1 to {logical}")
    if spec.data is not None and recorded.dataset_id is None:
        raise NotReproducibleError(f"the data of run {recorded.run_id} was never prepared, so it has trained nothing")
    wanted = {step: state for step, state in sorted(recorded.states.items()) if step > (start_step or 0)}
    if not wanted:
        raise NotReproducibleError(_nothing_to_compare(recorded, start_step))
    begins: dict[str, Any] = {}
    if start_step is not None:
        uri = _start_from(recorded, start_step).commit.checkpoint.uri
        begins = {"resume_from": uri, "init_from": None, "init_exclude": ()}
    steps = tuple(wanted)[-MAX_STEPS:]
    training = spec.training.model_copy(update={"checkpoint_at_steps": steps})
    request = spec.model_copy(
        update={
            "name": f"reproduce {spec.name}"[:200],
            "training": training,
            "data": DatasetRef(dataset_id=recorded.dataset_id) if recorded.dataset_id else None,
            "slots": Slots(min=slots, max=slots) if slots is not None else spec.slots,
            **begins,
            # The reproduction is compared only: it is not evaluated and competes for no model.
            "model": None,
            "evaluation": None,
            "tags": {**spec.tags, TAG: recorded.run_id},
        }
    )
    reading = recorded.reading
    left = f"it is {reading.exactness} {reading.why}" if reading and reading.exactness != "exact" else ""
    note = f"only its states up to step {steps[-1]} are compared: {left}" if left else ""
    whole = TrainRequested.model_validate(request.model_dump())
    return ReproductionPlan(whole, wanted, frozenset(recorded.kept), recorded.last_step == steps[-1], note)


def _nothing_to_compare(recorded: RecordedRun, start_step: int | None) -> str:
    reading = recorded.reading
    if start_step is not None and recorded.states:
        return f"run {recorded.run_id} has committed nothing beyond step {start_step}: {_steps(recorded.states)}"
    if reading is not None and reading.exactness != "exact":
        return f"run {recorded.run_id} is not exact, {reading.why}; so a second training differs in the last bits"
    if recorded.committed:
        return (
            f"none of the {recorded.committed} checkpoints of run {recorded.run_id} has a state digest: they are from "
            "before there was one, so train it again"
        )
    return f"run {recorded.run_id} has committed no checkpoint yet, so there is nothing to compare with"


def _start_from(recorded: RecordedRun, step: int) -> RecordedState:
    state = recorded.states.get(step)
    there = {each: found for each, found in recorded.states.items() if each in recorded.kept}
    if state is None or step not in recorded.kept:
        gone = "is deleted" if state is not None else "is not there, or not exact"
        raise NotReproducibleError(
            f"the checkpoint of step {step} of run {recorded.run_id} {gone}; it can start from {_steps(there)}, "
            "or from the beginning, without --from"
        )
    return state


def _steps(found: Iterable[int]) -> str:
    steps = sorted(found)
    return f"steps {', '.join(map(str, steps[-20:]))}" if steps else "none"


@dataclass(frozen=True, slots=True)
class StateComparison:
    """One state in both trainings."""

    recorded: RecordedState
    commit: CheckpointCommitted

    @property
    def digest(self) -> str | None:
        return self.commit.state_digest

    @property
    def same(self) -> bool:
        return self.digest == self.recorded.digest


@dataclass(slots=True)
class RunComparison:
    """The states that both trainings have reached so far, as the second one commits them."""

    wanted: dict[int, RecordedState]
    #: Steps whose recorded checkpoint is still in the store: tensors can be compared only there.
    kept: frozenset[int] = frozenset()
    compared: dict[int, StateComparison] = field(default_factory=dict)
    starts: list[RunStarted] = field(default_factory=list)
    #: (generation, step) of what is staged and neither committed nor refused, and of what is. Of many that wait the
    #: newest is committed first.
    _open: set[tuple[int, int]] = field(default_factory=set)
    _settled: set[tuple[int, int]] = field(default_factory=set)
    _placements: Placements = field(default_factory=Placements)

    def apply(self, event: Any) -> StateComparison | None:
        """Fold a fact of the second training; return the comparison that it completes, if any."""
        self._placements.apply(event)
        match event:
            case RunStarted():
                self.starts.append(event)
            case CheckpointStaged(generation=generation, step=step) if (generation, step) not in self._settled:
                self._open.add((generation, step))
            case CheckpointCommitted() | CheckpointRefused():
                self._settle(event)
        if not isinstance(event, CheckpointCommitted):
            return None
        step = event.checkpoint.step
        # A generation that repeats steps must reach the same states, too.
        if step not in self.wanted or (step in self.compared and self.compared[step].same is False):
            return None
        self.compared[step] = StateComparison(self.wanted[step], event)
        return self.compared[step]

    @property
    def difference(self) -> StateComparison | None:
        """The first state that differs."""
        return next((self.compared[step] for step in sorted(self.compared) if not self.compared[step].same), None)

    @property
    def first_comparable_difference(self) -> StateComparison | None:
        """The first state that differs and whose tensors can be compared."""
        steps = (step for step in sorted(self.compared) if step in self.kept and not self.compared[step].same)
        return next((self.compared[step] for step in steps), None)

    @property
    def reached_end(self) -> bool:
        """Whether the last state is reached. An earlier one may be missing: a later checkpoint can replace it."""
        return max(self.wanted) in self.compared

    @property
    def is_decided(self) -> bool:
        """Whether nothing that waits to be committed can change the answer."""
        if (found := self.first_comparable_difference) is not None:
            # Where retention has deleted the recorded checkpoint, a later one shows which tensors differ.
            return not any(step < found.recorded.step for step in self._waiting)
        return self.reached_end and not self._waiting

    @property
    def _waiting(self) -> set[int]:
        """The steps that may be committed yet: what an earlier generation has staged is not any more."""
        placed = self._placements.standing
        return {step for generation, step in self._open if placed is None or generation >= placed.generation}

    @property
    def last_same(self) -> int | None:
        """The last step at which both were equal."""
        return max((step for step, each in self.compared.items() if each.same), default=None)

    def environment(self, generation: int) -> Mapping[str, str]:
        return next((start.environment for start in self.starts if start.generation == generation), {})

    def _settle(self, event: CheckpointCommitted | CheckpointRefused) -> None:
        step = event.checkpoint.step if isinstance(event, CheckpointCommitted) else event.step
        self._settled.add((event.generation, step))
        self._open.discard((event.generation, step))


def first_different_tensor(names: Iterable[str]) -> str | None:
    """Return the tensor to examine first: the model's before the optimizer's, since moments follow from weights."""

    def order(name: str) -> tuple[int, str]:
        part = name.split("/", 1)[0]
        return (PARTS.index(part) if part in PARTS else len(PARTS), name)

    return min(names, key=order, default=None)
