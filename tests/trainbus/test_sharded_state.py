"""A sharded model is built, loaded, saved and measured in shards: the same bits, and a rank holds only its part."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from multiprocessing import Array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from contracts.predictions import Predictions
from contracts.ranks import Launch
from contracts.spec.training import Training
from tests.trainbus.exact_gang import MODELS, Case, Gpt, gang, run_ranks, train
from tests.trainbus.live_bytes import LiveBytes
from tests.trainbus.support import linear_dataset, request
from tests.trainbus.test_evaluate import EightNumbers
from trainbus.agent_link.channels import Journal
from trainbus.evaluation import evaluate as evaluation
from trainbus.task import Task
from trainbus.trainer import strategies
from trainbus.trainer.checkpoint import Progress, find_initial_weights, find_weights, open_tensors
from trainbus.trainer.checkpoint_manager import CheckpointManager
from trainbus.trainer.deferred_model import DeferredModel, build_deferred
from trainbus.trainer.optimizer_state import OptimizerState
from trainbus.trainer.readable_tensor import ReadableTensor
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.fsdp2 import MAX_PENDING, FSDP2Strategy, shard_model
from trainbus.trainer.survivor_state import SurvivorStore
from trainbus.trainer.training_state import State
from trainbus.trainer.world import World, seed_all


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def build_all_deferred(build: Callable[[], nn.Module]) -> DeferredModel:
    """Defer every parameter, however small."""
    model = build_deferred(build, min_bytes=1)
    assert all(map(model.is_deferred, model.module.parameters())), model.fallback_reason
    return model


@pytest.fixture
def all_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "build_deferred", build_all_deferred)


class BatchNormModel(nn.Sequential):
    """Buffers, and rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 31), nn.BatchNorm1d(31), nn.ReLU(), nn.Linear(31, 10))


DDP, FSDP2 = {"strategy": "ddp"}, {"strategy": "fsdp2"}


