"""Which epoch a report of a run belongs to."""

from __future__ import annotations

from contracts.events.run import ProgressPoint, RunProgress
from contracts.spec.study import StudyFields
from contracts.state.study import Trial


def epoch_of(spec: StudyFields, trial: Trial, progress: RunProgress, point: ProgressPoint) -> int:
    """Return the epoch that a point ends, or its step where the run counts no epochs.

    A task's steps are shared evenly by the epochs that its run trains. A script gives the epoch as its step.
    """
    epochs = trial.until_epoch or spec.trial_epochs
    if spec.run.task is None or not epochs or not progress.total_steps:
        return point.step
    return max(1, round(point.step * epochs / progress.total_steps))
