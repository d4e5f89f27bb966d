"""Model the bytes of a text, each from those before it. The data is a folder of .txt files."""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainbus import Task


class NextByte(nn.Module):
    """Your network: bytes [n, length] -> logits [n, length, 256] of the byte that follows each."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text):
        hidden, _ = self.gru(self.embed(text))
        return self.head(hidden)


class LanguageModel(Task):
    kind = "language-modelling"  # an evaluation adds perplexity and token_accuracy

    def __init__(self, width=128, lr=3e-3):  # --param width=256
        self.width, self.lr = width, lr

    def model(self):
        return NextByte(self.width)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def decode(self, sample):
        # A window of the text. With a tokenizer of your own: --format tokens (docs/quickstart.md).
        return torch.from_numpy(np.frombuffer(sample["bin"], dtype=np.uint8).astype(np.int64))

    def loss(self, model, batch):
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def predict(self, model, batch):
        logits, following = model(batch[:, :-1]), batch[:, 1:]
        nll = cross_entropy(logits.transpose(1, 2), following, reduction="none")
        correct = logits.argmax(2) == following
        return {"nll": nll.sum(1), "tokens": torch.full((len(batch),), nll.shape[1]), "correct": correct.sum(1)}
