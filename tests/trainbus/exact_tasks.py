"""Tasks with everything in them that is hard to keep exact, on one small dataset. Imports nothing of the tests: it is
a code package as it stands.

A sample is 192 bytes and a class: an image of 3 x 8 x 8 for MLP and CNN, a text for GPT.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainbus import Task
from trainbus.ranks.step_hold import wait_at

CLASSES = tuple("abcdefgh")


def samples(count: int, seed: int = 0) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Noisy copies of one prototype a class: something to learn, never quite."""
    prototypes = np.random.default_rng(7).integers(64, 192, (len(CLASSES), 192))
    rng = np.random.default_rng(seed + 1)
    for number in range(count):
        label = int(rng.integers(len(CLASSES)))
        image = np.clip(prototypes[label] + rng.normal(0, 40, 192), 0, 255).astype(np.uint8)
        yield f"s{seed:02d}-{number:06d}", {"bin": image.tobytes(), "cls": str(label).encode()}


class Images(Task):
    """What MLP and CNN have in common: augmentation, a schedule, cross entropy."""

    def __init__(self, lr: float = 0.01, dropout: float = 0.2, width: int = 16) -> None:
        self.lr, self.dropout, self.width = lr, dropout, width

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps + 1)

    def decode(self, sample: dict[str, bytes]) -> tuple[Tensor, int]:
        image = np.frombuffer(sample["bin"], dtype=np.uint8).reshape(3, 8, 8)
        return torch.from_numpy(image.astype(np.float32) / 128 - 1), int(sample["cls"])

    def augment(self, example: tuple[Tensor, int], rng: np.random.Generator) -> tuple[Tensor, int]:
        image, label = example
        if rng.random() < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.from_numpy(rng.standard_normal((3, 8, 8), dtype=np.float32)), label

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        logits = model(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(1) == batch[1]).float()}

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]).argmax(1), batch[1]


class MLP(Images):
    """AdamW with two groups of parameters."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(192, self.width),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.width, self.width),
            nn.GELU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.width, len(CLASSES)),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr)


class PlateauMLP(MLP):
    """The rate falls after each validation that is not far better than the best one."""

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)


class CNN(Images):
    """BatchNorm, whose statistics change in each forward, and SGD with momentum."""

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Dropout2d(self.dropout),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * width * 16, len(CLASSES)),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, nesterov=True)


class Block(nn.Module):
    """A layer of a transformer: attention, then a two-layer perceptron, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.qkv(self.before_attention(x_BTC)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.dropout(self.out(mixed.transpose(1, 2).reshape(B, T, C)))
        return x_BTC + self.dropout(self.mlp(self.before_mlp(x_BTC)))


class GPTModel(nn.Module):
    """Predicts the next byte. The embedding is also the output layer (one weight, two names)."""

    def __init__(self, width: int, layers: int, heads: int, dropout: float, context: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        places_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTC = self.token(bytes_BT) + self.place(places_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


class GPT(Task):
    """A small language model with tied weights."""

    def __init__(self, lr: float = 0.003, dropout: float = 0.1, width: int = 32, layers: int = 2, context: int = 24):
        self.lr, self.dropout, self.width, self.layers, self.context = lr, dropout, width, layers, context

    def model(self) -> nn.Module:
        return GPTModel(self.width, self.layers, 2, self.dropout, self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95))

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        def factor(step: int) -> float:
            return min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / (total_steps + 1)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def decode(self, sample: dict[str, bytes]) -> Tensor:
        return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).long()

    def augment(self, example: Tensor, rng: np.random.Generator) -> Tensor:
        start = int(rng.integers(len(example) - self.context))
        return example[start : start + self.context + 1]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        text = batch[:, : self.context + 1]
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class LowRank(nn.Module):
    """A frozen linear layer and what is trained beside it: a product of two narrow matrices (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class LoRA(GPT):
    """A frozen language model with adapters in its attention."""

    def model(self) -> nn.Module:
        model = super().model().requires_grad_(False)
        assert isinstance(model, GPTModel)
        for block in model.blocks:
            assert isinstance(block, Block)
            block.qkv = LowRank(block.qkv, 4)  # type: ignore[assignment,arg-type]
        return model


class PaddedGPT(GPT):
    """Texts of 0 to ``context`` bytes, padded; the loss is the mean over bytes that are no padding."""

    def loss_weight(self, batch: Tensor) -> Tensor:
        return self._targets(batch).ge(0).sum()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, : self.context])
        return F.cross_entropy(logits.flatten(0, 1), self._targets(batch).flatten(), ignore_index=-1)

    def _targets(self, batch: Tensor) -> Tensor:
        places = torch.arange(self.context, device=batch.device)
        is_padding = places >= (batch[:, :1] % (self.context + 1))
        return batch[:, 1 : self.context + 1].masked_fill(is_padding, -1)


class Held:
    """Waits in the forward pass of a step for as long as another process holds it (HELD_BY)."""

    def __init__(self, *args: Any, held_at: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held_at, self.step = held_at, 0

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().optimizer(model)  # type: ignore[misc]
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, *_: object) -> None:
        self.step += 1

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and "HELD_BY" in os.environ:
            wait_at(self.step, {os.environ["HELD_BY"]: self.held_at})
        loss: Tensor = super().loss(model, batch)  # type: ignore[misc]
        return loss


class HeldCNN(Held, CNN): ...


class HeldGPT(Held, GPT): ...


class HeldLoRA(Held, LoRA): ...
