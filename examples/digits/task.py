"""Handwritten digits: a small convolutional network on grey images of 8x8 to 16x16 pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from trainbus import Task


class Net(nn.Module):
    """Two convolutions, BatchNorm and dropout: images of shape [B, 1, H, W] -> logits [B, classes]."""

    def __init__(self, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 16, classes))

    def forward(self, images_B1HW: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images_B1HW))
        return logits


class Digits(Task):
    """Classify digits. ``params``: lr, width, dropout, weight_decay."""

    kind = "classification"

    def __init__(self, lr: float = 3e-3, width: int = 16, dropout: float = 0.1, weight_decay: float = 1e-2) -> None:
        self.lr, self.width, self.dropout, self.weight_decay = lr, width, dropout, weight_decay

    def model(self) -> nn.Module:
        return Net(self.width, len(self.classes) or 10, self.dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # One step more than there are: the schedule must not run out at the last one.
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=total_steps + 1, pct_start=0.2)

    def decode(self, sample: dict[str, bytes]) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(sample["png"])).convert("L")
        pixels_1HW = torch.from_numpy(np.array(image, dtype=np.float32))[None] / 255.0
        return pixels_1HW, int(sample["cls"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "accuracy": logits.argmax(1) == labels,
        }

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        probabilities = model(images).softmax(1)
        return {"prediction": probabilities.argmax(1), "target": labels, "probabilities": probabilities}
