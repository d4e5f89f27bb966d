"""Parts of exact training beside the gradients: environment, moving average, augmentation, stragglers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contracts import exactness
from contracts.events.run import RunStarted
from contracts.spec.training import Training
from tests.trainbus.exact_tasks import CLASSES, MLP, samples
from tests.trainbus.support import linear_dataset, write_dataset
from tests.trainbus.test_trainer import Linear, train
from trainbus.data.dataset import Dataset
from trainbus.data.loader import BatchLoader
from trainbus.data.order import LaneOrder
from trainbus.data.sampler import Sampler
from trainbus.data.workers import sample_generator
from trainbus.trainer import environment, kernel_choice
from trainbus.trainer.step_data import StepLoader, TrainingData
from trainbus.trainer.straggler import StragglerDetector
from trainbus.trainer.trainer import TrainingDiverged
from trainbus.trainer.training_state import MovingAverage
from trainbus.trainer.world import limit_threads


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    limit_threads({})


EXACT = {"run_id": "r1", "exactness": "exact", "environment_digest": "a"}


@pytest.mark.parametrize(
    ("logical_ranks", "digests", "parent", "expected"),
    [
        pytest.param(None, ["a"], None, "samples-exact", id="fast mode"),
        pytest.param(4, ["a", "a"], None, "exact", id="from scratch"),
        pytest.param(4, ["a", "b"], None, "samples-exact", id="unlike machines in one gang"),
        pytest.param(4, ["a", "a"], EXACT, "exact", id="resumed on the like"),
        pytest.param(4, ["b"], EXACT, "samples-exact", id="resumed elsewhere"),
        pytest.param(
            4, ["a"], {**EXACT, "exactness": "samples-exact"}, "samples-exact", id="back home after an excursion"
        ),
        pytest.param(4, ["b"], {**EXACT, "run_id": "r0"}, "exact", id="another run's end is this one's beginning"),
        pytest.param(
            4, ["a"], {**EXACT, "run_id": "r0", "exactness": "samples-exact"}, "samples-exact", id="of inexact parents"
        ),
        pytest.param(4, ["a"], {"run_id": "r1"}, "samples-exact", id="a checkpoint without a record"),
    ],
)
def test_a_resumed_state_keeps_its_exactness(
    logical_ranks: int | None, digests: list[str], parent: dict[str, Any] | None, expected: str
) -> None:
    assert environment.classify_exactness(logical_ranks, digests, parent, "r1") == expected


def test_the_environment_lists_settings_that_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    plain = environment.describe(cpu, {"cpu": "x"})
    assert environment.describe(cpu, {"cpu": "x"}) == plain
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    changed = environment.describe(cpu, {"cpu": "x"})
    assert set(changed.items()) ^ set(plain.items()) == {("env.ONEDNN_MAX_CPU_ISA", "AVX2")}
    assert environment.digest(changed) != environment.digest(plain)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        more = environment.describe(cpu, {"cpu": "y"})
    finally:
        torch.set_num_threads(threads)
    assert {name for name in changed if more[name] != changed[name]} == {"machine.cpu", "torch.threads"}


def test_sharding_changes_no_bit_of_a_moving_average() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1003)
    bounds = [0, 1, 18, 335, 1003]
    parts = {f"{a}": weight[a:b].clone() for a, b in pairwise(bounds)}
    whole, sharded = MovingAverage({"w": weight}, 0.999), MovingAverage(parts, 0.999)
    for _ in range(5):
        change = torch.randn(1003)
        weight += change
        for a, b in pairwise(bounds):
            parts[f"{a}"] += change[a:b]
        whole.update()
        sharded.update()
    assert torch.equal(whole.tensors["w"], torch.cat(list(sharded.tensors.values())))
    kept, average = weight.clone(), whole.tensors["w"].clone()
    with whole.swapped_in():
        assert torch.equal(weight, average)
    assert torch.equal(weight, kept)
    assert torch.equal(whole.tensors["w"], average)


def test_augmentation_is_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    """Cut into 4 leaves or 1, from the start or from the middle: the same bytes reach the model."""
    dataset_id = write_dataset(tmp_path, {"train": samples(40)}, classes=CLASSES)
    dataset = Dataset(tmp_path, dataset_id)
    split = dataset.split("train")
    training = Training(epochs=3, global_batch=16, seed=5)
    sampler = Sampler(LaneOrder(dataset_id, dataset.shard_samples("train"), 5), 16, 120)

    def images(leaves: int, consumed: int, steps: int) -> torch.Tensor:
        feed = StepLoader(BatchLoader(MLP(), split), sampler, training, range(leaves), leaves)
        return torch.cat(
            [
                m.batch[0]
                for s in feed.steps(consumed, steps)
                for leaf in s.leaves
                for m in leaf.micro_batches
                if m.batch
            ]
        )

    whole = images(1, 0, 8)
    assert len(whole) == 120
    assert torch.equal(images(4, 0, 8), whole)
    assert torch.equal(images(3, 48, 5), whole[48:])
    first, again, other = (sample_generator(5, epoch, 3).random(4) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("accumulate", [1, 3, 5])
@pytest.mark.parametrize("leaf_count", [1, 3, 4])
def test_every_rank_knows_which_steps_have_empty_micro_batches(
    tmp_path: Path, leaf_count: int, accumulate: int
) -> None:
    dataset = linear_dataset(tmp_path, train=23)
    training = Training(epochs=1, global_batch=10, accumulate=accumulate)
    data = TrainingData(Linear(), dataset, training)
    loading = BatchLoader(Linear(), data.train_split)
    whole = StepLoader(loading, data.sampler, training, range(leaf_count), leaf_count).steps(0, 3)
    last = StepLoader(loading, data.sampler, training, range(leaf_count - 1, leaf_count), leaf_count).steps(0, 3)
    for step, part in zip(whole, last, strict=True):
        found = any(micro.samples == 0 for leaf in step.leaves for micro in leaf.micro_batches)
        assert step.has_empty == part.has_empty == found


def test_overflow_in_fp16_skips_steps_and_does_not_end_the_run(tmp_path: Path) -> None:
    class Loud(Linear):  # type: ignore[misc, valid-type]
        loudness = 1e3

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * self.loudness  # type: ignore[no-any-return]

    dataset = linear_dataset(tmp_path / "data")
    seldom = {"precision": "fp16", "checkpoint_every_steps": 1000, "validate_every_steps": 1000}
    trainer, outcome = train(tmp_path / "run", dataset, Loud(), ema_decay=0.9, **seldom)
    assert (outcome.outcome, outcome.step) == ("succeeded", trainer.total_steps)
    scaler = trainer.strategy.state_entries().scaler
    assert scaler is not None
    assert scaler["scale"] < 2.0**16
    assert outcome.metrics["validation/accuracy"] > 0.5

    class Broken(Loud):
        loudness = float("inf")

    with pytest.raises(TrainingDiverged, match="at any loss scale"):
        train(tmp_path / "broken", dataset, Broken(), epochs=30, **seldom)


def watched(steps: list[list[float]], over_steps: int = 4) -> list[tuple[int, int, float]]:
    watch = StragglerDetector(1.5, over_steps)
    return [
        (number, found.rank, round(found.factor, 1))
        for number, step in enumerate(steps, 1)
        for found in watch.add_step([ms / 1000 for ms in step])
    ]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([[10, 11, 9]] * 12, [], id="even"),
        pytest.param([[10, 30, 10]] * 12, [(4, 1, 3.0)], id="named once while it stays so"),
        pytest.param(
            [[10, 30]] * 4 + [[10, 10]] * 4 + [[10, 30]] * 4, [(4, 1, 3.0), (12, 1, 3.0)], id="again after it kept up"
        ),
        pytest.param([[10, 10, 10], [10, 500, 10], [10, 10, 10], [10, 10, 10]] * 3, [], id="one hiccup is none"),
        pytest.param([[0.1, 0.5]] * 12, [], id="too little to matter"),
        pytest.param([[10]] * 12, [], id="alone"),
        pytest.param([[10, 10, 40, 40, 10]] * 4, [(4, 2, 4.0), (4, 3, 4.0)], id="two of five"),
    ],
)
def test_the_detector_names_stragglers(steps: list[list[float]], expected: list[tuple[int, int, float]]) -> None:
    assert watched(steps) == expected


def test_libraries_and_switches_that_choose_kernels_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    plain = environment.describe(cpu)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1024")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")  # chooses nothing
    monkeypatch.setattr(kernel_choice, "PACKAGES", ("numpy", "no-such-package"))
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        found = environment.describe(cpu)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    changed = {name: found[name] for name in found if found[name] != plain.get(name)}
    assert changed.pop("attention").startswith("flash=False")
    assert changed == {
        "env.PYTORCH_TUNABLEOP_ENABLED": "1",
        "env.CUBLASLT_WORKSPACE_SIZE": "1024",
        "package.numpy": np.__version__,
    }


@pytest.mark.parametrize(
    ("mode", "device", "words"),
    [
        pytest.param(None, "cuda", None, id="not compiled"),
        pytest.param("default", "cpu", None, id="one kernel each on a CPU"),
        pytest.param("default", "cuda", "Inductor times its reductions", id="triton's reductions"),
        pytest.param("max-autotune", "cpu", "torch.compile autotunes", id="autotuned"),
    ],
)
def test_what_chooses_kernels_by_timing_is_not_exact(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, device: str, words: str | None
) -> None:
    monkeypatch.setattr(kernel_choice, "_uses_tunableop", lambda: False)
    model: nn.Module = nn.Linear(2, 2)
    if mode is not None:
        model = nn.Sequential(torch.compile(model, mode=mode))  # type: ignore[arg-type]
    found = "; ".join(kernel_choice.find_timed(model, torch.device(device)))
    assert found.startswith(words) if words else not found
    claimed = environment.classify_exactness(4, ["a"], None, "r", is_timed=bool(found))
    recorded = {exactness.TIMED: found} if found else {}
    start = RunStarted(run_id="r", generation=1, node_id="n", exactness=claimed, environment=recorded)
    reading = exactness.assess({"task": "t:T", "training": {"logical_ranks": 4}}, [start])
    assert reading is not None
    assert reading.exactness == ("samples-exact" if words else "exact")
    assert words is None or f"kernels are chosen by timing: {words}" in reading.why
