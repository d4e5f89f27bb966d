"""The same over HTTP: a real ``mlflow server``, killed in the middle, and files copied from a real S3."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.events.run import Artifact, RunEvaluated
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.tracking.settings import TrackingSettings
from services.tracking.store import Store
from tests.tracking.conftest import World, copy_database, eventually, task_spec
from tests.tracking.test_service import SURVIVING, publish_killed_run
from trainbus.embedded.servers import Server

#: Generous: under load the server needs a minute for what it does in six seconds alone.
START_S = 300.0


class MlflowServer(Server):
    """``mlflow server`` with one worker."""

    name = "mlflow"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"),
            *("--artifacts-destination", str(self.folder / "artifacts")),
        ]

    def environment(self) -> dict[str, str]:
        return {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=0.5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """The server is a tree of processes in a session of its own: all of it goes."""
        assert self.process is not None
        os.killpg(self.process.pid, 9)
        super().kill()


@pytest.fixture
def server(tmp_path: Path, template: Path) -> Iterator[MlflowServer]:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    (folder / "mlflow.db").write_bytes(template.read_bytes())
    server = MlflowServer(folder, free_ports(1)[0])
    server.spawn()
    server.wait_ready(START_S)
    yield server
    if server.process is not None:
        server.kill()


@pytest.mark.e2e
async def test_a_server_that_is_killed_loses_and_doubles_nothing(
    bus: Bus, settings: Settings, server: MlflowServer, running: Callable[..., Awaitable[Any]]
) -> None:
    mine = TrackingSettings(
        **settings.model_dump() | {"mlflow_tracking_uri": server.url, "retry_first_s": 0.05, "retry_max_s": 0.2}
    )
    store = Store(mine.tracking_uri, mine.artifact_location)
    service = await running(mine, store)
    world = World(bus, mine, store)
    story = await publish_killed_run(world, settle=True)
    await world.settled()
    server.kill()
    await story.progress(2, range(41, 46))
    await story.committed(2, 45)

    async def unready() -> bool:
        return not service.check_readiness()["mlflow"]

    await eventually(unready)
    server.spawn()
    await asyncio.to_thread(server.wait_ready, START_S)
    await story.again()
    await story.completed(2)
    # Big parameters in one call would be over MLflow's 1 MB a request.
    big = world.story("big", task_spec(params={f"p{number}": "ü" * 4000 for number in range(120)}))
    await big.accepted()
    await world.settled()
    (page,) = world.pages()
    assert world.series(page) == SURVIVING + [(step, 2 + step / 1000) for step in range(41, 46)]
    assert page.info.status == "FINISHED"
    assert len([name for name in world.pages("big")[0].data.params if name.startswith("params.p")]) == 120


async def test_small_files_are_copied_and_large_ones_linked(
    bus: Bus,
    s3_settings: Settings,
    objects: ObjectStore,
    template: Path,
    running: Callable[..., Awaitable[Any]],
) -> None:
    settings = TrackingSettings(**s3_settings.model_dump() | {"artifact_max_bytes": 100})
    copy_database(template, settings.data_dir)
    store = Store(settings.tracking_uri, settings.artifact_location)
    await running(settings, store)
    world = World(bus, settings, store)

    async def artifact(name: str, body: bytes, sha256: str = "") -> Artifact:
        uri = f"s3://{settings.bucket_models}/{name}"
        await objects.put(uri, body)
        digest = sha256 or hashlib.sha256(body).hexdigest()
        return Artifact(name=name, uri=uri, sha256=digest, size_bytes=len(body))

    story = world.story()
    await story.accepted()
    await story.placed(1)
    small, large = await artifact("out/model.txt", b"weights"), await artifact("large.bin", b"x" * 101)
    wrong = await artifact("wrong.txt", b"tampered", "00" * 32)
    await story.completed(1, artifacts=(small, large, wrong))
    report = (await artifact("report.md", b"| a | b |"),)
    await story.publish(RunEvaluated(run_id="r1", evaluation_run_id="e1", metrics={"accuracy": 0.5}, report=report))
    await world.settled()
    (page,) = world.pages()

    def files(folder: str) -> list[str]:
        return sorted(each.path for each in world.client.list_artifacts(page.info.run_id, folder))

    assert files("artifacts/out") == ["artifacts/out/model.txt"]
    assert files("artifacts") == ["artifacts/out"]
    assert files("evaluation") == ["evaluation/report.md"]
    assert page.data.tags["trainbus.artifact.large.bin"] == large.uri
    assert page.data.metrics == {"test/accuracy": 0.5}
    # Everything is under the data folder; nothing was made where the service happened to be started.
    assert str(settings.data_dir) in page.info.artifact_uri
