"""A node whose home folder cannot be written: runs start and finish, and libraries have a place for their caches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from contracts.events.run import RunExited
from services.worker.app import build
from services.worker.core import rank_environment
from services.worker.node.home import find_cache_home
from tests.trainbus.support import LINEAR_TASK
from tests.worker.conftest import World, package, until
from tests.worker.test_core import placed
from tests.worker.test_real_ranks import prepare

#: Nobody can make a file there, root included.
UNWRITABLE = "/proc"


@pytest.mark.parametrize("home", [UNWRITABLE, "/proc/nowhere", ""])
def test_caches_lie_beside_the_nodes_data_where_the_home_folder_cannot_be_written(home: str, tmp_path: Path) -> None:
    assert find_cache_home({"HOME": home} if home else {}, tmp_path) == str(tmp_path / "home")
    assert (tmp_path / "home").is_dir()


def test_a_home_folder_that_can_be_written_is_used(tmp_path: Path) -> None:
    assert find_cache_home({"HOME": str(tmp_path)}, tmp_path / "data") == ""
    assert list(tmp_path.iterdir()) == []


def test_the_requests_own_cache_folders_hold() -> None:
    place = rank_environment.NodeEnvironment("/l.json", "h", 29, (), "/venv/bin", 8, 2, cache_home="/data/home")
    event = placed(env={"MPLCONFIGDIR": "/mine"})
    found = rank_environment.build_environment(event, event.members[0], 0, {"HOME": "/home/ro"}, place)
    assert (found["HOME"], found["XDG_CACHE_HOME"]) == ("/home/ro", "/data/home/.cache")
    assert found["MPLCONFIGDIR"] == "/mine"


async def test_a_run_starts_and_finishes_without_a_home_folder_that_can_be_written(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    # As libraries do: what has no place for its cache fails.
    cache = "import os\nhome = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')\n"
    cache += "os.makedirs(os.path.join(home, 'x'))\n"
    await world.upload_code(package({"task.py": (cache + LINEAR_TASK).encode()}))
    monkeypatch.setenv("HOME", UNWRITABLE)
    service = build(world.settings.model_copy(update={"warm": True}))
    running = asyncio.create_task(service.run())
    committing = asyncio.create_task(world.commit_all())
    try:
        await until(lambda: service.check_readiness().get("joined", False), 90)
        training = {"max_steps": 3, "global_batch": 16}
        await world.place(task="task:Linear", dataset=prepared, training=training)
        exited = await world.wait_for(RunExited)
        assert (exited.outcome, exited.step) == ("succeeded", 3), exited
        assert (world.settings.data_dir / "home" / ".cache" / "x").is_dir()
    finally:
        committing.cancel()
        service.stopping.set()
        await asyncio.wait_for(running, 90)
