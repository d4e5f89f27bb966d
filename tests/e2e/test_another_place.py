"""A stack used from another place: by curl alone, and by the client's wheel in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainbus.embedded.launch import StackInfo, StackProcess
from trainbus.embedded.layout import StackOptions

pytestmark = [pytest.mark.e2e, pytest.mark.shell]

ROOT = Path(__file__).parent.parent.parent
MAX_CLIENT_BYTES = 60_000_000
#: What no client may bring: each is larger than all of it may be, or belongs to a service.
HEAVY = {
    "torch", "numpy", "pyarrow", "mlflow", "aioboto3", "botocore", "faststream", "fastapi", "nats-py",
    "sqlalchemy", "polars", "structlog", "prometheus-client", "pydantic-settings", "blake3", "google-re2",
}  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackInfo]:
    data_dir = tmp_path_factory.mktemp("stack")
    options = StackOptions(data_dir, nodes=1, slots=1, without=("ingestion", "sharding", "evaluation"))
    with StackProcess(options, output=data_dir / "supervisor.log") as process:
        yield process.wait_ready()


def plain_environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINBUS_", "PYTHON"))}
    return inherited | variables


def test_the_page_on_http_works_line_by_line(stack: StackInfo, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/http.md").read_text(), re.DOTALL | re.MULTILINE)
    script = "\n".join(blocks)
    done = subprocess.run(
        ["bash", "-xeuo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=plain_environment(TRAINBUS_GATEWAY_URL=stack.gateway_url),
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "parameters: {" in done.stdout
    assert "event: completed" in done.stdout
    assert "event: cancelled" in done.stdout
    assert json.loads((tmp_path / "model.json").read_text()) == {"weight": 0.5}
    assert (tmp_path / "code.tar.gz").read_bytes() == (tmp_path / "project.tar.gz").read_bytes()


def test_the_page_on_http_has_every_route(stack: StackInfo) -> None:
    import httpx

    page = re.sub(r"\$[A-Z]+|[A-Z]{2,}\b", "{}", (ROOT / "docs/http.md").read_text())
    paths = httpx.get(f"{stack.gateway_url}/openapi.json", timeout=30).json()["paths"]
    plain = {re.sub(r"\{\w+\}", "{}", path) for path in paths}
    missing = {path for path in plain if path not in page.replace("/last/", "/{}/").replace("/model.json", "/{}")}
    assert missing == set()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel and what its metadata names, at the versions that are installed here."""
    folder = tmp_path_factory.mktemp("client")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("contracts", "services", "trainbus"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], check=True, timeout=300
    )
    (wheel,) = folder.glob("trainbus-*.whl")
    venv.create(folder / "venv")
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", packages, wheel], check=True, timeout=300)
    (metadata,) = packages.glob("trainbus-*.dist-info")
    copy_requirements(PathDistribution(metadata), "client", packages)
    return folder / "venv"


def copy_requirements(wanted: Distribution, extra: str, target: Path) -> None:
    """Copy the files of everything that a package needs with an extra into ``target``."""
    todo, copied = list(requirements_of(wanted, {extra})), set[tuple[str, ...]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in copied:
            continue
        copied.add((name, *requirement.extras))
        found = distribution(name)
        todo += requirements_of(found, requirement.extras)
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(found.locate_file(file)), target / file)
    assert not {name for name, *_ in copied} & HEAVY


def requirements_of(found: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in found.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


def test_the_client_is_small(client: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in client.rglob("*") if path.is_file() and not path.is_symlink())
    assert size_bytes < MAX_CLIENT_BYTES


def test_the_client_writes_projects_and_explains_a_task_without_torch(client: Path, tmp_path: Path) -> None:
    for arguments in (("init", "stub", "--kind", "regression"), ("task", "loss")):
        command = [str(client / "bin" / "python"), "-m", "trainbus", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=plain_environment(), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert "return cross_entropy(model(images), labels)" in done.stdout
    assert (tmp_path / "stub" / "task.py").exists()


def test_the_client_submits_and_follows(client: Path, stack: StackInfo, tmp_path: Path) -> None:
    project = tmp_path / "hello"
    project.mkdir()
    (project / "train.py").write_text("print('trained', flush=True)\n")
    elsewhere = plain_environment(TRAINBUS_GATEWAY_URL=stack.gateway_url)

    def trainbus(*arguments: str) -> str:
        command = [str(client / "bin" / "python"), "-m", "trainbus", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=elsewhere, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "submit" in trainbus("--help")
    trainbus("submit", "hello", "--command", "python train.py", "--follow")
    assert "completed" in trainbus("ps")
    assert "trained" in trainbus("logs", "hello")
    trainbus("doctor")
    for arguments, extra in ((("up",), "all"), (("dead-letters", "ls"), "operate"), (("scheduler",), "operate")):
        refused = subprocess.run(
            [str(client / "bin" / "python"), "-m", "trainbus", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env=elsewhere,
            cwd=tmp_path,
        )
        assert refused.returncode == 2
        assert f"pip install 'trainbus[{extra}]'" in refused.stderr
