"""Training that begins with a checkpoint's weights: what is taken, what is left as it is, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contracts.ranks import CheckpointLine, EndedLine, StartedLine
from contracts.spec.training import Training
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
from trainbus.data.dataset import Dataset
from trainbus.task import Task
from trainbus.trainer.checkpoint import CheckpointError, find_initial_weights
from trainbus.trainer.checkpoint.weights import load_weights
from trainbus.trainer.optimizer_state import StateMismatch
from trainbus.trainer.start_point import InitialWeights, StartPoint
from trainbus.trainer.step_data import TrainingData
from trainbus.trainer.trainer import Trainer, TrainerSettings
from trainbus.trainer.world import World, limit_threads

pytestmark = pytest.mark.shell

#: The same body as that task's under a head of another size.
SOURCE = (
    LINEAR_TASK
    + """

class OtherHead(Linear):
    def model(self):
        return nn.Sequential(*list(super().model())[:-1], nn.Linear(self.width, 5))
"""
)
namespace: dict[str, Any] = {}
exec(SOURCE, namespace)  # noqa: S102  (the same source that the rank processes import)
Linear, OtherHead = namespace["Linear"], namespace["OtherHead"]
HEAD = ("3.*",)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    limit_threads({})


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return linear_dataset(tmp_path / "data")


def train(folder: Path, dataset: Dataset, task: Task, **options: Any) -> Path:
    """Train; return the last checkpoint's folder."""
    places = {name: options.pop(name) for name in ("init", "resume_folder") if name in options}
    training = Training.model_validate({"epochs": 1, "global_batch": 16, **options})
    data, settings = TrainingData(task, dataset, training), TrainerSettings(folder, about={"run_id": folder.name})
    Trainer(task, data, training, settings, start=StartPoint(World(), run_id=folder.name, **places)).fit()
    return Path([line for line in journal(folder) if isinstance(line, CheckpointLine)][-1].folder)


def load_initial_weights(folder: Path, model: nn.Module, exclude: tuple[str, ...] = ()) -> None:
    load_weights(find_initial_weights(folder, model, exclude), model)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def part(tensors: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(start)}


def test_init_from_loads_weights_and_nothing_else(dataset: Dataset, tmp_path: Path) -> None:
    base = train(tmp_path / "base", dataset, Linear())
    other = linear_dataset(tmp_path / "other", train=70)
    rules: dict[str, Any] = {"epochs": None, "max_steps": 1, "seed": 7}
    still = OtherHead(lr=0.0)
    tuned = train(tmp_path / "tuned", other, still, init=InitialWeights(base, HEAD), **rules)

    state = json.loads((tuned / "state.json").read_text())
    assert (state["step"], state["samples_consumed"]) == (1, 16)
    [started] = [line for line in journal(tmp_path / "tuned") if isinstance(line, StartedLine)]
    assert (started.step, started.resumed_from) == (0, "scratch")
    loaded, weights = load_tensors(tuned, "model"), load_tensors(base, "model")
    assert same(part(loaded, "0."), part(weights, "0."))
    # The head is the one that training without a checkpoint begins with: a function of the seed alone.
    scratch = load_tensors(train(tmp_path / "scratch", other, still, **rules), "model")
    assert same(part(loaded, "3."), part(scratch, "3."))
    assert not same(part(loaded, "0."), part(scratch, "0."))


def test_a_resumed_run_does_not_load_initial_weights_again(dataset: Dataset, tmp_path: Path) -> None:
    base = train(tmp_path / "base", dataset, Linear())
    rules: dict[str, Any] = {"epochs": None, "checkpoint_every_steps": 3}
    whole = train(tmp_path / "whole", dataset, OtherHead(), init=InitialWeights(base, HEAD), max_steps=8, **rules)
    half = tmp_path / "whole" / "checkpoints" / "step_00000003-rank_0"
    shutil.rmtree(base)
    again = train(
        tmp_path / "again",
        dataset,
        OtherHead(),
        resume_folder=half,
        init=InitialWeights(base, HEAD),
        max_steps=8,
        **rules,
    )
    assert (again / "digests-0.json").read_bytes() == (whole / "digests-0.json").read_bytes()


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, exact": {"logical_ranks": 4, "ema_decay": 0.9},
    "zero1, exact": {"strategy": "zero1", "logical_ranks": 4, "ema_decay": 0.9},
    "fsdp2": {"strategy": "fsdp2", "ema_decay": 0.9},
    "fsdp2, exact": {"strategy": "fsdp2", "logical_ranks": 4, "ema_decay": 0.9},
    "deepspeed 0": {"strategy": "deepspeed", "zero_stage": 0},
    "deepspeed 3": {"strategy": "deepspeed", "zero_stage": 3},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_loads_initial_weights(warm: Warm, dataset: Dataset, tmp_path: Path, name: str) -> None:
    """And so does the moving average; in exact mode the result is the same for any number of ranks."""
    if "deepspeed" in name:
        pytest.importorskip("deepspeed", reason="the extra trainbus[deepspeed] is not installed")
    base = train(tmp_path / "base", dataset, Linear())
    code = write_task(tmp_path / "code", SOURCE)

    def run(lr: float, world_size: int) -> Path:
        folder = tmp_path / f"lr{lr}w{world_size}"
        training = {"epochs": None, "max_steps": 3, **STRATEGIES[name]}
        uri = "s3://models/base.json"
        spec = request(
            task="task:OtherHead", params={"lr": lr}, training=training, init_from=uri, init_exclude=list(HEAD)
        )
        launch = write_launch(folder, spec, dataset, code, world_size=world_size, init_folder=base)
        gang = Gang(warm, folder, launch, world_size)
        assert gang.wait() == [0] * world_size, gang.logs()[-3000:]
        return whole_checkpoint(folder)

    still = run(0.0, 2)
    weights = part(load_tensors(base, "model"), "0.")
    assert same(part(load_tensors(still, "model"), "0."), weights)
    if "ema_decay" in STRATEGIES[name]:
        # It takes in equal weights in each step, which rounds.
        torch.testing.assert_close(part(load_tensors(still, "ema"), "0."), weights)
    assert json.loads((still / "state.json").read_text())["about"]["init_from"] == "s3://models/base.json"
    if "exact" in name:
        one, two = (run(0.05, world_size) for world_size in (1, 2))
        for kind in ("model", "optimizer", "ema"):
            assert same(load_tensors(one, kind), load_tensors(two, kind))


