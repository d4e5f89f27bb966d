"""The agent and the real warm server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from services.kit.clock import boot_s
from services.kit.concurrency import cancel_and_wait
from services.kit.socket_files import socket_path
from services.kit.warm_server import WarmServer
from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch.executor import PYTHON_ROOT, ProcessExecutor, read_exit
from tests.worker.conftest import until

pytestmark = pytest.mark.shell


async def test_ranks_are_forked_and_a_killed_warm_server_restarts(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PYTHON_ROOT), "OMP_NUM_THREADS": "1"}
    warm = WarmServer(socket_path(tmp_path, "warm.sock"), tmp_path / "warm.log", environment)
    executor = ProcessExecutor(warm, rank_command=("/bin/false",))
    keeping = asyncio.create_task(warm.run())
    try:
        for life in range(2):
            await until(lambda: warm.is_ready, 60)
            pid = warm.pid
            assert pid is not None
            folder = tmp_path / f"g{life}"
            folder.mkdir()
            # Without a launch the rank says so and ends: that is all that is wanted of it here.
            process = await executor.start(ProcessSpec(0, None, environment), folder, tmp_path)
            await until(lambda process=process: not executor.is_alive(process), 60)
            found = read_exit(folder, 0)
            assert found is not None
            assert found[0] == 1
            assert "TRAINBUS_LAUNCH" in (folder / "rank_0.log").read_text()
            process = await executor.start(ProcessSpec(1, None, environment), folder, tmp_path, boot_s() - 0.1)
            await until(lambda process=process: not executor.is_alive(process), 60)
            assert read_exit(folder, 1) is None, "it was started although the agent came too late"
            if life == 0:
                psutil.Process(pid).kill()
                await until(lambda: not warm.is_ready, 60)
    finally:
        await cancel_and_wait(keeping)
        await executor.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("environment", "can_fork"),
    [
        pytest.param({"MODE": "x", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, True, id="read later by any library"),
        pytest.param({"ATEN_CPU_CAPABILITY": "avx2"}, False, id="read when torch is loaded"),
        pytest.param({"ATEN_CPU_CAPABILITY": "default"}, True, id="the warm process has loaded it with the same"),
        pytest.param({"TORCH_LOGS": "all"}, False, id="of torch, and perhaps read at once"),
        pytest.param({"TORCH_FR_BUFFER_SIZE": "9", "TORCH_NCCL_BLOCKING_WAIT": "1"}, True, id="read when ranks meet"),
    ],
)
def test_fork_needs_equal_import_time_variables(environment: dict[str, str], can_fork: bool) -> None:
    warm = WarmServer(Path("warm.sock"), Path("warm.log"), {"ATEN_CPU_CAPABILITY": "default"})
    assert ProcessExecutor(warm)._can_fork(ProcessSpec(0, None, environment)) is can_fork
