"""Train in a loop of your own, and go on where it ended. The data is a table: csv, jsonl or Parquet."""

import argparse
import os
import sys
from pathlib import Path

import pyarrow.parquet
import torch
from torch import nn
from torch.nn.functional import mse_loss

import trainbus

# Your columns: the numbers to predict from, and the number to predict.
FEATURES = ["x1", "x2"]
TARGET = "y"

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01)
arguments = parser.parse_args()


def read(split):
    """Return the features [n, FEATURES] and the target [n] of a split: train, val or test."""
    folder = Path(os.environ.get("TRAINBUS_DATA_DIR", "data"))
    table = pyarrow.parquet.read_table(folder / split)
    columns = [torch.tensor(table[name].to_pylist(), dtype=torch.float32) for name in [*FEATURES, TARGET]]
    return torch.stack(columns[:-1], 1), columns[-1]


torch.manual_seed(0)
features, target = read("train")
model = nn.Sequential(nn.Linear(len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

# What lies in the output folder is kept, and is there again when the script starts anew.
saved = trainbus.output_dir() / "checkpoint.pt"
done = 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["epoch"]

for epoch in range(done + 1, arguments.epochs + 1):
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(64):
        loss = mse_loss(model(features[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trainbus.report(step=epoch, total_steps=arguments.epochs, loss=loss.item())
    print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, saved.with_suffix(".new"))
    saved.with_suffix(".new").replace(saved)  # a whole file at any moment
    if epoch < arguments.epochs and trainbus.should_stop():
        sys.exit()
