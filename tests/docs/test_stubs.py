"""Each stub of ``trainbus init`` trains as it is written, with the command that its README names, and is promoted."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.docs.document import Reader
from trainbus.client.project_stub import KINDS

pytestmark = [pytest.mark.e2e, pytest.mark.shell]

#: Kind -> what its evaluation measures.
MEASURED = {"classification": "test/accuracy", "regression": "test/rmse:min", "text": "test/perplexity:min"}


def make_images(folder: Path) -> Path:
    """Images of several sizes, in grey and in colour."""
    random = np.random.default_rng(0)
    for number in range(60):
        shape = (10 + number, 20) if number % 3 else (12, 10 + number, 3)
        path = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=shape, dtype=np.uint8)).save(path)
    return folder


def make_table(folder: Path) -> Path:
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["x1", "x2", "y"])
        rows.writerows([number, number % 7, 2 * number + number % 7] for number in range(200))
    return folder / "table.csv"


def make_texts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "numbers.txt").write_text(" ".join(map(str, range(5000))))
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with a stack that runs, and data for each kind."""
    folder = tmp_path_factory.mktemp("stubs")
    make_images(folder / "images")
    make_table(folder)
    make_texts(folder / "texts")
    reader = Reader(folder, Path(sys.executable).parent)
    reader.run("trainbus up -d")
    yield reader
    reader.run("trainbus down")


def submit(reader: Reader, kind: str, data: str) -> str:
    """Write a stub, submit it as its README says, and return what that prints."""
    reader.run(f"trainbus init {kind} --kind {kind}")
    [command] = re.findall(r"^trainbus submit .*DATA.*$", (reader.folder / kind / "README.md").read_text(), re.M)
    command = command.replace("DATA", shlex.quote(f"../{data}"))
    if kind in MEASURED:
        command += f" --model {kind} --evaluate {MEASURED[kind]}"
    return reader.run(f"cd {kind}\n{command}")


@pytest.mark.parametrize(
    ("kind", "data"), [("classification", "images"), ("regression", "table.csv"), ("text", "texts")]
)
def test_a_task_trains_and_is_promoted(reader: Reader, kind: str, data: str) -> None:
    output = submit(reader, kind, data)
    assert f"promoted to champion: {kind} version 1" in output
    assert "note:" not in output
    assert "not all was checked" not in output


def test_a_script_trains_and_goes_on(reader: Reader) -> None:
    assert "epoch 10 loss" in submit(reader, "script", "table.csv")
    resumed = json.loads(reader.run('trainbus resume script --command "python train.py --epochs 12" --json'))
    output = reader.run(f"trainbus attach {resumed['run_id']}")
    assert "epoch 12 loss" in output
    assert "epoch 10 loss" not in output
    reader.run("trainbus fetch script kept")
    assert (reader.folder / "kept" / "checkpoint.pt").exists()


def test_every_kind_is_trained() -> None:
    assert {*MEASURED, "script"} == set(KINDS)
