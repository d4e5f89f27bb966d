"""The loader in a loop of one's own: resumed and resized, with the documentation's example."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data import shards
from trainbus.data import Dataset, Loader, open_dataset

pytestmark = pytest.mark.shell

DOCS = Path(__file__).parents[2] / "docs/reading.md"
COUNT = 137


def decode(sample: dict[str, bytes]) -> torch.Tensor:
    return torch.tensor(list(sample["bin"][:4]))


def png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return shards.write(tmp_path, {"train": shards.fixed(COUNT)}, per_shard=13)


def loop(loaders: list[Loader], steps: int | None = None) -> list[str]:
    """Return the samples that all ranks together train on in ``steps`` steps."""
    keys: list[str] = []
    for number, ranks in enumerate(zip(*loaders, strict=True), start=1):
        keys += [key for rank in ranks for key in rank.keys]
        for rank in ranks:
            assert (rank.batch is None) == (rank.samples == 0)
            assert rank.batch is None or len(rank.batch) == rank.samples
        if number == steps:
            break
    return keys


def test_resizing_in_mid_epoch_loses_and_repeats_no_sample(dataset: Dataset) -> None:
    alone = loop([Loader(dataset, decode, batch=1, epochs=2, seed=3)])
    assert sorted(alone[:COUNT]) == sorted(alone[COUNT:]) == [f"s{i:05d}" for i in range(COUNT)]

    trained: list[str] = []
    state: dict[str, Any] | None = None
    for world_size, batch, workers, steps in ((4, 10, 0, 5), (3, 10, 1, 4), (7, 22, 0, 4), (2, 5, 2, None)):
        loaders = [
            Loader(dataset, decode, batch=batch, epochs=2, seed=3, rank=rank, world_size=world_size, workers=workers)
            for rank in range(world_size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        before = 0 if state is None else state["samples_consumed"]
        now = loop(loaders, steps)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        for loader in loaders:
            loader.close()
        state = states[0]
        assert all(other == state for other in states)
        assert len(json.dumps(state)) < 1024
        # A batch lays its samples out by lanes; which ones they are is the order's word alone.
        for start in range(before, state["samples_consumed"], batch):
            stop = min(start + batch, 2 * COUNT)
            assert sorted(now[start - before : stop - before]) == sorted(alone[start:stop])
        trained += now
    assert len(trained) == 2 * COUNT
    assert state is not None
    assert state["samples_consumed"] == 2 * COUNT


@pytest.mark.parametrize("change", [{"seed": 4}, {"lanes": 3}, {"window": 1}])
def test_another_order_is_refused(dataset: Dataset, change: dict[str, int]) -> None:
    state = Loader(dataset, decode, batch=8).state_dict()
    with pytest.raises(ValueError, match=re.escape(next(iter(change)))):
        Loader(dataset, decode, batch=8, **change).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"rank": 2, "world_size": 2}, {"batch": 0}])
def test_invalid_arguments_are_refused(dataset: Dataset, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"rank|batch"):
        Loader(dataset, decode, **{"batch": 8, **wrong})  # type: ignore[arg-type]


def test_the_documented_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of code in docs/reading.md, as it stands there."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (8, 8), np.uint8) for _ in range(200)]
    samples = [(f"s{i}", {"png": png(image), "cls": b"%d" % (image[0, 0] > 127)}) for i, image in enumerate(images)]
    shards.write(tmp_path / "my-dataset", {"train": samples})
    (found,) = re.findall(r"```python\n(from trainbus\.data import .*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(found)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "example.py"))
    state = torch.load(tmp_path / "state.pt")
    assert state["loader"]["samples_consumed"] == 2 * 200
    runpy.run_path(str(tmp_path / "example.py"))  # resumes at the end: nothing is left to do


def test_a_script_that_stops_early_exits_cleanly(dataset: Dataset) -> None:
    script = (
        "import torch\n"
        "from trainbus.data import Loader, open_dataset\n"
        "def decode(sample):\n"
        "    torch.randn(2_000_000).sort()  # in C++, without the interpreter's lock, when the script ends\n"
        "    return 0\n"
        f"for step in Loader(open_dataset({str(dataset.folder)!r}), decode, batch=4):\n"
        "    break\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_needs_no_bus_and_the_order_no_torch() -> None:
    code = (
        "import sys\nfrom trainbus.data.reader import SplitReader\nfrom trainbus.data.read_plan import ReadPlan\n"
        "from trainbus.data.dataset import Dataset\nassert 'torch' not in sys.modules\n"
        "from trainbus.data import Loader\nassert not {'nats', 'services'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_id_that_is_not_the_folders_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    assert open_dataset(str(tmp_path), dataset.dataset_id).dataset_id == dataset.dataset_id
    with pytest.raises(Exception, match="not ffffffffffff"):
        open_dataset(tmp_path, "f" * 64)
