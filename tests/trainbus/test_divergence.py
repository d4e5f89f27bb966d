"""Training that diverges leaves nothing poisoned to whatever begins after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contracts.ranks import JOURNAL_LINE, CheckpointLine, EndedLine
from tests.trainbus.support import Warm, exact_dataset, write_exact_code
from tests.trainbus.test_checkpoint_memory import spec_of, start_run
from trainbus.data.dataset import Dataset
from trainbus.trainer.divergence import BLOCK_ELEMENTS, TrainingDiverged, check_finite, is_finite

#: Diverges after step 7, in the way that DIVERGES names.
DIVERGING_TASK = """
import os

import torch

import exact_tasks


class DivergingTask(exact_tasks.CNN):
    def optimizer(self, model):
        self.step, self.weights = 0, list(model.parameters())
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.step += 1
        if self.step == 7 and os.environ["DIVERGES"] == "weights":
            with torch.no_grad():  # the least that is not finite, of which no loss tells before the next step
                self.weights[-1].view(-1)[0] = float("nan")

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss * float("nan") if self.step == 7 and os.environ["DIVERGES"] == "loss" else loss
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("divergence") / "data")


@pytest.mark.shell
@pytest.mark.parametrize("cause", ["loss", "weights"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_that_is_not_finite_is_kept(
    warm: Warm, tmp_path: Path, dataset: Dataset, world_size: int, cause: str
) -> None:
    memory = tmp_path / "memory"
    code = write_exact_code(tmp_path / "code", diverging_task=DIVERGING_TASK)
    spec = spec_of(checkpoint_at_steps=[5, 7]).model_copy(update={"task": "diverging_task:DivergingTask"})
    folder = tmp_path / "g1"
    gang = start_run(warm, folder, dataset, world_size, 1, memory, spec, code, DIVERGES=cause)
    assert gang.wait() == [1] * world_size, gang.logs()

    kept = [*memory.rglob("*.safetensors"), *folder.rglob("*.safetensors")]
    assert kept
    for path in kept:
        assert all(is_finite(tensor) for tensor in load_file(path).values()), path
    checkpoints = []
    for rank in range(world_size):
        lines = [JOURNAL_LINE.validate_json(line) for line in (folder / f"rank_{rank}.jsonl").read_text().splitlines()]
        assert isinstance(lines[-1], EndedLine)
        assert lines[-1].diverged, gang.logs()
        checkpoints.append({line.step for line in lines if isinstance(line, CheckpointLine)})
    if cause == "weights":  # another rank may have written its part of that step, which alone is nothing
        assert 7 not in set.intersection(*checkpoints)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_one_element_is_enough(dtype: torch.dtype) -> None:
    tensor = torch.ones(BLOCK_ELEMENTS + 3).to(dtype)
    assert is_finite(tensor)
    tensor[-1] = torch.tensor(float("nan")).to(dtype)
    assert not is_finite(tensor)


def test_finite_numbers_whose_sum_is_not_are_finite() -> None:
    assert is_finite(torch.full((10,), 3e38))
    assert is_finite(torch.full((10,), 60_000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))


def test_a_buffer_may_hold_infinity() -> None:
    files = {"model-0.safetensors": {"mask": torch.full((2,), -float("inf")), "weight": torch.ones(2)}}
    check_finite(files, {"weight"}, 3)
    with pytest.raises(TrainingDiverged, match=r"step 3 is not finite \(optimizer/weight/exp_avg\)"):
        check_finite({"optimizer-0.safetensors": {"weight/exp_avg": torch.tensor([float("nan")])}}, {"weight"}, 3)
