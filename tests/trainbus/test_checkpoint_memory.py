"""A rank is killed: the next generation loads survivor state from memory, and the result is that of no kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contracts.ranks import CheckpointLine, Launch, MetricsLine, StartedLine
from contracts.spec.run import RunSpec
from services.kit.ports import free_ports
from tests.trainbus.support import (
    Gang,
    Warm,
    exact_dataset,
    journal,
    keys_by_step,
    rank_env,
    request,
    whole_checkpoint,
    write_exact_code,
    write_launch,
)
from tests.trainbus.test_exact_training import CODE
from trainbus.data.dataset import Dataset
from trainbus.ranks.step_hold import StepHold
from trainbus.trainer.survivor_state import find_local_parts

pytestmark = pytest.mark.shell


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("memory") / "data")


def spec_of(**changes: Any) -> RunSpec:
    training = {
        "epochs": 20,
        "global_batch": 24,
        "logical_ranks": 4,
        "checkpoint_at_steps": [5, 9],
        "checkpoint_every_steps": 10_000,
        "validate_every_steps": 3,
        "seed": 3,
        **changes,
    }
    return request(task="exact_tasks:CNN", training=training)


def start(
    warm: Warm, folder: Path, dataset: Dataset, world_size: int, generation: int, memory: Path, **changes: Any
) -> Gang:
    return start_run(warm, folder, dataset, world_size, generation, memory, spec_of(**changes), CODE)


def start_run(
    warm: Warm,
    folder: Path,
    dataset: Dataset,
    world_size: int,
    generation: int,
    memory: Path,
    spec: RunSpec,
    code: Path,
    room: Mapping[str, Any] | None = None,
    **env: str,
) -> Gang:
    path = write_launch(folder, spec, dataset, code, world_size=world_size, generation=generation)
    launch = Launch.model_validate_json(path.read_bytes())
    path.write_text(launch.model_copy(update={"memory_folder": memory, **(room or {})}).model_dump_json())
    return Gang(warm, folder, path, world_size, **env)


def digests(folder: Path) -> dict[str, str]:
    parts = whole_checkpoint(folder).glob("digests-*.json")
    return {name: found for part in parts for name, found in json.loads(part.read_text()).items()}


#: Waits before a step that comes long after the first checkpoint, for as long as the test holds it.
HELD_TASK = """
import os

import exact_tasks
from trainbus.ranks.step_hold import wait_at


class HeldTask(exact_tasks.CNN):
    def optimizer(self, model):
        self.step = 0
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.step += 1

    def loss(self, model, batch):
        if model.training and "HELD_BY" in os.environ:
            wait_at(self.step, {os.environ["HELD_BY"]: 40})
        return super().loss(model, batch)
"""


@pytest.mark.parametrize("worlds", [(2, 3), (1, 2)], ids=["a survivor's state", "a snapshot"])
def test_a_killed_rank_changes_no_bit(warm: Warm, tmp_path: Path, dataset: Dataset, worlds: tuple[int, int]) -> None:
    """With two ranks the other one leaves its state; a single one leaves the last snapshot it took."""
    undisturbed = start(warm, tmp_path / "whole", dataset, 2, 1, tmp_path / "none")
    assert undisturbed.wait() == [0, 0], undisturbed.logs()

    memory = tmp_path / "memory"
    code = write_exact_code(tmp_path / "code", held_task=HELD_TASK)
    spec = spec_of().model_copy(update={"task": "held_task:HeldTask"})
    with StepHold(tmp_path / "hold") as hold:
        first = start_run(warm, tmp_path / "g1", dataset, worlds[0], 1, memory, spec, code, HELD_BY=str(hold.path))
        path = tmp_path / "g1" / "rank_0.jsonl"
        while not (path.exists() and any(isinstance(line, CheckpointLine) for line in journal(path.parent))):
            time.sleep(0.01)
        os.kill(first.pids[-1], signal.SIGKILL)
    codes = first.wait()
    assert 0 not in codes, first.logs()
    left = [path.name for path in (memory / "g1").iterdir() if not path.name.startswith(".")]
    assert left

    second = start_run(warm, tmp_path / "g2", dataset, worlds[1], 2, memory, spec, code)
    assert second.wait() == [0] * worlds[1], second.logs()
    started = next(line for line in journal(tmp_path / "g2") if isinstance(line, StartedLine))
    assert (started.resumed_from, started.exactness) == ("memory", "exact")
    assert started.step == max(int(name[5:13]) for name in left)
    assert digests(tmp_path / "g2") == digests(tmp_path / "whole")
    # Only a single rank may be killed between the snapshot of a step and the report of its loss.
    whole, reported = losses(tmp_path / "whole"), losses(tmp_path / "g1") | losses(tmp_path / "g2")
    assert set(whole) - set(reported) <= ({started.step} if worlds[0] == 1 else set())
    assert reported.items() <= whole.items()


#: A task that kills its rank in one step: in the last forward pass, or when the gradients of all ranks are there.
KILLED_TASK = """
import os
import signal

