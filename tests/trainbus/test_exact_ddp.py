"""The same bits for any number of processes: weights, buffers, optimizer state, loss scale, norms."""

from __future__ import annotations

import pytest
import torch

from tests.trainbus.exact_gang import MODELS, Case, digest, gang
from trainbus.task import TaskError
from trainbus.trainer.exact.layout import PIECE
from trainbus.trainer.strategies import make_strategy
from trainbus.trainer.strategies.base import GROWTH_INTERVAL, MIN_SCALE, LossScale, LossScaleUnderflow
from trainbus.trainer.world import World, seed_all

CASES = {
    "mlp with an unused parameter, clipped, sharded": (
        Case("mlp", rules={"strategy": "zero1", "clip_norm": 0.1, "logical_ranks": 7}),
        3,
    ),
    "cnn with batch norm, channels last, SGD": (
        Case("cnn", "sgd", {"clip_norm": 0.5, "logical_ranks": 4}),
        4,
    ),
    "cnn, buffers averaged, Adagrad sharded": (
        Case("cnn", "adagrad", {"strategy": "zero1", "buffers": "mean", "logical_ranks": 7}),
        3,
    ),
    "gpt in bf16, micro-batches, tied weights": (Case("gpt", rules={"precision": "bf16", "accumulate": 2}), 2),
    "gpt in fp16 with its loss scale": (Case("gpt", rules={"precision": "fp16", "clip_norm": 0.5}), 2),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_processes_changes_no_bit(name: str) -> None:
    """Undisturbed in one process, and in several that hand over to another number of them in the middle."""
    case, world_size = CASES[name]
    undisturbed = gang(case, 1, range(3))
    middle = gang(case, world_size, range(2))
    end = gang(case, max(1, world_size - 1), range(2, 3), middle.state)
    assert middle.norms + end.norms == undisturbed.norms
    assert end.digest == undisturbed.digest


EMPTY = {
    "leaves": ("fsdp2", {"logical_ranks": 7}, 5, 3),
    "ranks, weights gathered leaf by leaf": ("fsdp2", {"logical_ranks": 4}, 3, 4),
    "micro-batches": ("fsdp2", {"logical_ranks": 4, "accumulate": 3}, 10, 2),
    "ranks, unsharded": ("ddp", {"logical_ranks": 4}, 3, 4),
    "micro-batches, unsharded": ("zero1", {"logical_ranks": 4, "accumulate": 3}, 10, 3),
}


@pytest.mark.parametrize("name", EMPTY)
def test_leaves_without_samples_change_no_bit(name: str) -> None:
    """All ranks run the same collectives, whichever of their leaves and micro-batches are empty."""
    strategy, rules, batch_size, world_size = EMPTY[name]
    case = Case("gpt", rules={"strategy": strategy, "clip_norm": 0.5, **rules}, batch_size=batch_size)
    alone, several = gang(case, 1, range(2)), gang(case, world_size, range(2))
    assert several.norms == alone.norms
    assert several.digest == alone.digest


def test_a_rank_without_samples_in_fast_mode() -> None:
    sharded, whole = (
        gang(Case("gpt", "sgd", {"logical_ranks": None, "strategy": strategy}, batch_size=2), 3, range(2))
        for strategy in ("fsdp2", "ddp")
    )
    for name, tensor in whole.state.model.items():
        torch.testing.assert_close(sharded.state.model[name], tensor)


@pytest.mark.parametrize("model", ["frozen", "routed"])
def test_frozen_and_unused_parameters(model: str) -> None:
    """The same for every strategy and number of processes, also when another strategy takes over."""
    whole = gang(Case(model, rules={"strategy": "ddp"}), 1, range(3))
    for strategy, world_size in (("ddp", 2), ("zero1", 3), ("fsdp2", 1), ("fsdp2", 3)):
        case = Case(model, rules={"strategy": strategy})
        middle = gang(Case(model, rules={"strategy": "ddp"}), 1, range(1)).state
        assert gang(case, world_size, range(1, 3), middle).digest == whole.digest, (strategy, world_size)
    seed_all(0, "model")
    fresh = MODELS[model]()
    for name, parameter in fresh.named_parameters():
        assert name in whole.state.model
        if not parameter.requires_grad:
            assert torch.equal(whole.state.model[name], parameter)


def test_unused_parameters_in_fast_mode() -> None:
    """DDP finds them if the task asks for it; else the error names the first one, and the attribute."""
    fast = {"logical_ranks": None}
    with pytest.raises(AssertionError, match=r"'blocks\.2\.[^']*' has no part in the loss.*find_unused_parameters"):
        gang(Case("unused", "sgd", fast), 2, range(1))
    several = gang(Case("unused", "sgd", fast, finds_unused=True), 2, range(2))
    alone = gang(Case("unused", "sgd", {**fast, "accumulate": 2}), 1, range(2))
    for name, tensor in alone.state.model.items():
        torch.testing.assert_close(several.state.model[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_sharded_optimizer_matches_a_whole_one_and_each_rank_saves_a_part() -> None:
    whole = gang(Case("mlp", rules={"clip_norm": 0.1}), 1, range(2))
    sharded = gang(Case("mlp", rules={"clip_norm": 0.1, "strategy": "zero1"}), 2, range(2))
    assert sharded.digest == whole.digest
    assert max(tensor.numel() for tensor in whole.state.model.values()) > PIECE
    held = [sum(t.nbytes for t in (part.model | part.optimizer.tensors).values()) for part in sharded.parts]
    largest = max(tensor.nbytes for tensor in whole.state.model.values())
    assert abs(held[0] - held[1]) <= largest


def test_bytes_sent_are_those_of_a_reduce_scatter_and_a_gather() -> None:
    """(W-1)/W * N * (k+1) elements of a rank with k maximal nodes, none twice and hardly any padding."""
    for leaf_count, world_size, nodes in ((6, 3, (1, 1, 1)), (7, 2, (2, 2))):
        result = gang(Case("mlp", rules={"logical_ranks": leaf_count}), world_size, range(2))
        size_bytes = sum(tensor.nbytes for tensor in result.state.model.values())
        for sent, k in zip(result.sent_bytes, nodes, strict=True):
            assert sent == pytest.approx(2 * (world_size - 1) / world_size * size_bytes * (k + 1), rel=0.02)


def test_plain_data_parallel_training_differs() -> None:
    """The negative control: without the tree the number of processes shows in the bits."""
    case = Case("gpt", rules={"logical_ranks": None})
    assert gang(case, 1, range(2)).digest != gang(case, 2, range(2)).digest


def test_several_optimizers() -> None:
    """Each steps its own parameters; their state goes from one strategy to another."""
    ddp = {"strategy": "ddp"}
    whole, middle = (gang(Case("gpt", "two", ddp), 1, range(steps)) for steps in (3, 1))
    assert {key.rpartition("/")[2] for key in whole.state.optimizer.tensors} == {
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    for strategy in ("zero1", "fsdp2"):
        assert gang(Case("gpt", "two", {"strategy": strategy}), 2, range(1, 3), middle.state).digest == whole.digest
    muon = gang(Case("mlp", "muon", ddp), 1, range(1)).state
    assert gang(Case("mlp", "muon", ddp), 2, range(1)).digest == digest(muon)
    case = Case("mlp", "muon", {"strategy": "zero1"})
    with pytest.raises(TaskError, match="Muon"):
        make_strategy(case, case.training(), World())


def test_an_optimizer_that_is_not_elementwise_is_refused_by_name() -> None:
    case = Case("mlp", "lbfgs", {"strategy": "zero1"})
    with pytest.raises(TaskError, match="LBFGS"):
        make_strategy(case, case.training(), World())


def test_the_loss_scale_grows_shrinks_and_gives_up() -> None:
    scale = LossScale(enabled=True)
    start = scale.scale
    assert all(scale.accept(1.0) for _ in range(GROWTH_INTERVAL))
    assert scale.scale == 2 * start
    assert not scale.accept(float("inf"))
    assert scale.scale == start
    again = LossScale(enabled=True)
    again.load(scale.state())
    assert again.state() == scale.state()
    scale.scale = MIN_SCALE
    with pytest.raises(LossScaleUnderflow):
        scale.accept(float("nan"))
