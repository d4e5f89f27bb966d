"""A task whose best weights are those of its second epoch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainbus import Task


class Weight(nn.Module):
    """One number, by which the input is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Overfits(Task):
    """The weight grows by 1/4 a step whatever the data are, by 1 an epoch of four steps; the right one is 2."""

    kind = "regression"

    def model(self) -> nn.Module:
        return Weight()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1 / 4)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return -model(torch.ones_like(batch["x"], dtype=torch.float32)).mean()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x = batch["x"].float()
        return {"loss": (model(x) - 2 * x) ** 2}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        x = batch["x"].float()
        return {"prediction": model(x), "target": 2 * x, "half": ["low" if n <= 50 else "high" for n in x.tolist()]}

    def artifacts(self) -> dict[str, str]:
        return {"vocabulary.txt": "one two"}

    def load_artifacts(self, folder: Path) -> None:
        assert (folder / "vocabulary.txt").read_text() == "one two"
