"""Where training begins: with a state left on the nodes, with a checkpoint, with another's weights, or with nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trainbus.data.order import LaneOrder
from trainbus.trainer import environment
from trainbus.trainer.checkpoint import LoadedCheckpoint, Progress, load, load_initial_weights
from trainbus.trainer.checkpoint.reader import put_model
from trainbus.trainer.moving_average import MovingAverage
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.survivor_state import load_newest_state
from trainbus.trainer.survivor_store import SurvivorStore
from trainbus.trainer.world import World

#: Under this name in a state's ``about``.
UNREPORTED = "unreported"


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Weights to begin with: a checkpoint's, but for the tensors that ``exclude`` names."""

    folder: Path
    exclude: tuple[str, ...] = ()


class StartPoint:
    """The state that training begins with. Its parts are handed out as what they belong to is built."""

    def __init__(
        self,
        world: World,
        memory: SurvivorStore,
        resume_folder: Path | None,
        resume_step: int,
        run_id: str | None,
        init: InitialWeights | None = None,
    ) -> None:
        """Agree with all ranks on the newest state there is.

        Args:
            resume_step: the step of ``resume_folder``: what was left on the nodes counts if it is as new.
            run_id: this run's, which need not be that of the checkpoint.
            init: the weights to begin with if there is no state at all.
        """
        self._world, self._run_id, self._init = world, run_id, init
        loaded: LoadedCheckpoint | None = load_newest_state(world, memory.left(resume_step, run_id))
        self.resumed_from: Literal["scratch", "checkpoint", "memory"] = "memory"
        if loaded is None:
            loaded = load(resume_folder) if resume_folder is not None else None
            self.resumed_from = "scratch" if loaded is None else "checkpoint"
        self._state = None if loaded is None else loaded.state
        self.progress = Progress() if loaded is None else loaded.progress
        self._parent = self.progress.about

    @property
    def committed_step(self) -> int:
        """The step that need not be saved again: a checkpoint of this very run has it. -1: there is none."""
        own = self.resumed_from == "checkpoint" and self._parent.get("run_id") == self._run_id
        return self.progress.step if own else -1

    @property
    def unreported(self) -> dict[str, float] | None:
        """Metrics of the step of a state in memory, which the ranks that took it may not have lived to report."""
        left = self._parent.get(UNREPORTED) if self.resumed_from == "memory" else None
        return left["values"] if left is not None and left["step"] == self.progress.step else None

    def check_order(self, order: LaneOrder) -> None:
        """Make sure that training goes on in the order of samples that it was in.

        Raises:
            OrderMismatch: it would lose or repeat samples; the text says what to set.
        """
        before = self._parent.get("order")
        if before is not None:
            order.check(before)
        elif self.progress.samples_consumed:
            print(
                "trainbus: the checkpoint is older than the record of its order of samples: "
                "within the epoch that it is in, samples may be lost or repeated",
                flush=True,
            )

    def put_weights(self, model: nn.Module) -> None:
        """Give the model its weights, before a strategy cuts or casts them."""
        if self._state is not None:
            put_model(self._state.model, model)
            self._state.model = {}
        elif self._init is not None:
            load_initial_weights(self._init.folder, model, self._init.exclude)

    def put_rest(self, strategy: Strategy, schedule: LRScheduler | None) -> None:
        """Give the optimizer, the loss scale and the schedule theirs."""
        if self._state is None:
            return
        strategy.load_state(self._state)
        if schedule is not None and self.progress.schedule is not None:
            schedule.load_state_dict(self.progress.schedule)

    def averages(self, strategy: Strategy, decay: float | None) -> MovingAverage | None:
        """Return the moving average of the weights as it was, or one that begins with them."""
        if decay is None:
            return None
        ema = MovingAverage(strategy.parameters_for_ema(), decay)
        if self._state is not None and self._state.ema:
            strategy.load_ema(ema.tensors, self._state.ema)
        return ema

    def about(self, run: Mapping[str, Any], logical_ranks: int | None, here: Mapping[str, str]) -> dict[str, Any]:
        """Return what the states to come say about themselves, in the environment ``here``; every rank calls it."""
        digests = self._world.all_gather_objects(environment.digest(here))
        parent = None if self._state is None else self._parent
        exactness = environment.exactness(logical_ranks, digests, parent, self._run_id)
        return {**run, "exactness": exactness, "environment_digest": digests[0]}
