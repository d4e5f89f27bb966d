"""Memory with no room for survivor state: it goes to disk, or is not saved, and training goes on in any case."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.machine_limits import MemoryUse
from contracts.ranks import CheckpointLine, EndedLine, StartedLine
from tests.small_disk import file_system
from tests.trainbus.support import Warm, exact_dataset, journal, write_exact_code
from tests.trainbus.test_checkpoint_memory import HELD_TASK, digests, spec_of, start, start_run
from tests.trainbus.test_exact_training import CODE
from trainbus.data.dataset import Dataset
from trainbus.ranks.step_hold import StepHold
from trainbus.trainer import survivor_state

pytestmark = pytest.mark.shell


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("room") / "data")


@pytest.fixture(scope="module")
def whole(warm: Warm, tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> dict[str, str]:
    """The digests of undisturbed training."""
    folder = tmp_path_factory.mktemp("room") / "whole"
    gang = start(warm, folder, dataset, 2, 1, folder / "none")
    assert gang.wait() == [0, 0], gang.logs()
    return digests(folder)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory that holds less than the state, as the /dev/shm of a container may."""
    with file_system(tmp_path / "shm", "64k") as folder:
        yield folder


#: Frees the disk when the first checkpoints have failed.
FREEING_TASK = """
import os
from pathlib import Path

import exact_tasks


class FreeingTask(exact_tasks.CNN):
    def optimizer(self, model):
        self.step = 0
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_):
        self.step += 1
        if self.step == 12:
            Path(os.environ["FILLER"]).unlink(missing_ok=True)
"""


def test_a_full_disk_costs_checkpoints_and_not_the_run(
    warm: Warm, tmp_path: Path, dataset: Dataset, whole: dict[str, str], held_code: Path
) -> None:
    (held_code / "freeing_task.py").write_text(FREEING_TASK)
    spec = spec_of().model_copy(update={"task": "freeing_task:FreeingTask"})
    with file_system(tmp_path / "disk", "4m") as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(4 * 2**20 - 64 * 2**10 - 2**14))
        gang = start_run(
            warm, disk / "g1", dataset, 1, 1, tmp_path / "none", spec, held_code, FILLER=str(filler)
        )  # fmt: skip
        assert gang.wait() == [0], gang.logs()
        assert [line for line in gang.logs().splitlines() if "Training goes on" in line]
        steps = [line.step for line in journal(disk / "g1") if isinstance(line, CheckpointLine)]
        assert steps
        assert min(steps) > 11
        assert digests(disk / "g1") == whole


@pytest.fixture
def held_code(tmp_path: Path) -> Path:
    return write_exact_code(tmp_path / "code", held_task=HELD_TASK)


def said(log: str) -> list[str]:
    return [line for line in log.splitlines() if "no room for survivor state" in line]


def kill_one_of_two(warm: Warm, tmp_path: Path, dataset: Dataset, code: Path, memory: Path, room: Any) -> str:
    """Kill rank 1 of 2 after the first checkpoint; return the log of all ranks."""
    spec = spec_of().model_copy(update={"task": "held_task:HeldTask"})
    with StepHold(tmp_path / "hold") as hold:
        gang = start_run(warm, tmp_path / "g1", dataset, 2, 1, memory, spec, code, room, HELD_BY=str(hold.path))
        while not any(isinstance(line, CheckpointLine) for line in lines_of(tmp_path / "g1")):
            time.sleep(0.01)
        os.kill(gang.pids[1], signal.SIGKILL)
    assert 0 not in gang.wait(), gang.logs()
    return gang.logs()


def lines_of(folder: Path) -> list[Any]:
    return list(journal(folder)) if (folder / "rank_0.jsonl").exists() else []


@pytest.mark.parametrize("limit", ["file system", "setting"])
def test_state_without_room_in_memory_is_saved_on_disk(
    warm: Warm, tmp_path: Path, dataset: Dataset, whole: dict[str, str], held_code: Path, limit: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if limit == "file system":
        memory, room = request.getfixturevalue("small_memory") / "r", {}
    else:
        memory, room = tmp_path / "memory" / "r", {"memory_max_bytes": 1000}
        memory.parent.mkdir()
    room |= {"spill_folder": tmp_path / "spilled"}
    log = kill_one_of_two(warm, tmp_path, dataset, held_code, memory, room)
    (line,) = said(log)
    assert "it was saved on disk" in line
    assert ("64.0 KiB are free" if limit == "file system" else "TRAINBUS_MEMORY_MAX_BYTES") in line
    assert not list(memory.glob("g1/*"))

    spec = spec_of().model_copy(update={"task": "held_task:HeldTask"})
    second = start_run(warm, tmp_path / "g2", dataset, 3, 2, memory, spec, held_code, room)
    assert second.wait() == [0] * 3, second.logs()
    started = next(line for line in journal(tmp_path / "g2") if isinstance(line, StartedLine))
    assert (started.resumed_from, started.exactness) == ("memory", "exact")
    assert digests(tmp_path / "g2") == whole


def test_a_container_without_memory_for_it_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor_state, "limited_memory", lambda: MemoryUse(used_bytes=900, limit_bytes=1000))
    folder = survivor_state.SurvivorFolder(tmp_path / "memory" / "r", 1, 0, max_bytes=10**9)
    (tmp_path / "memory").mkdir()
    files = {"model-0.safetensors": {"weight": torch.ones(100)}}
    with pytest.raises(OSError, match="1000 B are allowed by the container, of which 900 B are used"):
        folder.allocate(files)
    assert not list((tmp_path / "memory").rglob("*.safetensors"))
    monkeypatch.setattr(survivor_state, "limited_memory", lambda: MemoryUse(used_bytes=500, limit_bytes=1000))
    folder.allocate(files)


def test_without_room_anywhere_the_last_checkpoint_is_left(
    warm: Warm, tmp_path: Path, dataset: Dataset, small_memory: Path, held_code: Path
) -> None:
    room = {"spill_folder": small_memory / "spilled"}
    log = kill_one_of_two(warm, tmp_path, dataset, held_code, small_memory / "r", room)
    (line,) = said(log)
    assert line.endswith("the last checkpoint is what is left of it")
    (ended,) = [line for line in lines_of(tmp_path / "g1") if isinstance(line, EndedLine)]
    assert "lost contact with another rank" in ended.error
    assert not [path for path in small_memory.rglob("*") if path.is_file()]


def test_a_single_rank_trains_on_without_snapshots(
    warm: Warm, tmp_path: Path, dataset: Dataset, small_memory: Path, whole: dict[str, str]
) -> None:
    gang = start_run(warm, tmp_path / "g1", dataset, 1, 1, small_memory / "r", spec_of(), CODE)
    assert gang.wait() == [0], gang.logs()
    (line,) = said(gang.logs())
    assert "a rank that is killed costs the steps since the last checkpoint" in line
    assert digests(tmp_path / "g1") == whole
