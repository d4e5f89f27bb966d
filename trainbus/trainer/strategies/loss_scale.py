"""fp16's loss scale, the same arithmetic on every device and for any number of ranks."""

from __future__ import annotations

import math
from typing import Any

#: As torch.amp.GradScaler has them.
INITIAL, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: Below this the loss itself overflows, and a smaller scale does not help.
MIN_SCALE = 2.0**-14


class LossScaleUnderflow(Exception):
    """The gradient overflows at any scale."""


class LossScale:
    """Doubles after GROWTH_INTERVAL good steps and halves at a bad one. It is a power of two, so that scaling is exact.

    With ``enabled=False`` it stays 1. See "Mixed Precision Training" (Micikevicius et al., 2018), 3.2.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL if enabled else 1.0
        self._good_steps = 0

    def accept(self, scaled_norm: float) -> bool:
        """Return whether a step whose scaled gradient has this norm may be taken, and set the next step's scale."""
        if math.isfinite(scaled_norm):
            self._good_steps += 1
            if self._good_steps == GROWTH_INTERVAL:
                self.scale, self._good_steps = self.scale * GROWTH, 0
            return True
        self.scale, self._good_steps = self.scale * BACKOFF, 0
        if self.scale < MIN_SCALE:
            raise LossScaleUnderflow(
                "the gradient overflows fp16 at any loss scale: lower the learning rate or use bf16"
            )
        return False

    def state(self) -> dict[str, Any] | None:
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else None

    def load(self, state: dict[str, Any] | None) -> None:
        if self.enabled and state is not None:
            self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
