"""A byte-level GPT on windows of text: no tokenizer, a vocabulary of 256."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainbus import Task

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block: x_BTC -> x_BTC."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(self.norm_attention(x_BTC)).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        x_BTC = x_BTC + self.project(attended.transpose(1, 2).reshape(B, T, C))
        out_BTC: Tensor = x_BTC + self.mlp(self.norm_mlp(x_BTC))
        return out_BTC


class GPT(nn.Module):
    """Bytes [B, T] -> logits of the next byte [B, T, 256]. The embedding is tied to the output."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        places = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTC = self.blocks(self.embed(bytes_BT) + self.position(places))
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


class ByteGPT(Task):
    """Predict the next byte. ``params``: context, width, layers, heads, lr, warmup_steps, weight_decay.

    A window of the dataset holds ``context + 1`` bytes or more: the input, and the same shifted by one.
    """

    kind = "language-modelling"

    def __init__(
        self,
        context: int = 64,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        lr: float = 3e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        self.context, self.width, self.layers, self.heads = context, width, layers, heads
        self.lr, self.warmup_steps, self.weight_decay = lr, warmup_steps, weight_decay

    def model(self) -> nn.Module:
        return GPT(self.context, self.width, self.layers, self.heads)

    def optimizer(self, model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        def factor(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

        return LambdaLR(optimizer, factor)

    def decode(self, sample: dict[str, bytes]) -> Tensor:
        return torch.from_numpy(np.frombuffer(sample["bin"], dtype=np.uint8)[: self.context + 1].astype(np.int64))

    def decode_batch(self, fields: dict[str, NDArray[np.uint8]]) -> Tensor:
        return torch.from_numpy(fields["bin"][:, : self.context + 1].astype(np.int64))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross entropy in nats a byte; every window has as many bytes, so the mean over bytes is that over windows."""
        logits_BTV = model(batch[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def predict(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        logits_BTV, next_BT = model(batch[:, :-1]).float(), batch[:, 1:]
        nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), next_BT, reduction="none")
        right_BT = logits_BTV.argmax(2) == next_BT
        tokens_B = torch.full((len(batch),), next_BT.shape[1])
        return {"nll": nll_BT.sum(1), "tokens": tokens_B, "correct": right_BT.sum(1)}
