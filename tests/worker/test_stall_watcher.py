"""A rank without progress is reported once, with the stacks of all ranks, and no rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.base import Fact
from contracts.events.run import RunStalled
from contracts.progress import ring_name
from services.worker.core.stall_detector import FIRST_STEPS_FACTOR, StallDetector
from services.worker.launch.processes import RankProcess
from services.worker.node.inventory import describe_machine
from services.worker.ranks import stall_dumps
from services.worker.ranks.stall_watcher import StallWatcher
from tests.manual_clock import ManualClock
from tests.worker.conftest import World, until
from tests.worker.test_journal_follower import Bus, follower


def test_rank_at_the_lowest_step_is_reported_once_a_silence() -> None:
    watch = StallDetector(factor=10, min_s=5)
    for step in range(1, 6):
        for rank in (0, 1):
            watch.add_beat(rank, step, step, float(step))
    assert watch.allowed_s == 10  # ten times a step of one second
    # Rank 0 goes into its next step, rank 1 does not.
    watch.add_beat(0, 6, 5, 5.5)
    assert watch.find_stall(15.0) is None
    stall = watch.find_stall(15.6)
    assert stall is not None
    assert (stall.rank, stall.step, stall.median_step_s) == (1, 5, 1.0)
    assert watch.find_stall(100.0) is None  # said already
    # It goes on, and is silent once more; this time the system has stopped the other one.
    watch.add_beat(1, 6, 6, 101.0)
    watch.add_beat(0, 7, 6, 101.0)
    again = watch.find_stall(500.0, stopped=frozenset({0}))
    assert again is not None
    assert again.rank == 0


def test_first_steps_and_heartbeats_are_no_stall() -> None:
    watch = StallDetector(factor=10, min_s=5)
    watch.add_beat(0, 1, 0, 0.0)
    assert watch.find_stall(5 * FIRST_STEPS_FACTOR - 1) is None
    for mark in range(2, 50):  # a long validation: no step, but signs of life
        watch.add_beat(0, mark, 0, mark * 40.0)
        assert watch.find_stall(mark * 40.0 + 39) is None


RANK = """
import faulthandler, pathlib, signal, sys, time
from trainbus.agent_link.channels import Journal
folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(folder / f"rank_{rank}.jsonl")
faulthandler.register(signal.SIGUSR2, file=(folder / f"rank_{rank}.stacks").open("a"))
for step in range(1, 8):
    journal.heartbeat(step)
    time.sleep(0.05)
def wait_for_the_others():
    print("up", flush=True)
    time.sleep(600)
wait_for_the_others()
"""


@pytest.mark.parametrize("py_spy", [True, False], ids=["py-spy", "the process itself"])
async def test_stacks_of_all_ranks_are_reported_and_no_rank_ends(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, py_spy: bool
) -> None:
    if not py_spy:
        monkeypatch.setattr(stall_dumps, "_dump_by_py_spy", lambda pid, *, stopped: "")
    placed = await world.place(slots=(0, 1), watch={"stall_min_s": 0.2, "stall_factor": 2}, params={})
    children = [
        subprocess.Popen(  # noqa: ASYNC220, it returns at once
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)], stdout=subprocess.PIPE, start_new_session=True
        )
        for rank in (0, 1)
    ]
    try:
        bus = Bus()

        async def publish(fact: Fact) -> None:
            await bus.publish(fact)

        processes = [RankProcess(rank, child.pid, 0.0, 0.0) for rank, child in enumerate(children)]
        following = follower(tmp_path, bus, ManualClock())
        watcher = StallWatcher(placed, "n1", tmp_path, following, lambda: processes, publish, lambda: False)
        await until(lambda: all((tmp_path / ring_name(rank)).exists() for rank in (0, 1)), 30)
        for child in children:
            assert child.stdout is not None
            await asyncio.to_thread(child.stdout.readline)
        await asyncio.to_thread(os.kill, children[1].pid, signal.SIGSTOP)
        await until(lambda: stall_dumps.is_stopped(children[1].pid), 30)
        # A minute later both are silent, and of these the stopped one is to be named.
        await watcher.check(time.monotonic() + 60)
        (stalled,) = bus.stored
        assert isinstance(stalled, RunStalled)
        assert (stalled.rank, stalled.step, set(stalled.stacks)) == (1, 7, {"0", "1"})
        assert "wait_for_the_others" in stalled.stacks["0"]
        assert "state T" in stalled.stacks["1"]
        assert [child.poll() for child in children] == [None, None]
    finally:
        for child in children:
            child.kill()
            child.wait()


X86 = "vendor_id\t: GenuineIntel\nmodel\t\t: 143\nstepping: 8\nflags\t: fpu avx2 avx512f amx_bf16 fma ht\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"


@pytest.mark.parametrize(
    ("cpuinfo", "isa", "model"),
    [
        pytest.param(X86, "amx_bf16 avx2 avx512f fma", "143", id="x86"),
        pytest.param(ARM, "asimd bf16 sve", "0xd40", id="arm"),
    ],
)
def test_machine_description_has_what_decides_last_bits(tmp_path: Path, cpuinfo: str, isa: str, model: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    found = describe_machine(cpuinfo=path)
    assert (found["cpu.isa"], found["cpu.model"]) == (isa, model)
    path.write_text(cpuinfo * 8)  # more cores are no other machine
    assert describe_machine(cpuinfo=path) == found
    assert {"torch", "numpy", "arch"} <= set(found)
