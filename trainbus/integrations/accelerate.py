"""Accelerate: a tracker, and three calls for a training loop of one's own.

accelerator = Accelerator(log_with=TrainbusTracker())
accelerator.init_trackers("my-project")
first = load_checkpoint(accelerator)                       # the step to go on from, 0 where the run begins
for step in range(first, steps):
    ...
    accelerator.log({"loss": loss}, step=step + 1)        # steps that are done, as for a checkpoint
    if should_stop(accelerator):
        save_checkpoint(accelerator, step=step + 1)
        break
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.integrations.library import import_library
from trainbus.integrations.numbers import select_numbers
from trainbus.integrations.stop import is_stop_agreed
from trainbus.script import checkpoint, report, resume, resume_step

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
else:
    GeneralTracker = import_library("accelerate.tracking", "accelerate", "accelerate").GeneralTracker


class TrainbusTracker(GeneralTracker):  # type: ignore[misc]
    """Report what ``Accelerator.log`` gets as metrics of the run. Names stay as they are."""

    name = "trainbus"
    requires_logging_directory = False

    @property
    def tracker(self) -> None:
        """No object of another library stands behind this tracker."""
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: the run's parameters are those of its request."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Report the numbers among these values."""
        report(select_numbers(values), step=step)


def should_stop(accelerator: Accelerator) -> bool:
    """Return whether the run is asked to stop, the same in every process. Call it in all of them, at the same step."""
    return is_stop_agreed(accelerator.device)


def save_checkpoint(
    accelerator: Accelerator, step: int, metrics: Mapping[str, float] | None = None, *, epoch: int | None = None
) -> None:
    """Save the state of what was prepared and registered, and keep it with the run. Call it in all processes."""
    from accelerate.utils import broadcast_object_list

    with tempfile.TemporaryDirectory() as own:
        [folder] = broadcast_object_list([own])
        target = Path(folder) / "state"
        accelerator.save_state(str(target))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            checkpoint(target, step=step, metrics=metrics, epoch=epoch)
        accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator) -> int:
    """Load the last kept checkpoint into what was prepared; return its step, 0 where the run begins."""
    folder = resume()
    if folder is None:
        return 0
    accelerator.load_state(str(folder))
    return resume_step()
