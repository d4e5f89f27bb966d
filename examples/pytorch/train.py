"""Plain PyTorch with the calls of trainbus: metrics, checkpoints, resume, stop. Outside a run it works the same."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import trainbus

params = {"lr": 0.003, "epochs": 20, **trainbus.params()}

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
x_train, y_train, x_test, y_test = x[:1400], y[:1400], x[1400:], y[1400:]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])

first = 0
if folder := trainbus.resume():
    state = torch.load(folder / "ckpt.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"]

for epoch in range(first + 1, params["epochs"] + 1):
    order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(64):
        loss = nn.functional.cross_entropy(model(x_train[batch]), y_train[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
    trainbus.report(epoch=epoch, total_steps=params["epochs"], loss=loss.item(), accuracy=accuracy)

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "ckpt.pt")
    trainbus.checkpoint("ckpt.pt", step=epoch, epoch=epoch, metrics={"accuracy": accuracy})
    if trainbus.should_stop():
        sys.exit()
