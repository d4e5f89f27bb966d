"""Lightning: a callback that keeps checkpoints and stops in time, and a logger.

    keep = TrainbusCheckpoint()
    trainer = Trainer(max_epochs=10, callbacks=[keep], logger=TrainbusLogger())
    trainer.fit(model, data, ckpt_path=keep.resume_path)

Both work with ``lightning`` and with ``pytorch_lightning``: with the one that the script imported before.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainbus.integrations.library import import_library
from trainbus.integrations.numbers import select_numbers
from trainbus.integrations.stop import is_stop_agreed
from trainbus.script import checkpoint, report, resume, resume_step, should_stop

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
else:
    _NAME = "lightning.pytorch"
    if "pytorch_lightning" in sys.modules and _NAME not in sys.modules:
        _NAME = "pytorch_lightning"
    import_library(_NAME, "lightning", "lightning")
    Checkpoint = import_library(f"{_NAME}.callbacks", "lightning", "lightning").Checkpoint
    Logger = import_library(f"{_NAME}.loggers", "lightning", "lightning").Logger
    _utilities = import_library(f"{_NAME}.utilities", "lightning", "lightning")
    rank_zero_only, rank_zero_warn = _utilities.rank_zero_only, _utilities.rank_zero_warn

FILE = "last.ckpt"


class TrainbusCheckpoint(Checkpoint):  # type: ignore[misc]
    """Keep a checkpoint after each epoch; when the run is asked to stop, keep one and end the script.

    Pass ``resume_path`` to ``fit``. A stop ends the process with exit code 0 after the batch: what the script does
    after ``fit`` is for a model that is trained to the end.

    Args:
        every_n_epochs: keep after so many epochs.
        every_n_steps: keep also after so many steps, for epochs that last long.
    """

    def __init__(self, every_n_epochs: int = 1, every_n_steps: int | None = None) -> None:
        if every_n_epochs < 1 or (every_n_steps is not None and every_n_steps < 1):
            raise ValueError("every_n_epochs and every_n_steps must be 1 or more")
        self.every_n_epochs, self.every_n_steps = every_n_epochs, every_n_steps
        #: Step and epoch of what was kept last.
        self._kept = (-1, -1)
        self._is_stopping = False
        self._sigterm_handler: Any = None

    @property
    def resume_path(self) -> str | None:
        """The file of the last kept checkpoint, for ``fit(ckpt_path=...)``; None where the run begins."""
        folder = resume()
        return str(folder / FILE) if folder and (folder / FILE).is_file() else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen for SIGTERM before Lightning does."""
        if stage == "fit":
            should_stop()
            self._sigterm_handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report how many steps there will be, and warn if the last checkpoint is ignored."""
        # Lightning's handler ends each rank where it stands, without a checkpoint.
        if self._sigterm_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm_handler)
        if resume_step() and self.resume_path and not trainer.ckpt_path:
            rank_zero_warn(
                f"a checkpoint of step {resume_step()} is kept, but training begins at step 0: "
                "call fit(..., ckpt_path=TrainbusCheckpoint(...).resume_path)"
            )
        total = trainer.estimated_stepping_batches
        if trainer.is_global_zero and math.isfinite(total) and total > 0:
            report(step=trainer.global_step, epoch=trainer.current_epoch, total_steps=int(total))

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """End if the batch before was the last one: what it logged is reported by now."""
        self._end_if_stopping()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Keep a checkpoint if it is due or the run is asked to stop."""
        step = trainer.global_step
        is_due = self.every_n_steps is not None and step % self.every_n_steps == 0
        self._is_stopping = is_stop_agreed(trainer.strategy.root_device)
        if (is_due or self._is_stopping) and step != self._kept[0]:
            self._keep_checkpoint(trainer, trainer.current_epoch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before a validation that the grace might not last for."""
        self._end_if_stopping()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a checkpoint after the epoch and its validation."""
        epoch = trainer.current_epoch + 1
        is_stopping = is_stop_agreed(trainer.strategy.root_device)
        if (epoch % self.every_n_epochs == 0 or is_stopping) and (trainer.global_step, epoch) != self._kept:
            self._keep_checkpoint(trainer, epoch)
        self._is_stopping = is_stopping
        self._end_if_stopping()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the last state, if it is not kept yet."""
        if trainer.global_step not in (self._kept[0], resume_step()):
            self._keep_checkpoint(trainer, trainer.current_epoch)

    def _end_if_stopping(self) -> None:
        if self._is_stopping:
            raise SystemExit(0)

    def _keep_checkpoint(self, trainer: Trainer, epoch: int) -> None:
        """Save in every rank, since a strategy may need all of them, and keep the file in rank 0."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(trainer.strategy.broadcast(folder)) / FILE
            trainer.save_checkpoint(path)
            metrics = select_numbers(trainer.callback_metrics)
            if trainer.is_global_zero:
                checkpoint(path, step=trainer.global_step, metrics=metrics or None, epoch=epoch)
        self._kept = (trainer.global_step, epoch)


class TrainbusLogger(Logger):  # type: ignore[misc]
    """Report what the module logs as metrics of the run. Names stay as they are."""

    @property
    def name(self) -> str:
        """The name of this logger."""
        return "trainbus"

    @property
    def version(self) -> str:
        """No version: the run is one."""
        return ""

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Report these values. ``step`` is the index of the batch after which Lightning logs them."""
        values = dict(metrics)
        epoch = values.pop("epoch", None)
        done = None if step is None else step + 1
        report(values, step=done, epoch=None if epoch is None else int(epoch))

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the run's parameters are those of its request."""
