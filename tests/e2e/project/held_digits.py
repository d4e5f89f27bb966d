"""The digits example, held at a step so that it can be resized in mid-run. It lies beside the example's ``task.py``."""

from pathlib import Path
from typing import Any

from task import Digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainbus.step_hold import wait_while_held


class HeldDigits(Digits):
    """Digits with ``holds``: steps by the paths of holds; after that many they wait for as long as the test has it."""

    def __init__(self, holds: dict[str, int] | None = None, **params: float) -> None:
        super().__init__(**params)
        self.holds = holds or {}

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        self.steps = super().schedule(optimizer, total_steps)
        return self.steps

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        for path, step in self.holds.items() if model.training else ():
            if self.steps.last_epoch >= step:
                wait_while_held(Path(path))
        return super().loss(model, batch)
