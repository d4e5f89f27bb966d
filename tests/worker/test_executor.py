"""The executor on a machine that hides the environments of processes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from structlog.testing import CapturingLogger

from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch import executor as executor_module
from services.worker.launch.executor import ProcessExecutor
from tests.worker.conftest import until

pytestmark = pytest.mark.shell


async def test_ranks_are_swept_where_environments_cannot_be_read_which_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "environ", refuse)
    executor = ProcessExecutor()
    # The second of each waits in the background: in the session of its rank, and after its end by its log alone.
    command = ("/bin/sh", "-c", "sleep 600 & setsid sleep 600 & wait")
    log = CapturingLogger()
    monkeypatch.setattr(executor_module, "log", log)
    ranks = [await executor.start(ProcessSpec(rank, command, dict(os.environ)), tmp_path, tmp_path) for rank in (0, 1)]
    warnings = [call.args[0] for call in log.calls if call.method_name == "warning"]
    assert len(warnings) == 1
    assert "may outlive its run" in warnings[0]
    trees = [psutil.Process(rank.pid) for rank in ranks]
    await until(lambda: all(names(tree).count("sleep") == 2 for tree in trees), 60)
    everything = [each for tree in trees for each in (tree, *tree.children(recursive=True))]
    assert await executor.sweep(tmp_path, ranks) >= len(everything)
    psutil.wait_procs(everything, timeout=60)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in everything)


def names(process: psutil.Process) -> list[str]:
    return [each.name() for each in process.children(recursive=True)]
