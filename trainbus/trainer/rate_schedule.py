"""The learning-rate schedule of a run: stepped after each training step, or after each validation with its metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainbus.task import TaskError


class RateSchedule:
    """Steps the task's scheduler, and turns its state into JSON and back."""

    def __init__(self, scheduler: LRScheduler | None, metric: str, mode: str) -> None:
        """``metric`` and ``mode``: what ``ReduceLROnPlateau`` monitors.

        Raises:
            TaskError: it has the other mode.
        """
        self._scheduler, self._metric = scheduler, metric
        self._plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        if self._plateau is not None and self._plateau.mode != mode:
            raise TaskError(
                f"ReduceLROnPlateau has mode {self._plateau.mode!r}, but retention.mode of {metric!r}, which it "
                f"monitors, is {mode!r}: set both alike"
            )

    def step(self) -> None:
        """Go on by one training step."""
        if self._scheduler is not None and self._plateau is None:
            self._scheduler.step()

    def record_validation(self, metrics: Mapping[str, float]) -> None:
        """Note what a validation found.

        Raises:
            TaskError: it lacks the metric that the schedule monitors.
        """
        if self._plateau is None:
            return
        if self._metric not in metrics:
            found = ", ".join(sorted(metrics)) or "none"
            raise TaskError(
                f"ReduceLROnPlateau monitors retention.metric {self._metric!r}, "
                f"which validation does not have (it has: {found})"
            )
        self._plateau.step(metrics[self._metric])

    def skip_steps(self, steps: int) -> None:
        """Bring a new schedule to where it is after that many training steps."""
        with warnings.catch_warnings():
            # It follows no optimizer's steps here.
            warnings.simplefilter("ignore")
            for _ in range(steps):
                self.step()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the scheduler's state, without the infinities that JSON cannot hold."""
        if self._scheduler is None:
            return None
        state = self._scheduler.state_dict()
        if self._plateau is not None:
            del state["mode_worse"]  # follows from the mode
            if not math.isfinite(state["best"]):
                state["best"] = None
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load what ``state_dict`` returned; None changes nothing."""
        if self._scheduler is None or state is None:
            return
        if self._plateau is not None and state.get("best") is None:
            state = {**state, "best": self._plateau.mode_worse}
        self._scheduler.load_state_dict(dict(state))
