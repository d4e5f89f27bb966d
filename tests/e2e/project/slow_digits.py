"""The digits example, slow enough to be resized in mid-run. It lies beside the example's ``task.py``."""

import time
from typing import Any

from task import Digits
from torch import Tensor, nn


class SlowDigits(Digits):
    """Digits with ``step_s`` of waiting a batch."""

    def __init__(self, step_s: float = 0.03, **params: float) -> None:
        super().__init__(**params)
        self.step_s = step_s

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.step_s)
        return super().loss(model, batch)
