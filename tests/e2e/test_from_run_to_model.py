"""From a folder of data to a model in hand, by a client that has neither credentials nor the stack's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainbus.embedded.launch import read_stack

pytestmark = [pytest.mark.e2e, pytest.mark.shell]

#: A project with a package of its own below ``src``, which nobody installs.
FILES = {
    "plants/pyproject.toml": '[project]\nname = "plants"\nversion = "1"\n',
    "plants/src/plants/__init__.py": "",
    "plants/src/plants/layers.py": "from torch import nn\n\n\ndef head():\n    return nn.Linear(2, 2)\n",
    "plants/src/plants/task.py": """
import torch
from torch.nn.functional import cross_entropy

from plants.layers import head
from trainbus import Task


class Plants(Task):
    def __init__(self, scale=1.0):
        self.scale = scale

    def model(self):
        return head()

    def decode(self, sample):
        row = super().decode(sample)
        return torch.tensor([row["height"], row["width"]]) * self.scale, row["kind"]

    def loss(self, model, batch):
        values, kinds = batch
        return cross_entropy(model(values), kinds)

    def metrics(self, model, batch):
        values, kinds = batch
        return {"accuracy": model(values).argmax(1) == kinds}
""",
    "rows/a.csv": "height,width,kind\n" + "".join(f"{n % 7}.5,{n % 3}.5,{n % 2}\n" for n in range(300)),
}


def test_data_and_model_travel_over_http(stack_folder: Path, tmp_path: Path) -> None:
    stack = read_stack(stack_folder)
    assert stack is not None
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_")}
    where = {"TRAINBUS_NATS_URL": stack.nats_url, "TRAINBUS_GATEWAY_URL": stack.gateway_url}
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=inherited | where
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def trainbus(*arguments: str) -> str:
        return run("-m", "trainbus", *arguments)

    assert "1 file" in trainbus("put", "rows", "s3://lake/plants")
    assert json.loads(trainbus("put", "rows", "s3://lake/plants", "--json"))["sent"] == 0
    assert "s3://lake/plants/a.csv" in trainbus("ls", "s3://lake/plants")

    runs: list[str] = []
    for scale in ("1.0", "0.1"):
        options = ["--name", f"plants-{scale}", "--param", f"scale={scale}", "--epochs", "2"]
        options += ["--retention-metric", "validation/accuracy", "--data", "s3://lake/plants", "--follow"]
        printed = trainbus("submit", "plants", "plants.task:Plants", *options)
        assert "completed" in printed
        assert "read 300 records" in printed or runs, "the data of the second run is there already"
        runs.append(printed.split()[0])

    compared = json.loads(trainbus("compare", *runs, "--json"))
    assert compared["differences"]["params.scale"] == [1.0, 0.1]
    assert {"train/loss", "validation/accuracy"} <= compared["modes"].keys()
    assert "validation/accuracy" in trainbus("compare", *runs)

    fetched: dict[str, Any] = json.loads(trainbus("fetch", runs[0], "model", "--json"))
    assert fetched["mark"] == "best"
    assert "validation/accuracy" in fetched["metrics"]
    # The lines as they are printed, where the project and the stack are not.
    printed = trainbus("fetch", runs[0], "again")
    lines = [line.removeprefix("  ") for line in printed.splitlines() if line.startswith("  ")]
    assert lines
    (tmp_path / "use.py").write_text("\n".join([*lines, "print(model)"]))
    assert "Linear(in_features=2, out_features=2" in run("use.py")
