"""Versions run with the packages of their runs, side by side. No package index is asked."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import mlflow
import pytest

from contracts.events.model import ModelDeployDelayed, ModelDeployed, ModelDeployFailed
from loadtest.served_models import TASK, draw_rows
from services.kit.packages.package_environment import PackageEnvironments, PackagesError
from tests.serving.conftest import House, wait_until
from tests.worker.wheels import offline_environment, write_wheel

pytestmark = pytest.mark.shell
ROW = draw_rows(1, seed=7)[0]
#: A model in MLflow's format that answers with the version of a package.
MODEL = """
import mlflow
import smile


class Smile(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input, params=None):
        return [smile.VERSION] * len(model_input)


mlflow.models.set_model(Smile())
"""


@pytest.fixture(autouse=True)
def only_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder of wheels be the only place of packages."""
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", "smile", version)
    for name, value in offline_environment(tmp_path / "wheels").items():
        if name != "PATH":
            monkeypatch.setenv(name, value)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What a script keeps: a model that needs ``smile``, with which MLflow saved what it needs."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "smile.py").write_text("VERSION = 'of the training'\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "saved"
    requirements = ["smile==2.0"]
    mlflow.pyfunc.save_model(folder, python_model=str(tmp_path / "model.py"), pip_requirements=requirements)
    return {
        f"model/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


async def keep(house: House, run_id: str, files: dict[str, bytes], requirements: str | None = None) -> Any:
    code = {"train.py": b""} | ({"requirements.txt": requirements.encode()} if requirements else {})
    house.runs[run_id] = await house.store.keep(run_id, {**files, "run.txt": run_id.encode()}, code)
    return await house.conclusion(await house.promote(run_id))


async def test_two_versions_have_the_packages_of_their_runs(house: House, kept: dict[str, bytes]) -> None:
    await keep(house, "old", kept, "smile==1.0\n")
    await keep(house, "new", kept, "smile==2.0\n")
    for version, expected in (("1", "1.0"), ("2", "2.0")):
        answer = await house.http.post(f"/predict?version={version}", json=[ROW])
        assert answer.json()["predictions"] == [{"prediction": expected}]


async def test_without_packages_of_the_run_those_of_the_mlflow_model_are_installed(
    house: House, kept: dict[str, bytes]
) -> None:
    await keep(house, "plain", kept)
    assert (await house.predict(ROW))["predictions"] == [{"prediction": "2.0"}]


async def test_packages_that_cannot_be_had_are_the_reason(house: House, kept: dict[str, bytes]) -> None:
    fact = await keep(house, "bad", kept, "smile==9.0\n")
    assert isinstance(fact, ModelDeployFailed)
    assert fact.stage == "environment"
    assert "requirements.txt, line 1 (smile==9.0)" in fact.reason


@pytest.mark.parametrize(
    "failure",
    [PackagesError("the index does not answer", permanent=False), OSError(errno.ENOSPC, "No space left on device")],
)
async def test_packages_that_this_host_cannot_get_now_are_tried_again(
    house: House, kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr("services.serving.deployer.HOST_RETRY_DELAYS_S", (0.01,))
    failures, prepare = [failure], PackageEnvironments.prepare

    async def fail_once(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await prepare(*arguments, **options)

    monkeypatch.setattr(PackageEnvironments, "prepare", fail_once)
    assert isinstance(await keep(house, "good", kept, "smile==1.0\n"), ModelDeployed)
    (delay,) = await house.find_facts(ModelDeployDelayed)
    assert delay.stage == "environment"


async def test_a_task_has_the_packages_of_its_project(house: House) -> None:
    task = TASK.replace("import torch\n", 'import smile\nimport torch\n\nassert smile.VERSION == "1.0"\n', 1)
    code = {"sums_task.py": task.encode(), "requirements.txt": b"smile==1.0\n"}
    house.store.use_code(await house.store.write_code(code))
    assert (await house.deploy("r1")).golden_samples == 32
    links = list(house.settings.data_dir.glob("models/sums/*/packages"))
    assert [link.is_symlink() for link in links] == [True]


async def test_after_a_restart_no_store_and_no_index_is_asked(
    start_house: Any, kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep(await start_house(), "old", kept, "smile==1.0\n")
    await start_house.stop_all()
    monkeypatch.delenv("PIP_FIND_LINKS")
    again: House = await start_house(s3_endpoint="http://127.0.0.1:9")
    await wait_until(lambda: again.service.check_readiness()["folded"], "folded")
    await again.wait_ready()
    assert (await again.predict(ROW))["predictions"] == [{"prediction": "1.0"}]
