"""DeepSpeed on CPU: ZeRO stages 0 to 3 train what DDP trains, and a resize loses nothing."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from contracts.ranks import EndedLine
from contracts.spec.training import Training
from tests.trainbus.exact_gang import MODELS, Case, run_ranks
from tests.trainbus.live_bytes import LiveBytes
from tests.trainbus.support import (
    LINEAR_TASK,
    Gang,
    Warm,
    journal,
    linear_dataset,
    load_tensors,
    request,
    whole_checkpoint,
    write_launch,
    write_task,
)
from tests.trainbus.test_sharded_state import LAYER_BYTES, LAYERS, BatchNormModel, StackedTask, all_deferred  # noqa: F401
from trainbus.data.dataset import Dataset
from trainbus.trainer.checkpoint import find_weights
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.base import INITIAL_SCALE
from trainbus.trainer.strategies.partitioned_build import PartitionedBuild
from trainbus.trainer.world import World, seed_all

pytestmark = pytest.mark.shell

pytest.importorskip("deepspeed", reason="the extra trainbus[deepspeed] is not installed")


#: The loss is so large that gradients overflow in fp16 until its scale has gone down.
LOUD_TASK = f"""{LINEAR_TASK}

class Loud(Linear):
    def loss(self, model, batch):
        return super().loss(model, batch) * 1000
"""

#: The first layer is frozen; the second task makes it a parameter group of its own.
FROZEN_TASK = f"""{LINEAR_TASK}

class Frozen(Linear):
    def model(self):
        model = super().model()
        model[0].requires_grad_(False)
        return model

class FrozenGroup(Frozen):
    def optimizer(self, model):
        return torch.optim.AdamW([{{"params": model[0].parameters()}}, {{"params": model[3].parameters()}}], lr=self.lr)
"""

#: A mean over the samples of the first class, of which many micro-batches have none.
COUNTED_TASK = f"""{LINEAR_TASK}

class CountedLinear(Linear):
    def loss_weight(self, batch):
        return (batch[1] == 0).sum()

    def loss(self, model, batch):
        return super().loss(model, [part[batch[1] == 0] for part in batch])

    def metrics(self, model, batch):
        return {{}}
