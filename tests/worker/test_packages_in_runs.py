"""Runs with packages of their own, through the agent: commands at once, a Task forked warm, a failure for good."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.events.run import RunExited, RunStarted
from contracts.ranks import PACKAGES_DIR_VARIABLE
from services.kit.concurrency import cancel_and_wait
from services.kit.socket_files import socket_path
from services.kit.warm_server import WarmServer
from services.worker import app, metrics
from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch.executor import PYTHON_ROOT, ProcessExecutor
from services.worker.settings import WorkerSettings
from tests.trainbus.support import LINEAR_TASK
from tests.worker.conftest import World, package, until
from tests.worker.test_real_ranks import prepare
from tests.worker.wheels import offline_environment, write_wheel

pytestmark = pytest.mark.shell

#: Ends well if it has the version that it is told, while the other run has its own.
own_warm_server = app._warm_server
SCRIPT = """
import pathlib, sys, time
import smile
version, folder = sys.argv[1], pathlib.Path(sys.argv[2])
assert smile.VERSION == version, smile.VERSION
(folder / version).touch()
deadline = time.monotonic() + 120
while len(list(folder.iterdir())) < 2:
    assert time.monotonic() < deadline, "the other run did not start"
    time.sleep(0.05)
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    write_wheel(folder, "smile", "1.0")
    write_wheel(folder, "smile", "2.0")
    for name, value in offline_environment(folder).items():
        if name.startswith("PIP_"):
            monkeypatch.setenv(name, value)
    return folder


async def upload(world: World, files: dict[str, str]) -> dict[str, str]:
    await world.upload_code(package({name: text.encode() for name, text in files.items()}))
    return world.code


async def test_two_commands_have_two_versions_at_once(world: World, wheels: Path, tmp_path: Path, agent: Any) -> None:
    await agent()
    met = tmp_path / "met"
    met.mkdir()
    for slot, version in enumerate(("1.0", "2.0")):
        code = await upload(world, {"train.py": SCRIPT, "requirements.txt": f"smile=={version}\n"})
        command = ["python", "train.py", version, str(met)]
        await world.place(f"r{slot}", slots=(slot,), command=command, code=code)
    for slot in range(2):
        exited: Any = await world.wait_for(RunExited, f"r{slot}", timeout_s=150)
        assert exited.outcome == "succeeded", exited


async def test_a_command_imports_its_own_package_from_src(world: World, agent: Any) -> None:
    await agent()
    files = {
        "pyproject.toml": '[project]\nname = "own"\nversion = "1"\n',
        "src/own/__init__.py": "",
        "src/own/train.py": "import parts\n",
        "requirements.txt": "-e .\n",
        "libs/parts/pyproject.toml": '[project]\nname = "parts"\nversion = "1"\n',
        "libs/parts/parts.py": "",
    }
    code = await upload(world, files)
    await world.place("r0", command=["python", "-m", "own.train"], code=code)
    lacking: Any = await world.wait_for(RunExited, "r0")
    assert lacking.reason.startswith("ModuleNotFoundError: No module named 'parts'"), lacking
    code = await upload(world, files | {"requirements.txt": "-e .\n-e libs/parts\n"})
    await world.place("r1", command=["python", "-m", "own.train"], code=code)
    exited: Any = await world.wait_for(RunExited, "r1")
    assert exited.outcome == "succeeded", exited


async def test_requirement_that_nobody_has_fails_for_good(world: World, wheels: Path, agent: Any) -> None:
    await agent()
    code = await upload(world, {"train.py": "", "requirements.txt": "smile==99\n"})
    await world.place(command=["python", "train.py"], code=code)
    exited: Any = await world.wait_for(RunExited)
    assert (exited.outcome, exited.permanent, exited.infrastructure_failure) == ("failed", True, False)
    assert exited.reason.startswith("packages: requirements.txt, line 1 (smile==99): ")


async def test_task_is_forked_with_its_packages_and_their_hash_is_in_its_environment(
    world: World, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = await prepare(world, tmp_path / "dataset")
    task = "import smile\nassert smile.VERSION == '1.0'\n" + LINEAR_TASK
    code = await upload(world, {"task.py": task, "requirements.txt": "smile<2\ntorch\n"})
    servers: list[WarmServer] = []

    def make_warm_server(settings: WorkerSettings, cache_home: str) -> WarmServer:
        servers.append(own_warm_server(settings, cache_home))
        return servers[0]

    monkeypatch.setattr(app, "_warm_server", make_warm_server)
    service = app.build(world.settings.model_copy(update={"warm": True, "commit_timeout_s": 10.0}))
    forked = metrics.RANK_STARTS.labels("warm")._value.get()
    running = asyncio.create_task(service.run())
    committing = asyncio.create_task(world.commit_all())
    try:
        await until(lambda: service.check_readiness().get("joined", False), 90)
        await until(lambda: servers[0].is_ready, 90)
        training = {"max_steps": 4, "global_batch": 16}
        await world.place(task="task:Linear", dataset=prepared, training=training, code=code)
        started: Any = await world.wait_for(RunStarted, timeout_s=120)
        exited: Any = await world.wait_for(RunExited, timeout_s=120)
        assert exited.outcome == "succeeded", exited
        (installed,) = (world.settings.data_dir.resolve() / "cache" / "packages" / "installed").iterdir()
        assert started.environment["packages"] == installed.name[:16]
        assert metrics.RANK_STARTS.labels("warm")._value.get() == forked + 1
    finally:
        service.stopping.set()
        await asyncio.wait_for(running, 90)
        await cancel_and_wait(committing)


async def test_packages_that_the_warm_server_has_imported_start_cold(tmp_path: Path) -> None:
    own = tmp_path / "own"
    shadowing = tmp_path / "shadowing"
    (own / "smile").mkdir(parents=True)
    (shadowing / "safetensors").mkdir(parents=True)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PYTHON_ROOT), "OMP_NUM_THREADS": "1"}
    warm = WarmServer(socket_path(tmp_path, "warm.sock"), tmp_path / "warm.log", environment)
    executor = ProcessExecutor(warm, rank_command=("/bin/echo", "started cold"))
    keeping = asyncio.create_task(warm.run())
    try:
        await until(lambda: warm.is_ready, 90)
        for folder, line in ((own, "TRAINBUS_LAUNCH"), (shadowing, "started cold")):
            start = ProcessSpec(0, None, {**environment, PACKAGES_DIR_VARIABLE: str(folder)})
            process = await executor.start(start, folder, tmp_path)
            await until(lambda process=process: not executor.is_alive(process), 60)
            assert line in (folder / "rank_0.log").read_text()
    finally:
        await cancel_and_wait(keeping)
        await executor.close()
