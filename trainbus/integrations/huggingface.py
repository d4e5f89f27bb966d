"""Hugging Face Trainer: a callback that reports metrics, keeps checkpoints and stops in time.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TrainbusCallback()])
    trainer.train(resume_from_checkpoint=resume_path())

What is kept is what ``TrainingArguments`` saves (``save_strategy``, ``save_steps``), and one more at a stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.integrations.library import import_library
from trainbus.integrations.numbers import select_numbers
from trainbus.integrations.stop import is_stop_agreed, wait_for_ranks
from trainbus.script import checkpoint, report, resume, should_stop

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
else:
    TrainerCallback = import_library("transformers", "transformers", "huggingface").TrainerCallback


def resume_path() -> str | None:
    """Return the folder of the last kept checkpoint, for ``train(resume_from_checkpoint=...)``; None: begin."""
    folder = resume()
    return str(folder) if folder and (folder / "trainer_state.json").is_file() else None


class TrainbusCallback(TrainerCallback):  # type: ignore[misc]
    """Report what the Trainer logs, keep what it saves; when the run is asked to stop, save and end the script.

    A stop ends the process with exit code 0 after the step: what the script does after ``train`` is for a model that
    is trained to the end.
    """

    def __init__(self) -> None:
        self._is_stopping = False
        self._metrics: dict[str, float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Listen for SIGTERM from here on."""
        should_stop()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Have the Trainer save now if the run is asked to stop."""
        if is_stop_agreed(args.device):
            self._is_stopping = True
            control.should_save, control.should_evaluate, control.should_training_stop = True, False, True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report the numbers."""
        numbers = select_numbers(logs or {})
        numbers.pop("epoch", None)
        self._metrics.update(numbers)
        if state.is_world_process_zero:
            report(numbers, step=state.global_step, epoch=_completed(state), total_steps=state.max_steps or None)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the checkpoint that all ranks have saved; end if the run is asked to stop."""
        wait_for_ranks()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            checkpoint(folder, step=state.global_step, metrics=self._metrics or None, epoch=_completed(state))
        if self._is_stopping:
            wait_for_ranks()
            raise SystemExit(0)


def _completed(state: TrainerState) -> int:
    """Return how many epochs are complete; the Trainer counts a step as its part of one."""
    return int((state.epoch or 0) + 1e-6)
