"""Eight ranks on one node, each with a GPU of its own: which device each of their calls touches."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from services.kit.ports import free_ports
from tests.trainbus.fake_cuda import FakeCuda
from tests.trainbus.support import exact_dataset, rank_env, request, write_launch
from tests.trainbus.test_exact_training import CODE
from trainbus.data.dataset import Dataset

pytestmark = pytest.mark.shell


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("devices") / "data")


def run_rank(env: Mapping[str, str], gpus: int, folder: Path, board: int = 0) -> None:
    """Run a rank as ``python -m trainbus.ranks.rank`` does, on fake GPUs; write down what it touched."""
    from trainbus.ranks.rank import run

    cuda = FakeCuda(gpus, board)
    code = 1
    try:
        os.environ.update(env)
        cuda.install()
        code = run(env)
    except BaseException:
        traceback.print_exc()
    finally:
        touches = [[*touch, count] for touch, count in Counter(cuda.touches).items()]
        (folder / f"touches_{env['RANK']}.json").write_text(json.dumps(touches))
        os._exit(code)


def train_on_gpus(
    folder: Path, dataset: Dataset, ranks: int, gpus: int, training: Mapping[str, Any], boards: Sequence[int] = ()
) -> list[list[list[Any]]]:
    """Train with a GPU for each rank, of which a rank sees ``gpus``; return what each rank touched, and how often.

    ``boards``: the number of each rank's GPU, where it sees but one, or that of the GPU that its slice is cut from.
    """
    processes = start_ranks(folder, dataset, ranks, gpus, training, boards)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [json.loads((folder / f"touches_{rank}.json").read_text()) for rank in range(ranks)]


def start_ranks(
    folder: Path, dataset: Dataset, ranks: int, gpus: int, training: Mapping[str, Any], boards: Sequence[int] = ()
) -> list[ForkProcess]:
    steps = {"max_steps": 4, "checkpoint_every_steps": 2, "validate_every_steps": 3}
    spec = request(task="exact_tasks:CNN", training={"global_batch": 24, "seed": 3, **steps, **training})
    return fork_ranks(folder, write_launch(folder, spec, dataset, CODE, world_size=ranks), ranks, gpus, boards)


def fork_ranks(
    folder: Path, launch: Path, ranks: int, gpus: int, boards: Sequence[int] = (), **env: str
) -> list[ForkProcess]:
    port = free_ports(1)[0]
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(
            target=run_rank,
            args=(rank_env(launch, rank, ranks, port, **env), gpus, folder, boards[rank] if boards else 0),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize(
    "training",
    [
        {"logical_ranks": 8},
        {"ema_decay": 0.9},
    ],
    ids=["exact", "fast"],
)
def test_each_rank_touches_its_own_gpu_alone(tmp_path: Path, dataset: Dataset, training: Mapping[str, Any]) -> None:
    for rank, touches in enumerate(train_on_gpus(tmp_path, dataset, 8, 8, training)):
        wrong = [touch for touch in touches if touch[1] != rank]
        assert not wrong, f"rank {rank}"
        # Otherwise nothing was looked at.
        assert {"init_process_group", "pin_memory", "Stream", "Event", "to"} <= {what for what, *_ in touches}


@pytest.mark.parametrize(("boards", "backend"), [((4, 5), "nccl"), ((4, 4), "gloo")], ids=["two GPUs", "two slices"])
def test_a_rank_that_sees_one_device_touches_that_one(
    tmp_path: Path, dataset: Dataset, boards: tuple[int, int], backend: str
) -> None:
    """NCCL refuses ranks on slices of one GPU, which exchange their gradients by way of the host."""
    for touches in train_on_gpus(tmp_path, dataset, 2, 1, {"logical_ranks": 2}, boards):
        assert {device for _, device, *_ in touches} == {0}
        assert [what for what, *_ in touches if what.startswith("communicator")] == [f"communicator of {backend}"]


def test_two_ranks_never_share_a_gpu_by_chance(tmp_path: Path, dataset: Dataset) -> None:
    processes = start_ranks(tmp_path, dataset, 3, 2, {"logical_ranks": 3})
    processes[2].join()
    for process in processes[:2]:  # they wait for it
        process.kill()
    assert processes[2].exitcode == 1
    assert "local rank 2 has no GPU: this process sees 2" in (tmp_path / "rank_2.jsonl").read_text()
