"""Shares of a device: the limits of their ranks, and two runs on one slot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.events.run import Member, RunExited, RunPlaced, RunStarted
from contracts.spec.run import RunSpec
from services.worker.core import rank_environment
from services.worker.node.gpu_check import GpuCheck, UnfitDeviceError
from services.worker.node.inventory import find_mps_pipe
from tests.worker.conftest import World
from tests.worker.test_core import placed
from tests.worker.test_gpu_check import GPUS, RIGHT, WRONG, FakeNvml
from trainbus.trainer.world import limit_memory

GIB = 2**30


def place(**changes: Any) -> rank_environment.NodeEnvironment:
    fields: dict[str, Any] = {
        "launch_path": "/l.json", "master_address": "h", "master_port": 1, "python_path": (), "bin_folder": "/b",
        "cores": 8, "slots": 2, "gpus": ("GPU-a", "GPU-b"), "slot_memory_bytes": 40 * GIB,
    }  # fmt: skip
    return rank_environment.NodeEnvironment(**{**fields, **changes})


def environment(where: rank_environment.NodeEnvironment, index: int = 0, **spec: Any) -> dict[str, str]:
    event = placed(**spec)
    return rank_environment.build_environment(event, event.members[0], index, {}, where)


LIMITS = ("TRAINBUS_MEMORY_FRACTION", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


@pytest.mark.parametrize(
    ("share", "where", "expected"),
    [
        pytest.param(1.0, place(mps_pipe="/mps"), (None, None, None), id="a whole device has no limits"),
        # A GiB of it is for CUDA's context, so that all in all it is half.
        pytest.param(0.5, place(), ("0.4750", "50", None), id="half of it"),
        pytest.param(0.5, place(mps_pipe="/mps"), ("0.4750", "50", "0=20480M,1=20480M"), id="half of it, under MPS"),
        pytest.param(0.01, place(), ("0.0050", "1", None), id="never nothing"),
        pytest.param(0.5, place(gpus=()), (None, None, None), id="a CPU slot"),
        pytest.param(0.0, place(mps_pipe="/mps"), (None, None, None), id="no device at all"),
    ],
)
def test_share_limits_memory_and_multiprocessors(
    share: float, where: rank_environment.NodeEnvironment, expected: tuple[str | None, ...]
) -> None:
    found = environment(where, resources={"share": share}, env={"OMP_NUM_THREADS": "64"})
    assert tuple(found.get(name) for name in LIMITS) == expected
    assert (found.get("CUDA_MPS_PIPE_DIRECTORY") == "/mps") == bool(where.mps_pipe and 0 < share < 1)


def test_run_cannot_override_its_limits() -> None:
    mine = {"TRAINBUS_MEMORY_FRACTION": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "OMP_NUM_THREADS": "64"}
    found = environment(place(), resources={"share": 0.25}, env=mine)
    assert (found["TRAINBUS_MEMORY_FRACTION"], found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == ("0.2250", "25")
    assert environment(place(gpus=()), resources={"share": 0.25}, env=mine)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "per_process_memory_fraction:0.4750"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"},
            "expandable_segments:True,roundup_power2_divisions:[256:1,512:2],per_process_memory_fraction:0.4750",
        ),
        ({"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:1.0"}, "per_process_memory_fraction:0.4750"),
    ],
)
def test_command_limits_torchs_allocator(env: dict[str, str], expected: str) -> None:
    found = environment(place(), resources={"share": 0.5}, env=env)
    assert found["PYTORCH_ALLOC_CONF"] == found["PYTORCH_CUDA_ALLOC_CONF"] == expected
    assert "PYTORCH_ALLOC_CONF" not in environment(place(), resources={"share": 1})


@pytest.mark.parametrize(
    ("resources", "gpus", "threads"),
    [
        ({}, True, "4"),
        ({}, False, "1"),
        ({"cpus": 6}, True, "6"),
        ({"cpus": 2.5}, False, "2"),
        ({"share": 0.5}, True, "1"),
    ],
)
def test_threads_follow_the_requested_cpus(resources: dict[str, Any], gpus: bool, threads: str) -> None:
    where = place() if gpus else place(gpus=())
    assert environment(where, resources=resources)["OMP_NUM_THREADS"] == threads


def test_rank_sees_its_own_mig_slice_only() -> None:
    cut_up = place(gpus=("MIG-a", "MIG-b"), profiles=("1g.10gb", "1g.10gb"))
    seen = [environment(cut_up, index, task="m:T", command=None, code={"uri": "s3://code/p", "sha256": "0" * 64},
                        training={"max_steps": 1})["CUDA_VISIBLE_DEVICES"] for index in (0, 1)]  # fmt: skip
    assert seen == ["MIG-b", "MIG-a"]
    assert environment(place(), resources={"share": 0})["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(place())["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def spec(**more: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "x", "command": ["true"], **more})


@pytest.mark.parametrize(
    ("request_", "slots", "problem"),
    [
        pytest.param(spec(), (0, 1), None, id="fits"),
        pytest.param(spec(), (0, 2), r"slots \[2\] are not on ", id="a slot that is not there"),
        pytest.param(spec(), (0, 0), "was given 2 ranks for slots", id="one slot twice"),
        pytest.param(spec(resources={"share": 0}), (0, 0), None, id="without a device any slots do"),
    ],
)
def test_slot_problems_are_reported(request_: RunSpec, slots: tuple[int, ...], problem: str | None) -> None:
    import re

    found = rank_environment.slot_problem(request_, Member(node_id="n", slots=slots, ranks=(0, 1)), 2)
    assert (found is None) if problem is None else (found is not None and re.search(problem, found))


@pytest.mark.parametrize(
    ("held", "fault", "why"),
    [
        pytest.param((), "in use", "60.0 GiB", id="no part is in use"),
        pytest.param((0.5, 0.25), "in use", "", id="others have it"),
        pytest.param((0.25,), "in use", "beyond the 25% that other runs have", id="more than others have"),
        pytest.param((0.25,), "ecc", "memory errors", id="its health is checked all the same"),
    ],
)
async def test_memory_of_other_shares_is_allowed(
    monkeypatch: pytest.MonkeyPatch, held: tuple[float, ...], fault: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fault))
    # A device in use gets no test computation: here its result would be wrong.
    check = GpuCheck(GPUS, WRONG if held else RIGHT, patience_s=0)
    if not why:
        await check.check((1,), {1: held})
        return
    with pytest.raises(UnfitDeviceError, match=why):
        await check.check((1,), {1: held})


def test_mps_is_used_where_its_daemon_listens(tmp_path: Path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert find_mps_pipe(None, environment) == ""
    (tmp_path / "control").touch()
    assert find_mps_pipe(None, environment) == str(tmp_path)
    assert find_mps_pipe("", environment) == ""


def test_trainer_limits_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: limits.append(arguments))
    limit_memory({"TRAINBUS_MEMORY_FRACTION": "0.475"}, torch.device("cpu"))
    limit_memory({}, torch.device("cuda", 0))
    assert limits == []
    limit_memory({"TRAINBUS_MEMORY_FRACTION": "0.475"}, torch.device("cuda", 0))
    assert limits == [(0.475, torch.device("cuda", 0))]


async def test_two_runs_share_a_slot(world: World, agent: Callable[..., Any]) -> None:
    service = await agent()
    half = {"resources": {"share": 0.5}}
    first = await world.place("r1", params={"steps": 100_000}, **half)
    await world.wait_for(RunStarted)
    await world.place("r2", params={"steps": 3}, **half)
    second = await world.wait_for(RunExited, "r2")
    assert second.outcome == "succeeded", second
    # The first one was not touched: it goes on to be stopped in its own time.
    assert await world.ends("r1") == []
    await world.place("r3", params={"steps": 3}, **half)
    assert (await world.wait_for(RunExited, "r3")).outcome == "succeeded"
    assert isinstance(first, RunPlaced)
    assert service.check_readiness()["joined"]