"""


def run(
    warm: Warm,
    folder: Path,
    dataset: Dataset,
    world_size: int,
    resume: Path | None = None,
    *,
    task: str = "task:Linear",
    source: str = LINEAR_TASK,
    **rules: Any,
) -> Path:
    """Train in processes of their own; return the last checkpoint's folder."""
    spec = request(training={"clip_norm": 0.5, **rules}, params={"lr": 0.01}, task=task)
    code = write_task(folder.parent / "code", source)
    launch = write_launch(folder, spec, dataset, code, world_size=world_size, resume_folder=resume)
    gang = Gang(warm, folder, launch, world_size)
    assert gang.wait() == [0] * world_size, gang.logs()[-3000:]
    return whole_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_matches_ddp_and_resumes_on_fewer_ranks(warm: Warm, tmp_path: Path, stage: int) -> None:
    """Uneven slices, accumulation and clipping; the second half on one rank, and stage 3 grows again."""
    dataset = linear_dataset(tmp_path / "data")
    deepspeed = {"strategy": "deepspeed", "zero_stage": stage, "accumulate": 2, "global_batch": 15}
    half = run(warm, tmp_path / "g1", dataset, 2, **deepspeed, epochs=None, max_steps=6)
    if stage == 3:
        half = run(warm, tmp_path / "g1b", dataset, 1, half, **deepspeed, epochs=None, max_steps=9)
    end = run(warm, tmp_path / "g2", dataset, 2 if stage == 3 else 1, half, **deepspeed, epochs=None, max_steps=12)
    model, optimizer = (load_tensors(end, kind) for kind in ("model", "optimizer"))
    reference = _reference(tmp_path / "ddp", dataset)
    for name, tensor in load_tensors(reference, "model").items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-3, atol=1e-5)
    for name, tensor in load_tensors(reference, "optimizer").items():
        torch.testing.assert_close(optimizer[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("stage", "task"), [(0, "Linear"), (2, "Linear"), (3, "Linear"), (3, "CountedLinear")])
def test_a_rank_without_samples(warm: Warm, tmp_path: Path, stage: int, task: str) -> None:
    """A micro-batch of some ranks is empty in each step, and a whole rank in the last."""
    dataset = linear_dataset(tmp_path / "data", train=23)
    rules = {"epochs": 1, "global_batch": 7, "accumulate": 3, "task": f"task:{task}", "source": COUNTED_TASK}
    end = run(warm, tmp_path / "g1", dataset, 3, strategy="deepspeed", zero_stage=stage, **rules)
    alone = run(warm, tmp_path / "alone", dataset, 1, **rules)
    model = load_tensors(end, "model")
    for name, tensor in load_tensors(alone, "model").items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fp16_has_a_loss_scale(warm: Warm, tmp_path: Path, stage: int) -> None:
    """Steps whose gradient overflows are skipped as under DDP, and the scale is saved."""
    dataset = linear_dataset(tmp_path / "data", train=160)
    rules = {"precision": "fp16", "epochs": 1, "task": "task:Loud", "source": LOUD_TASK}
    end = run(warm, tmp_path / "g1", dataset, 2, strategy="deepspeed", zero_stage=stage, **rules)
    whole = run(warm, tmp_path / "ddp", dataset, 2, **rules)
    saved, expected = (json.loads((folder / "state.json").read_text()) for folder in (end, whole))
    assert saved["scaler"] == expected["scaler"]
    assert saved["scaler"]["scale"] < INITIAL_SCALE
    model = load_tensors(end, "model")
    for name, tensor in load_tensors(whole, "model").items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters(warm: Warm, tmp_path: Path, stage: int) -> None:
    """They are saved, keep their values, and a checkpoint goes from one strategy to the other."""
    dataset = linear_dataset(tmp_path / "data")
    rules = {"task": "task:Frozen", "source": FROZEN_TASK, "epochs": None}
    deepspeed = {"strategy": "deepspeed", "zero_stage": stage}
    half = run(warm, tmp_path / "g1", dataset, 2, **deepspeed, **rules, max_steps=4)
    end = run(warm, tmp_path / "g2", dataset, 1, half, **rules, max_steps=8)
    whole = run(warm, tmp_path / "d1", dataset, 1, **rules, max_steps=4)
    whole = run(warm, tmp_path / "d2", dataset, 2, whole, **deepspeed, **rules, max_steps=8)
    first, model, expected = (load_tensors(folder, "model") for folder in (half, end, whole))
    assert torch.equal(model["0.weight"], first["0.weight"])
    assert model.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-3, atol=1e-5)


ZERO3 = {"strategy": "deepspeed", "zero_stage": 3, "logical_ranks": None}


@pytest.mark.usefixtures("all_deferred")
def test_stage_3_begins_with_the_bits_of_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied and frozen weights, and buffers; initial values and saved ones. The optimizer's groups are those of ddp."""
    models = ["gpt", "frozen", "normed"]
    monkeypatch.setitem(MODELS, "normed", BatchNormModel)
    torch.manual_seed(3)
    for model in models:
        saved = {name: tensor.clone() for name, tensor in MODELS[model]().state_dict().items()}
        (tmp_path / model).mkdir()
        save_file(saved, tmp_path / model / "model-0.safetensors")

    def work(rules: dict[str, Any], world: World) -> dict[str, Any]:
        monkeypatch.setenv("LOCAL_RANK", "0")
        found: dict[str, Any] = {}
        for model, is_saved in itertools.product(models, (False, True)):
            case = Case(model, rules=rules)
            seed_all(0, "model")
            find = partial(find_weights, tmp_path / model) if is_saved else lambda model: {}
            state = make_strategy(case, case.training(), world, find).state_entries()
            for entry in state.tensors:
                if entry.kind == "model" and (tensor := entry.fetch(0)()) is not None:
                    found[f"{model} {is_saved} {entry.name}"] = tensor
            found[f"{model} {is_saved} groups"] = state.groups
        return found

    [whole] = run_ranks(1, partial(work, {"strategy": "ddp"}))
    found, *_ = run_ranks(3, partial(work, ZERO3))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


