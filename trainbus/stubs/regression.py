"""Predict a number from the columns of a table. The data is csv, jsonl or Parquet."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from trainbus import Task

# Your columns: the numbers to predict from, and the number to predict.
FEATURES = ["x1", "x2"]
TARGET = "y"


class Regressor(Task):
    kind = "regression"  # an evaluation adds rmse, mae and r2
    target = TARGET  # a request to the served model has no such column

    def __init__(self, lr=1e-3):  # --param lr=0.01
        self.lr = lr

    def model(self):
        # Your network: features [n, FEATURES] -> predictions [n].
        width = len(FEATURES)
        return nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def decode(self, sample):
        row = super().decode(sample)  # a dict: column -> value
        return torch.tensor([float(row[name]) for name in FEATURES]), torch.tensor(float(row[TARGET]))

    def loss(self, model, batch):
        features, target = batch
        return mse_loss(model(features), target)

    def metrics(self, model, batch):
        features, target = batch
        return {"loss": mse_loss(model(features), target, reduction="none")}

    def predict(self, model, batch):
        features, target = batch
        return {"prediction": model(features), "target": target}
