"""The digits example, held at a step so that it can be resized in mid-run. It lies beside the example's ``task.py``."""

from typing import Any

from task import Digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainbus.ranks.step_hold import wait_at


class HeldDigits(Digits):
    """Digits with ``holds``: steps by the paths of holds; after that many they wait for as long as the test has it."""

    def __init__(self, holds: dict[str, int] | None = None, **params: float) -> None:
        super().__init__(**params)
        self.holds = holds or {}

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        self.steps = super().schedule(optimizer, total_steps)
        return self.steps

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            wait_at(self.steps.last_epoch, self.holds)
        return super().loss(model, batch)
