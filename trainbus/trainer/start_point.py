"""Where training begins: survivor state on the nodes, a checkpoint, weights of another checkpoint, or from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from contracts.exactness import TIMED
from trainbus.data.order import LaneOrder
from trainbus.trainer import environment
from trainbus.trainer.checkpoint import Progress, find_initial_weights, load
from trainbus.trainer.checkpoint.tensor_file import RequireRange
from trainbus.trainer.checkpoint.weights import Weights, match_weights
from trainbus.trainer.optimizer_state import pack_groups, restore_groups
from trainbus.trainer.rate_schedule import RateSchedule
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.survivor_state import SurvivorStore, load_newest_state
from trainbus.trainer.training_state import MovingAverage
from trainbus.trainer.world import World

#: Under this name in a state's ``about``.
UNREPORTED = "unreported"


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The weights of a checkpoint to begin with, except for the tensors that ``exclude`` names."""

    folder: Path
    exclude: tuple[str, ...] = ()


class StartPoint:
    """The state that training begins with, for the trainer to load part by part as it builds the model and the rest."""

    def __init__(
        self,
        world: World,
        *,
        run_id: str | None = None,
        survivors: SurvivorStore | None = None,
        resume_folder: Path | None = None,
        resume_step: int = 0,
        require: RequireRange | None = None,
        init: InitialWeights | None = None,
    ) -> None:
        """Agree with all ranks on the newest state there is, and load it; every rank calls it.

        Args:
            run_id: of this run, which need not be that of the checkpoint.
            survivors: where earlier generations may have saved a newer state than ``resume_folder``.
            resume_folder: a checkpoint.
            resume_step: its step: survivor state counts if it is at least as new.
            require: where the checkpoint's files are here in parts, see ``open_tensor_file``.
            init: the weights to begin with if there is no state at all.
        """
        self._world, self._run_id, self._init = world, run_id, init
        survivors = survivors or SurvivorStore()
        loaded = load_newest_state(world, survivors.find_parts(resume_step, run_id))
        self.resumed_from: Literal["scratch", "checkpoint", "memory"] = "memory"
        if loaded is None:
            loaded = load(resume_folder, require) if resume_folder is not None else None
            self.resumed_from = "scratch" if loaded is None else "checkpoint"
        self._state = None if loaded is None else loaded.state
        self.progress = Progress() if loaded is None else loaded.progress
        self._parent = self.progress.about

    @property
    def committed_step(self) -> int:
        """The step that a checkpoint of this very run holds already; -1: none does."""
        own = self.resumed_from == "checkpoint" and self._parent.get("run_id") == self._run_id
        return self.progress.step if own else -1

    @property
    def unreported(self) -> dict[str, float] | None:
        """Metrics of the step of a survivor state, which its ranks may not have reported before they ended."""
        found = self._parent.get(UNREPORTED) if self.resumed_from == "memory" else None
        return found["values"] if found is not None and found["step"] == self.progress.step else None

    def check_order(self, order: LaneOrder) -> None:
        """Check that training continues in the order of samples that it was in.

        Raises:
            OrderMismatch: training would lose or repeat samples; the text says what to set.
        """
        before = self._parent.get("order")
        if before is not None:
            order.check(before)
        elif self.progress.samples_consumed:
            print(
                "trainbus: the checkpoint is older than the record of its order of samples: "
                "samples may be lost or repeated until the epoch ends",
                flush=True,
            )

    def find_weights(self, model: nn.Module) -> Weights:
        """Return what the model's tensors are loaded from, where they do not keep their initial values.

        Raises:
            StateMismatch: a tensor does not fit the model; the text names it.
        """
        if self._state is not None:
            return match_weights(self._state.model, model)
        if self._init is not None:
            return find_initial_weights(self._init.folder, model, self._init.exclude)
        return {}

    def load_optimizer(self, strategy: Strategy, schedule: RateSchedule, *, has_other_settings: bool = False) -> None:
        """Load the optimizer, the loss scale and the schedule.

        ``has_other_settings``: the hyperparameters stay as the task has set them, and the schedule is the task's own,
        advanced to this step; of the optimizer only its tensors and counts are loaded.
        """
        if self._state is None:
            return
        groups = strategy.optimizer.param_groups
        fresh = pack_groups(groups, [()] * len(groups))
        strategy.load_state(self._state)
        if has_other_settings:
            restore_groups(groups, fresh)
            schedule.skip_steps(self.progress.step)
        else:
            schedule.load_state_dict(self.progress.schedule)

    def has_other_settings(self, run: Mapping[str, Any], total_steps: int) -> bool:
        """Return whether the state is another run's, with other params or another end.

        A schedule that was made for the other end would run out, and its learning rate hide the new one.
        """
        parent = self._parent
        if self._state is None or parent.get("run_id") == self._run_id:
            return False
        return bool(parent.get("params") != run.get("params") or parent.get("total_steps", total_steps) != total_steps)

    def moving_average(self, strategy: Strategy, decay: float | None) -> MovingAverage | None:
        """Return the moving average of the weights as it was, or a new one that begins with them."""
        if decay is None:
            return None
        ema = MovingAverage(strategy.parameters_for_ema(), decay)
        if self._state is not None and self._state.ema:
            strategy.load_ema(ema.tensors, self._state.ema)
        return ema

    def describe_run(
        self, run: Mapping[str, Any], logical_ranks: int | None, here: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return what later states record about the run, in the environment ``here``; every rank calls it."""
        digests = self._world.all_gather_objects(environment.digest(here))
        parent = None if self._state is None else self._parent
        timed = TIMED in here
        exactness = environment.classify_exactness(logical_ranks, digests, parent, self._run_id, is_timed=timed)
        return {**run, "exactness": exactness, "environment_digest": digests[0]}