@pytest.mark.usefixtures("all_deferred")
@pytest.mark.parametrize("model", ["mlp", "normed", "gpt", "frozen"])
def test_sharding_changes_no_bit(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """From the initial values on; to another number of ranks, from ddp to fsdp2, and back."""
    monkeypatch.setitem(MODELS, "normed", BatchNormModel)
    undisturbed = gang(Case(model, rules=DDP), 1, range(3))
    for first, second in (((FSDP2, 3), (DDP, 2)), ((DDP, 1), (FSDP2, 2)), ((FSDP2, 2), (FSDP2, 3))):
        middle = gang(Case(model, rules=first[0]), first[1], range(1))
        end = gang(Case(model, rules=second[0]), second[1], range(1, 3), middle.state)
        assert end.digest == undisturbed.digest


def write(folder: Path, state: State[Tensor]) -> Path:
    """Write a state's tensors as two ranks would."""
    for kind, tensors in state.tensors.items():
        names = sorted(tensors)
        for rank in range(2):
            part = {name: tensors[name].contiguous() for name in names[rank::2]}
            save_file(part, folder / f"{kind}-{rank}.safetensors")
    return folder


def load(folder: Path, like: State[Tensor]) -> State[ReadableTensor]:
    optimizer = OptimizerState(open_tensors(folder, "optimizer"), like.optimizer.values, like.optimizer.groups)
    return State(open_tensors(folder, "model"), optimizer)


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bytes that each rank has read of tensors, by rank."""
    counts, plain = Array("q", 4), os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        size_bytes = plain(fd, buffers, offset)
        counts[dist.get_rank()] += size_bytes
        return size_bytes

    monkeypatch.setattr(os, "preadv", counted)
    return counts


@pytest.mark.usefixtures("all_deferred")
def test_a_rank_reads_its_rows_alone(tmp_path: Path, read_bytes: Any) -> None:
    """Of weights, of which tied ones once, and of the optimizer's state."""
    case = Case("gpt", rules=FSDP2)
    before = gang(Case("gpt", rules=DDP), 1, range(1)).state
    write(tmp_path, before)

    def work(world: World) -> int:
        strategy, _ = train(case, world, range(0), load(tmp_path, before))
        return sum(parameter.to_local().nbytes for parameter in strategy.model.parameters())

    shards = run_ranks(3, work)
    steps = [tensor for tensor in before.optimizer.tensors.values() if not tensor.ndim]
    # Adam's state has the shape of the weights, twice.
    assert list(read_bytes)[:3] == [3 * size_bytes + 4 * len(steps) for size_bytes in shards]
    tied = before.model["head.weight"].nbytes
    assert sum(shards) == sum(tensor.nbytes for tensor in before.model.values()) - tied


def test_a_rank_of_zero1_reads_the_optimizer_state_of_its_pieces(tmp_path: Path, read_bytes: Any) -> None:
    case = Case("mlp", rules={"strategy": "zero1"})
    before = gang(Case("mlp", rules=DDP), 1, range(1)).state
    write(tmp_path, before)
    run_ranks(3, lambda world: train(case, world, range(0), load(tmp_path, before)) and None)
    weights = sum(tensor.nbytes for tensor in before.model.values())
    moments = [tensor.nbytes for tensor in before.optimizer.tensors.values() if tensor.ndim]
    read = [size_bytes - weights for size_bytes in list(read_bytes)[:3]]
    # Its pieces are whole rows; each piece has a count of steps of its own.
    assert 0 <= sum(read) - sum(moments) < 100
    assert max(read) < sum(moments)


LAYERS, WIDTH = 12, 128
LAYER_BYTES = 4 * WIDTH * WIDTH


class StackedTask(Task):
    """Many weights of one size, in blocks."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)]) for _ in range(LAYERS)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        for (layer,) in model:
            batch = layer(batch)
        return batch.mean()


@pytest.mark.usefixtures("all_deferred")
@pytest.mark.parametrize("source", ["initial values", "checkpoint"])
def test_building_takes_memory_for_the_shards_and_few_tensors(tmp_path: Path, source: str) -> None:
    torch.manual_seed(0)
    saved = StackedTask().model().state_dict()
    save_file(saved, tmp_path / "model-0.safetensors")
    find = partial(find_weights, tmp_path) if source == "checkpoint" else lambda model: {}
    training = Training.model_validate({"max_steps": 1, **FSDP2})

    def work(world: World) -> tuple[int, dict[str, Tensor]]:
        torch.manual_seed(0)
        with LiveBytes() as live:
            strategy = make_strategy(StackedTask(), training, world, find)
        return live.peak_bytes, {name: p.to_local() for name, p in strategy.model.named_parameters()}

    world_size = 4
    found = run_ranks(world_size, work)
    for name, tensor in saved.items():
        assert torch.equal(torch.cat([shards[name] for _, shards in found]), tensor)
    for peak_bytes, _ in found:
        assert peak_bytes <= LAYERS * LAYER_BYTES / world_size + 2 * LAYER_BYTES


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1"])
def test_saving_takes_memory_for_the_share_and_few_tensors(tmp_path: Path, strategy: str) -> None:
    """The buffers hold the share; what other ranks send is freed as soon as it is copied there."""
    training = Training.model_validate({"max_steps": 1, "strategy": strategy, "logical_ranks": 2})

    def work(world: World) -> tuple[int, int]:
        seed_all(0, "model")
        strategy = make_strategy(StackedTask(), training, world)
        strategy.begin_step(has_empty=False)
        for leaf in strategy.leaves:
            strategy.backward(torch.ones(2, WIDTH), 0.5, leaf=leaf, first=True, last=True)
        strategy.step(None)
        manager = CheckpointManager(
            tmp_path,
            strategy,
            training,
            world=world,
            journal=Journal(tmp_path / f"rank_{world.rank}.jsonl"),
            exactness="exact",
            survivors=SurvivorStore(),
        )
        with LiveBytes() as live:
            manager.prepare(None)
            prepared_bytes = live.peak_bytes
            manager.save(Progress(1), epoch=0, ema=None, metrics={}, last=True)
        manager.wait_for_writes()
        return prepared_bytes, live.peak_bytes

    for prepared_bytes, peak_bytes in run_ranks(2, work):
        assert prepared_bytes < LAYER_BYTES
        assert LAYER_BYTES <= peak_bytes <= 2 * LAYER_BYTES
    saved = {kind: {} for kind in ("model", "optimizer")}
    for folder in tmp_path.glob("step_*"):
        sizes = {}
        for kind, tensors in saved.items():
            opened = open_tensors(folder, kind)
            sizes[kind] = sum(tensor.read().nbytes for tensor in opened.values())
            tensors |= opened
        assert sum(sizes.values()) >= LAYERS * LAYER_BYTES
    assert len(saved["model"]) == LAYERS
    assert len(saved["optimizer"]) == 3 * LAYERS


def test_an_exact_step_takes_memory_for_few_gradients() -> None:
    """Exchanges are finished while others begin, and share their buffers."""
    training = Training.model_validate({"max_steps": 1, **FSDP2, "logical_ranks": 4})

    def work(world: World) -> int:
        strategy = make_strategy(StackedTask(), training, world)
        assert isinstance(strategy, FSDP2Strategy)
        for _ in range(3):
            strategy.begin_step(has_empty=False)
            for leaf in strategy.leaves:
                strategy.backward(torch.ones(2, WIDTH), 0.25, leaf=leaf, first=True, last=True)
            strategy.step(None)
        return strategy._backward.pool.size_bytes

    for size_bytes in run_ranks(4, work):
        # Of each exchange under way, and of the one that begins: the gradient of a block, and the other ranks' sums.
        assert LAYER_BYTES < size_bytes <= (MAX_PENDING + 1) * 2 * LAYER_BYTES


@pytest.mark.usefixtures("all_deferred")
def test_initial_weights_in_shards(tmp_path: Path) -> None:
    """What is excluded keeps its initial values; a tied weight has the average."""
    torch.manual_seed(3)
    base = Gpt()
    averages = {"embedding.weight": torch.full_like(base.embedding.weight, 0.25)}
    save_file({name: tensor.clone() for name, tensor in base.state_dict().items()}, tmp_path / "model-0.safetensors")
    save_file(averages, tmp_path / "ema-0.safetensors")
    find = partial(find_initial_weights, tmp_path, exclude=("blocks.1.*",))

    def work(rules: dict[str, Any], world: World) -> dict[str, Tensor]:
        case = Case("gpt", rules=rules)
        seed_all(0, "model")
        strategy = make_strategy(case, case.training(), world, find)
        tied = strategy.model.head.weight is strategy.model.embedding.weight
        assert tied
        return {name: p.full_tensor() if rules is FSDP2 else p.detach() for name, p in parameters(strategy.model)}

    [whole] = run_ranks(1, partial(work, DDP))
    for sharded in run_ranks(3, partial(work, FSDP2)):
        assert sharded.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(sharded[name], tensor), name
    assert torch.equal(whole["embedding.weight"], averages["embedding.weight"])
    assert torch.equal(whole["blocks.0.linear1.weight"], base.blocks[0].linear1.weight)
    assert not torch.equal(whole["blocks.1.linear1.weight"], base.blocks[1].linear1.weight)


def parameters(model: nn.Module) -> Any:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


@pytest.mark.usefixtures("all_deferred")
def test_a_sharded_model_measures_what_a_whole_one_does(tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = Gpt().eval()
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    save_file(state, tmp_path / "model-0.safetensors")
    batch = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(0))

    def work(world: World) -> Tensor:
        find = partial(find_weights, tmp_path, averaged=True)
        model = shard_model(Case("gpt"), build_all_deferred(Gpt), world, find, reshard_after_forward=True)
        with torch.no_grad():
            return model.eval()(batch)  # type: ignore[no-any-return]

    [alone] = run_ranks(1, work)
    with torch.no_grad():
        torch.testing.assert_close(alone, whole(batch))  # torch has a kernel of its own for a layer that is not sharded
    for found in run_ranks(3, work):
        assert torch.equal(found, alone)


def test_evaluation_in_shards_equals_that_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "build_deferred", build_all_deferred)
    dataset = linear_dataset(tmp_path / "data")
    task = EightNumbers("regression", lambda value, label: (value, label))
    task.classes = dataset.classes
    torch.manual_seed(1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(task.model().state_dict(), folder / "model-0.safetensors")
    save_file({name: p.detach() for name, p in task.model().named_parameters()}, folder / "ema-0.safetensors")
    target = {"run_id": "r", "checkpoint_uri": "s3://m/c", "metric": "test/rmse"}
    spec = request(kind="evaluate", evaluate=target, training={"strategy": "fsdp2"})

    def measure(world_size: int) -> tuple[list[dict[str, float]], list[Any]]:
        place = tmp_path / f"w{world_size}"
        place.mkdir()
        launch = Launch(
            run_id="r", generation=1, node_id="n", world_size=world_size, spec=spec, folder=place, socket=place / "s",
            resume_folder=folder,
        )  # fmt: skip
        metrics = run_ranks(world_size, lambda world: evaluation.evaluate(launch, task, dataset, world)[0])
        return metrics, Predictions(place / "predictions.parquet").table()["prediction"].to_pylist()

    ([expected], rows), (metrics, sharded_rows) = measure(1), measure(3)
    assert expected.pop("test/latency_ms") > 0  # a model in shards has none
    assert all(found == pytest.approx(expected) for found in metrics)
    assert sharded_rows == pytest.approx(rows)
    assert len(set(rows)) > 1
