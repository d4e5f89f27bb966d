"""Ranks with workers: the same training to the bit, and nothing left behind when a rank is killed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.trainbus.support import (
    LINEAR_TASK,
    FakeAgent,
    journal,
    linear_dataset,
    load_tensors,
    rank_env,
    request,
    start_rank,
    whole_checkpoint,
    write_launch,
    write_task,
)

pytestmark = pytest.mark.shell

AUGMENTED = (
    LINEAR_TASK
    + """
    def augment(self, example, rng):
        return example[0] + torch.from_numpy(rng.standard_normal(8).astype(np.float32)) * 0.1, example[1]
"""
)


def train(folder: Path, dataset: Any, code: Path, workers: int) -> dict[str, torch.Tensor]:
    spec = request(training={"loading": {"workers": workers}, "epochs": 3}, params={"dropout": 0.2})
    launch = write_launch(folder, spec, dataset, code)
    log = folder / "rank_0.log"
    assert start_rank(rank_env(launch, 0, 1, 0), log).wait(600) == 0, log.read_text()
    return load_tensors(whole_checkpoint(folder), "model")


def test_workers_do_not_change_the_training_result(tmp_path: Path) -> None:
    dataset, code = linear_dataset(tmp_path / "data"), write_task(tmp_path / "code", AUGMENTED)
    alone = train(tmp_path / "none", dataset, code, 0)
    together = train(tmp_path / "three", dataset, code, 3)
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def rank_with_workers(tmp_path: Path) -> tuple[subprocess.Popen[bytes], FakeAgent, Path]:
    """A rank with two workers that trains on and on, its agent and its folder; it has begun to report."""
    dataset, code = linear_dataset(tmp_path / "data"), write_task(tmp_path / "code")
    folder, agent = tmp_path / "g1", FakeAgent(tmp_path / "agent.sock")
    spec = request(training={"loading": {"workers": 2}, "epochs": 100_000})
    launch = write_launch(folder, spec, dataset, code, socket_path=agent.path)
    rank = start_rank(rank_env(launch, 0, 1, 0), folder / "rank_0.log")
    # (A rank that is faster than its link to the agent rings no bell.)
    path = folder / "rank_0.jsonl"
    while not path.exists() or not journal(folder):
        assert rank.poll() is None, (folder / "rank_0.log").read_text()
        time.sleep(0.01)
    return rank, agent, folder


def test_a_killed_rank_ends_its_workers(tmp_path: Path) -> None:
    rank, agent, _ = rank_with_workers(tmp_path)
    workers = psutil.Process(rank.pid).children()
    assert len(workers) == 2
    rank.kill()
    rank.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    agent.close()


def test_a_killed_worker_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    rank, agent, folder = rank_with_workers(tmp_path)
    psutil.Process(rank.pid).children()[1].kill()
    assert rank.wait(600) == 1
    error = journal(folder)[-1].error  # type: ignore[union-attr]
    assert "loader worker" in error
    assert "was killed by SIGKILL (out of memory?" in error
    agent.close()
