"""State that ranks leave in memory: what stays, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

from services.worker.checkpoints.survivor_state import SurvivorMemory


def leave(folder: Path, generation: int, step: int, size_bytes: int = 10, name: str = "step_{}") -> Path:
    state = folder / f"g{generation}" / name.format(f"{step:08}-rank_0")
    state.mkdir(parents=True)
    (state / "model-0.safetensors").write_bytes(bytes(size_bytes))
    return state


def test_state_stays_until_the_next_generation_commits(tmp_path: Path) -> None:
    memory = SurvivorMemory(tmp_path / "memory", 1000)
    folder = memory.prepare("r", 1)
    assert folder is not None
    first = leave(folder, 1, 7)
    assert memory.prepare("r", 2) == folder
    assert first.exists()  # the second generation begins with it
    second = leave(folder, 2, 9)
    memory.remove_before("r", 2)
    assert not first.exists()
    assert second.exists()
    assert memory.prepare("r", 4) == folder  # the third could not be prepared
    assert second.exists()
    leave(folder, 4, 12)
    memory.prepare("r", 5)
    assert not second.exists()
    memory.remove_run("r")
    assert not folder.exists()


def test_state_of_unknown_and_oldest_runs_is_removed(tmp_path: Path) -> None:
    memory = SurvivorMemory(tmp_path / "memory", 100)
    states = {}
    for age, run in enumerate(("new", "old", "stray")):
        folder = memory.prepare(run, 1)
        assert folder is not None
        states[run] = leave(folder, 1, 1, size_bytes=60)
        os.utime(folder, (1e9 - age, 1e9 - age))
    memory.remove_others({"new", "old"})
    assert not states["stray"].exists()
    assert memory.prepare("newest", 1) is not None
    assert not states["old"].exists()
    assert states["new"].exists()
    memory.clear()
    assert not (tmp_path / "memory").exists()


def test_hidden_name_means_state_is_being_written(tmp_path: Path) -> None:
    memory = SurvivorMemory(tmp_path, 1000)
    folder = memory.prepare("r", 1)
    assert folder is not None
    assert not memory.is_being_written("r", 1, [0, 1])
    state = leave(folder, 1, 3, name=".step_next-rank_1.0")
    assert memory.is_being_written("r", 1, [0, 1])
    assert not memory.is_being_written("r", 1, [0])  # its writer is dead
    state.rename(state.with_name("step_00000003-rank_1"))
    assert not memory.is_being_written("r", 1, [0, 1])


def test_no_folder_keeps_no_state() -> None:
    memory = SurvivorMemory(None, 0)
    assert memory.prepare("r", 1) is None
    memory.remove_before("r", 1)
    memory.remove_run("r")
    memory.remove_others(set())
    assert not memory.is_being_written("r", 1, [0])


def test_newest_step_counts_whole_state_of_the_generation_only(tmp_path: Path) -> None:
    memory = SurvivorMemory(tmp_path, 10**9)
    for name in (
        "g3/step_00000007-rank_0",
        "g3/step_00000009-rank_1",
        "g3/.step_00000011-rank_0",
        "g2/step_00000050-rank_0",
    ):
        (tmp_path / "r1" / name).mkdir(parents=True)
    assert memory.newest_step("r1", 3) == 9
    assert memory.newest_step("r1", 4) is None
    assert SurvivorMemory(None, 0).newest_step("r1", 3) is None