import exact_tasks

STEP = 14


class KilledTask(exact_tasks.CNN):
    def optimizer(self, model):
        self.step, self.leaves = 1, 0
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: self.end("update"))
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.step, self.leaves = self.step + 1, 0

    def loss(self, model, batch):
        if model.training:
            self.leaves += 1
            if self.leaves == 2:
                self.end("forward")
        return super().loss(model, batch)

    def end(self, place):
        if self.step == STEP and os.environ.get("KILLED_AT") == f"{os.environ['RANK']}-{place}":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("place", ["forward", "update"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_surviving_step_keeps_its_loss_and_its_samples(
    warm: Warm, tmp_path: Path, dataset: Dataset, rank: int, place: str
) -> None:
    """A rank may die before its gradients are out, or after all have them and before it updates its weights."""
    code = write_exact_code(tmp_path / "code", killed_task=KILLED_TASK)
    memory, spec = tmp_path / "memory", spec_of(epochs=5)
    spec = spec.model_copy(update={"task": "killed_task:KilledTask"})

    def run(name: str, generation: int, **env: str) -> tuple[list[int], str]:
        folder = tmp_path / name
        path = write_launch(folder, spec, dataset, code, world_size=2, generation=generation)
        launch = Launch.model_validate_json(path.read_bytes())
        path.write_text(launch.model_copy(update={"memory_folder": memory / name[:1]}).model_dump_json())
        gang = Gang(warm, folder, path, 2, TRAINBUS_RECORD_SAMPLES="1", **env)
        return gang.wait(), gang.logs()

    codes, logs = run("whole", 1)
    assert codes == [0, 0], logs
    codes, logs = run("g1", 1, KILLED_AT=f"{rank}-{place}")
    assert 0 not in codes, logs
    codes, logs = run("g2", 2)
    assert codes == [0, 0], logs
    started = next(line for line in journal(tmp_path / "g2") if isinstance(line, StartedLine))
    assert started.resumed_from == "memory"
    assert started.step >= 13
    assert digests(tmp_path / "g2") == digests(tmp_path / "whole")
    assert losses(tmp_path / "g1") | losses(tmp_path / "g2") == losses(tmp_path / "whole")
    before = {step: keys for step, keys in keys_by_step(tmp_path / "g1", 2).items() if step <= started.step}
    assert before | keys_by_step(tmp_path / "g2", 2) == keys_by_step(tmp_path / "whole", 2)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp2"])
def test_ranks_gather_the_parts_of_a_checkpoint_from_several_nodes(
    warm: Warm, tmp_path: Path, dataset: Dataset, strategy: str
) -> None:
    """Two nodes kept one part each of what was never committed; a damaged newer one is left alone."""
    undisturbed = start(warm, tmp_path / "whole", dataset, 2, 1, tmp_path / "none", strategy=strategy)
    assert undisturbed.wait() == [0, 0], undisturbed.logs()

    nodes = [tmp_path / f"node{number}" for number in range(2)]
    for number, node in enumerate(nodes):
        for step in (5, 9):
            part = f"step_{step:08d}-rank_{number}"
            shutil.copytree(tmp_path / "whole" / "checkpoints" / part, node / "g1" / part)
    damaged = nodes[1] / "g1" / "step_00000009-rank_1" / "model-1.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    folder = tmp_path / "g3"
    written = write_launch(folder, spec_of(strategy=strategy), dataset, CODE, world_size=2, generation=3)
    launch, port, pids = Launch.model_validate_json(written.read_bytes()), free_ports(1)[0], []
    for rank, node in enumerate(nodes):
        own = folder / f"launch_{rank}.json"
        own.write_text(launch.model_copy(update={"survivor_dir": node}).model_dump_json())
        pids.append(warm.fork(rank_env(own, rank, 2, port), folder, rank))
    assert [warm.wait(pid) for pid in pids] == [0, 0]
    started = next(line for line in journal(folder) if isinstance(line, StartedLine))
    assert (started.resumed_from, started.step, started.exactness) == ("memory", 5, "exact")
    assert digests(folder) == digests(tmp_path / "whole")


def losses(folder: Path) -> dict[int, float]:
    lines = [line for line in journal(folder) if isinstance(line, MetricsLine)]
    return {line.step: line.values["train/loss"] for line in lines if "train/loss" in line.values}


def test_the_newest_generation_that_left_state_decides(tmp_path: Path) -> None:
    for place in ("g1/step_00000020-rank_1", "g2/step_00000015-rank_1", "g2/step_00000012-rank_1"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "model-1.safetensors").touch()
    # The third could not be prepared. The second trained on its own: loading the first's state would fork the history.
    newest = max(find_local_parts((tmp_path,), 4, 10, "r"))
    assert (newest.generation, newest.step) == (2, 15)
    assert max(find_local_parts((tmp_path,), 2, 10, "r")).step == 20
