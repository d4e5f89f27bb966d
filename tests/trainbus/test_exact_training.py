"""Whole generations of ranks, resumed in mid-epoch on other numbers of processes: the same state to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from contracts.ranks import CheckpointLine, MetricsLine, StartedLine
from contracts.spec.run import RunSpec
from tests.trainbus import exact_tasks
from tests.trainbus.support import Gang, Warm, exact_dataset, journal, keys_by_step, request, write_launch
from trainbus.data.dataset import Dataset

pytestmark = pytest.mark.shell

CODE = Path(exact_tasks.__file__).parent
#: Numbers that depend on what was trained, by (step, name): equal for any number of ranks.
Values = dict[tuple[int, str], float]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("exact") / "data")


def spec(task: str, **changes: Any) -> RunSpec:
    """Two epochs of 90 samples in batches of 24: the steps cross the epoch's end, and the last one is short."""
    training = {
        "epochs": 2,
        "global_batch": 24,
        "logical_ranks": 4,
        "checkpoint_every_steps": 2,
        "validate_every_steps": 4,
        "clip_norm": 1.0,
        "seed": 3,
        **changes.pop("training", {}),
    }
    return request(task=f"exact_tasks:{task}", training=training, **changes)


class Generation:
    """A gang that has ended, and its files."""

    def __init__(
        self,
        warm: Warm,
        folder: Path,
        spec: RunSpec,
        dataset: Dataset,
        world_size: int,
        resume: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.world_size = folder, world_size
        launch = write_launch(folder, spec, dataset, CODE, world_size=world_size, resume_folder=resume)
        gang = Gang(warm, folder, launch, world_size, TRAINBUS_RECORD_SAMPLES="1", **(env or {}))
        assert gang.wait() == [0] * world_size, gang.logs()
        self.lines = journal(folder)

    @property
    def started(self) -> StartedLine:
        return next(line for line in self.lines if isinstance(line, StartedLine))

    @property
    def steps(self) -> list[int]:
        return [line.step for line in self.lines if isinstance(line, CheckpointLine)]

    def digests(self, step: int) -> dict[str, str]:
        """The hash of each tensor of the state after ``step``, and of the rest of it."""
        parts = [self._part(step, rank) / f"digests-{rank}.json" for rank in range(self.world_size)]
        return {name: digest for part in parts for name, digest in json.loads(part.read_text()).items()}

    def values(self) -> Values:
        """Losses, norms and validation metrics, as they were journalled."""
        metrics = [line for line in self.lines if isinstance(line, MetricsLine)]
        return {
            (line.step, name): value
            for line in metrics
            for name, value in line.values.items()
            if name not in ("train/samples_per_s", "train/data_wait_s")
        }

    def checkpoint(self, step: int) -> Path:
        """All ranks' files of a checkpoint in one folder, as an agent would hand them to the next generation."""
        whole = self.folder / f"whole_{step}"
        whole.mkdir(exist_ok=True)
        for rank in range(self.world_size):
            for path in self._part(step, rank).iterdir():
                shutil.copy(path, whole / path.name)
        return whole

    def _part(self, step: int, rank: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:08d}-rank_{rank}"


def same(ours: Generation, theirs: Generation) -> None:
    """Every checkpoint, loss, norm, metric and sample of the steps that both have taken is the same."""
    first = ours.started.step + 1
    steps = [step for step in ours.steps if step in theirs.steps]
    assert steps, (ours.steps, theirs.steps)
    for step in steps:
        a, b = ours.digests(step), theirs.digests(step)
        assert {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)} == set(), (ours.folder.name, step)
    expected = {(step, name): value for (step, name), value in theirs.values().items() if step >= first}
    assert ours.values() == expected
    keys, whole = keys_by_step(ours.folder, ours.world_size), keys_by_step(theirs.folder, theirs.world_size)
    assert keys == {step: value for step, value in whole.items() if step >= first}


