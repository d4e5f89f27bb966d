"""Copies of one state that drift apart: found, named, and never committed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from contracts.ranks import JOURNAL_LINE, CheckpointLine, EndedLine
from tests.trainbus.support import Warm, exact_dataset, write_exact_code
from tests.trainbus.test_checkpoint_memory import spec_of, start_run
from trainbus.data.dataset import Dataset
from trainbus.trainer.drift import CHECK_EVERY_STEPS, checksum, find_drifted

CPU = torch.device("cpu")
#: Flips one bit of one weight of rank 1, after step 6.
FLIPPING_TASK = """
import os

import torch

import exact_tasks


class FlippingTask(exact_tasks.CNN):
    def optimizer(self, model):
        self.step, self.weights = 0, list(model.parameters())
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.step += 1
        if self.step == 6 and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.weights[0].view(-1).view(torch.uint8)[6] ^= 16  # rounding would take back less
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("drift") / "data")


@pytest.mark.shell
@pytest.mark.parametrize("found_by", ["checkpoint", "interval"])
@pytest.mark.parametrize("logical_ranks", [6, None], ids=["exact", "fast"])
def test_a_rank_with_one_other_bit_is_named_and_not_committed(
    warm: Warm, tmp_path: Path, dataset: Dataset, logical_ranks: int | None, found_by: str
) -> None:
    code = write_exact_code(tmp_path / "code", flipping_task=FLIPPING_TASK)
    at = [5, 9] if found_by == "checkpoint" else [5]
    never = 10_000
    spec = spec_of(logical_ranks=logical_ranks, epochs=100, checkpoint_at_steps=at, validate_every_steps=never)
    spec = spec.model_copy(update={"task": "flipping_task:FlippingTask"})
    folder = tmp_path / "g1"
    gang = start_run(warm, folder, dataset, 3, 1, tmp_path / "memory", spec, code)
    assert gang.wait() == [1] * 3, gang.logs()
    step = 9 if found_by == "checkpoint" else CHECK_EVERY_STEPS
    for rank in range(3):
        lines = [JOURNAL_LINE.validate_json(line) for line in (folder / f"rank_{rank}.jsonl").read_text().splitlines()]
        ended = lines[-1]
        assert isinstance(ended, EndedLine)
        assert ended.drifted_ranks == (1,)
        assert ended.diverged
        assert f"that of rank 1 is not the others' after step {step}" in ended.error
        assert [line.step for line in lines if isinstance(line, CheckpointLine)] == [5]
    assert not list((tmp_path / "memory").rglob("*.safetensors"))


def test_every_flipped_bit_changes_the_checksum() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 3).bfloat16(), nn.Conv2d(3, 5, 3).double())
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [torch.tensor(7.0), torch.arange(11), torch.ones(3, dtype=torch.int8)]
    whole, generator = checksum(tensors, CPU), random.Random(0)
    for _ in range(200):
        index = generator.randrange(len(tensors))
        flipped = tensors[index].clone()
        memory = flipped.reshape(-1).view(torch.uint8)
        memory[generator.randrange(len(memory))] ^= 1 << generator.randrange(8)
        assert not torch.equal(checksum([*tensors[:index], flipped, *tensors[index + 1 :]], CPU), whole)


def test_the_checksum_is_of_values_and_places() -> None:
    rows = torch.randn(6, 10)
    whole = checksum([rows, rows + 1], CPU)
    assert torch.equal(checksum([rows.t().contiguous().t(), rows + 1], CPU), whole)  # however it lies in memory
    assert torch.equal(checksum([torch.cat([rows, rows])[6:], rows + 1], CPU), whole)
    assert not torch.equal(checksum([rows + 1, rows], CPU), whole)
    assert torch.equal(checksum([], CPU), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("checksums", "drifted"),
    [("aaaa", ()), ("abaa", (1,)), ("bbab", (2,)), ("ab", (0, 1)), ("aabb", (0, 1, 2, 3)), ("abc", (0, 1, 2))],
)
def test_the_majority_is_right(checksums: str, drifted: tuple[int, ...]) -> None:
    assert find_drifted([(float(ord(each)), 0.0) for each in checksums]) == drifted