def test_a_mismatch_is_a_permanent_failure(warm: Warm, dataset: Dataset, tmp_path: Path) -> None:
    base = train(tmp_path / "base", dataset, Linear())
    code, folder = write_task(tmp_path / "code", SOURCE), tmp_path / "g1"
    spec = request(task="task:OtherHead", init_from="s3://models/base.json")
    gang = Gang(warm, folder, write_launch(folder, spec, dataset, code, init_folder=base), 1)
    assert gang.wait() == [1], gang.logs()
    ended = next(line for line in journal(folder) if isinstance(line, EndedLine))
    assert ended.permanent
    assert 'set init_exclude to ["3.*"]' in ended.error


def test_initial_weights_are_the_checkpoints_moving_average(dataset: Dataset, tmp_path: Path) -> None:
    base = train(tmp_path / "base", dataset, Linear(), ema_decay=0.5)
    averages = load_tensors(base, "ema")
    assert not same(averages, load_tensors(base, "model"))
    model = Linear().model()
    load_initial_weights(base, model)
    assert same(dict(model.state_dict()), averages)


def saved(folder: Path, model: nn.Module) -> Path:
    """A checkpoint that holds just this model."""
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model-0.safetensors")
    return folder


class Net(nn.Module):
    """A body, a head of ``classes``, and the other given modules."""

    def __init__(self, classes: int = 3, **more: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, classes)
        for name, module in more.items():
            setattr(self, name, module)


#: (the model, the excluded patterns, the error)
MISFITS: dict[str, tuple[nn.Module, tuple[str, ...], tuple[str, ...]]] = {
    "another head": (
        Net(5),
        (),
        (
            "init_from does not fit the model: ",
            "'head.weight' is (3, 8) float32 in the checkpoint, (5, 8) float32 in the model",
            'set init_exclude to ["head.*"]',
        ),
    ),
    "more in the model": (
        Net(extra=nn.Linear(8, 2)),
        (),
        ("'extra.bias' (2,) float32 is in the model alone", '["extra.*"]'),
    ),
    "less in the model": (
        nn.ModuleDict({"body": Net().body}),
        (),
        ("'head.weight' (3, 8) float32 is in the checkpoint alone", '["head.*"]'),
    ),
    "one tensor of a module": (
        Net(body=nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))),
        (),
        ("'body.0.bias' (8,) float32 is in the checkpoint alone. If", '["body.0.bias"]'),
    ),
    "more than is excluded": (Net(5, extra=nn.Linear(8, 2)), ("extra.*",), ('["extra.*", "head.*"]',)),
    "a misspelt pattern": (Net(5), ("hed.*",), ("'hed.*' matches no tensor", "there are body.*, head.*")),
    "nothing left": (Net(5), ("*",), ("leaves nothing of the checkpoint",)),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_mismatch_names_the_tensors_and_the_setting(tmp_path: Path, case: str) -> None:
    model, exclude, expected = MISFITS[case]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StateMismatch) as raised:
        load_initial_weights(saved(tmp_path / "base", Net()), model, exclude)
    for words in expected:
        assert words in str(raised.value)
    assert same(before, dict(model.state_dict()))


def test_patterns_match_both_sides_and_types_are_converted(tmp_path: Path) -> None:
    base, model = Net(old=nn.Linear(2, 2)), Net(5, new=nn.Linear(3, 3)).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_initial_weights(saved(tmp_path / "base", base), model, ("head.*", "old.*", "new.*"))
    after = dict(model.state_dict())
    for start in ("head.", "new."):
        assert same(part(after, start), part(before, start))
    assert torch.equal(after["body.0.weight"], base.body[0].weight.to(torch.bfloat16))
    assert {tensor.dtype for tensor in part(after, "body.0").values()} == {torch.bfloat16}


def test_tied_weights_load_the_average_once(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    folder = saved(tmp_path / "base", tied())
    save_file({"embedding.weight": torch.ones(4, 3)}, folder / "ema-0.safetensors")
    model = tied()
    load_initial_weights(folder, model)
    assert model["head"].weight is model["embedding"].weight
    assert torch.equal(model["head"].weight, torch.ones(4, 3))


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", Net())
    assert load_file(folder / "model-0.safetensors").keys() == Net().state_dict().keys()
    (folder / "model.pt").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="neither safetensors nor JSON"):
        load_initial_weights(folder, Net())