class ListedTask(StackedTask):
    """Its model has a list of its weights, for the optimizer."""

    def model(self) -> nn.Module:
        model = super().model()
        model.listed = list(model.parameters())
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.listed)


@pytest.mark.usefixtures("all_deferred")
def test_stage_3_builds_with_memory_for_a_part_and_few_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(ListedTask().model().state_dict(), tmp_path / "model-0.safetensors")
    training = Training.model_validate({"max_steps": 1, **ZERO3})
    plain = PartitionedBuild.partition

    def work(world: World) -> list[int]:
        monkeypatch.setenv("LOCAL_RANK", "0")
        peaks: list[int] = []

        def partition(build: PartitionedBuild, *arguments: Any) -> None:
            plain(build, *arguments)
            # Behind it, DeepSpeed copies the rank's part, and makes a bucket for gradients of a size of its own.
            peaks.append(live.peak_bytes)

        monkeypatch.setattr(PartitionedBuild, "partition", partition)
        for find in (lambda model: {}, partial(find_weights, tmp_path)):
            with LiveBytes() as live:
                make_strategy(ListedTask(), training, world, find)
        return peaks

    part_bytes = LAYERS * LAYER_BYTES // 3
    for peaks in run_ranks(3, work):
        assert [part_bytes < peak_bytes <= part_bytes + 3 * LAYER_BYTES for peak_bytes in peaks] == [True, True]


def test_a_group_without_trained_parameters_is_refused(warm: Warm, tmp_path: Path) -> None:
    dataset = linear_dataset(tmp_path / "data")
    spec = request(training={"strategy": "deepspeed", "zero_stage": 1}, task="task:FrozenGroup")
    launch = write_launch(tmp_path / "g1", spec, dataset, write_task(tmp_path / "code", FROZEN_TASK))
    assert Gang(warm, tmp_path / "g1", launch, 1).wait() == [1]
    line = journal(tmp_path / "g1")[-1]
    assert isinstance(line, EndedLine)
    assert "parameter group 0 has no trained parameter" in line.error


def _reference(folder: Path, dataset: Dataset) -> Path:
    """The same twelve steps in one process with DDP, in the two halves in which the others take them."""
    from tests.trainbus.test_trainer import Linear, checkpoints, train

    rules = {"global_batch": 15, "epochs": None, "clip_norm": 0.5}
    train(folder / "g1", dataset, Linear(lr=0.01), **rules, max_steps=6)
    half = Path(checkpoints(folder / "g1")[-1].folder)
    train(folder / "g2", dataset, Linear(lr=0.01), **rules, max_steps=12, resume_folder=half)
    return Path(checkpoints(folder / "g2")[-1].folder)


def test_without_deepspeed_the_error_names_the_extra(warm: Warm, tmp_path: Path) -> None:
    dataset = linear_dataset(tmp_path / "data")
    folder = tmp_path / "g1"
    code = write_task(tmp_path / "code")
    # A module of that name that cannot be imported stands for a node without the package.
    missing = "raise ModuleNotFoundError(\"No module named 'deepspeed'\", name='deepspeed')"
    (code / "deepspeed.py").write_text(missing)
    launch = write_launch(folder, request(training={"strategy": "deepspeed"}), dataset, code)
    assert Gang(warm, folder, launch, 1).wait() == [1]
    line = journal(folder)[-1]
    assert isinstance(line, EndedLine)
    assert "pip install 'trainbus[deepspeed]'" in line.error