def disturbed(warm: Warm, tmp_path: Path, spec: RunSpec, dataset: Dataset, worlds: list[int]) -> Generation:
    """Train undisturbed on worlds[0]; resume from ever later checkpoints on the others; all of it must be the same."""
    whole = Generation(warm, tmp_path / f"g0_{worlds[0]}", spec, dataset, worlds[0])
    assert (whole.started.exactness, whole.started.step) == ("exact", 0)
    before = whole
    for number, world_size in enumerate(worlds[1:], 1):
        start = 2 * number
        again = Generation(
            warm, tmp_path / f"g{number}_{world_size}", spec, dataset, world_size, before.checkpoint(start)
        )
        assert (again.started.exactness, again.started.step) == ("exact", start)
        assert again.started.environment_digest == whole.started.environment_digest
        same(again, whole)
        before = again
    return whole


HISTORIES = {
    # BatchNorm, dropout, SGD, augmentation; buffers of leaf 0; a metric for early stopping that never stops it.
    "cnn": ("CNN", [4, 1, 3, 2], {"early_stopping": {"patience": 50}}),
    "cnn, mean buffers, 7 leaves": ("CNN", [3, 1, 2], {"logical_ranks": 7, "buffers": "mean"}),
    "mlp, zero1, average": ("MLP", [2, 3, 1], {"strategy": "zero1", "ema_decay": 0.9, "logical_ranks": 5}),
    "cnn, fsdp2": ("CNN", [3, 1, 2], {"strategy": "fsdp2"}),
    "gpt, fsdp2, average, 7 leaves": ("GPT", [2, 1, 3], {"strategy": "fsdp2", "ema_decay": 0.9, "logical_ranks": 7}),
    "mlp, fp16": ("MLP", [3, 1, 2], {"precision": "fp16"}),
    "mlp, plateau": ("PlateauMLP", [2, 1, 3], {"validate_every_steps": 2}),
    # Micro-batches of one text, some of which have no byte at all.
    "gpt, padded": ("PaddedGPT", [3, 1, 2], {"accumulate": 6}),
    "gpt, padded, fsdp2": ("PaddedGPT", [2, 1, 3], {"accumulate": 6, "strategy": "fsdp2"}),
    "gpt, bf16, accumulation": ("GPT", [2, 1, 3], {"precision": "bf16", "accumulate": 2, "ema_decay": 0.99}),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_disturbed_run_equals_the_undisturbed_one_to_the_bit(
    warm: Warm, tmp_path: Path, dataset: Dataset, name: str
) -> None:
    task, worlds, training = HISTORIES[name]
    disturbed(warm, tmp_path, spec(task, training=training), dataset, worlds)


def test_fast_mode_is_not_exact_and_reports_it(warm: Warm, tmp_path: Path, dataset: Dataset) -> None:
    """The negative control: what the comparison above would find, were the sums not fixed."""
    fast = spec("CNN", training={"logical_ranks": None})
    one, two = (Generation(warm, tmp_path / f"g{size}", fast, dataset, size) for size in (1, 2))
    assert one.started.exactness == two.started.exactness == "samples-exact"
    assert keys_by_step(one.folder, 1) == keys_by_step(two.folder, 2)
    assert one.digests(8) != two.digests(8)


def test_another_environment_ends_exactness_for_good(warm: Warm, tmp_path: Path, dataset: Dataset) -> None:
    exact = spec("MLP")
    home = Generation(warm, tmp_path / "home", exact, dataset, 2)
    abroad = Generation(
        warm, tmp_path / "abroad", exact, dataset, 1, home.checkpoint(2), {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    )
    back = Generation(warm, tmp_path / "back", exact, dataset, 2, abroad.checkpoint(4))
    assert [g.started.exactness for g in (home, abroad, back)] == ["exact", "samples-exact", "samples-exact"]
    assert {line.exactness for line in back.lines if isinstance(line, CheckpointLine)} == {"samples-exact"}
    assert home.started.environment_digest == back.started.environment_digest != abroad.started.environment_digest
    state = json.loads((back.checkpoint(8) / "state.json").read_text())
    assert state["about"]["exactness"] == "samples-exact"
