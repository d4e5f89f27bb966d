"""A project's packages: found, resolved once, locked by hash, installed whole, shared, evicted. No index is asked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.disk_space import DISK_FULL
from contracts.spec.run import Packages
from services.kit.packages.package_environment import PackageEnvironments, PackagesError, find_requirements
from services.kit.packages.requirement_lock import explain_error, is_transient, parse_lock, redact
from services.kit.packages.uv_process import has_no_index, installer_environment
from services.kit.store.errors import ObjectExists, ObjectNotFound
from tests.small_disk import file_system, fill
from tests.worker.wheels import offline_environment, write_wheel

pytestmark = pytest.mark.shell
GIB = 2**30


class MemoryObjects:
    """The part of an object store that locks use."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def get(self, uri: str) -> bytes:
        if uri not in self.objects:
            raise ObjectNotFound(uri)
        return self.objects[uri]

    async def put(self, uri: str, body: bytes, *, if_absent: bool = False, content_type: str = "") -> None:
        if if_absent and uri in self.objects:
            raise ObjectExists(uri)
        self.objects[uri] = body


class Node:
    """A node with packages of its own, and the projects that it runs."""

    def __init__(self, folder: Path, objects: MemoryObjects, wheels: Path, max_bytes: int = GIB) -> None:
        self.folder, self.wheels = folder, wheels
        self.environments = PackageEnvironments(
            folder / "packages",
            folder / "runs",
            objects,  # type: ignore[arg-type]
            "code",
            max_bytes=max_bytes,
            timeout_s=300,
            environment=offline_environment(wheels),
        )
        self._runs = 0

    async def prepare(
        self, files: dict[str, str], asked: Packages | None = None, *, is_task: bool = False, run: str | None = None
    ) -> Path | None:
        self._runs += 1
        generation = self.folder / "runs" / (run or f"r{self._runs}") / "g1"
        code = generation / "code"
        for name, text in files.items():
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            (code / name).write_text(text)
        return await self.environments.prepare(code, generation, asked or Packages(), is_task=is_task)

    def end(self, run: str) -> None:
        (self.folder / "runs" / run / "g1" / "done.json").write_text("{}")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    for version in ("1.0", "2.0"):
        write_wheel(folder, "smile", version, requires=("grin>=1",))
    write_wheel(folder, "grin", "1.1")
    return folder


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def node(tmp_path: Path, wheels: Path, objects: MemoryObjects) -> Node:
    return Node(tmp_path / "node", objects, wheels)


def imported_version(folder: Path, module: str) -> str:
    code = f"import {module}; print({module}.VERSION)"
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    ).stdout.strip()


async def test_requirements_are_installed_with_what_they_need(node: Node) -> None:
    folder = await node.prepare({"requirements.txt": "smile<2  # an old one\n"})
    assert folder is not None
    assert (imported_version(folder, "smile"), imported_version(folder, "grin")) == ("1.0", "1.1")
    assert not list(folder.parent.glob(".*"))


async def test_a_full_disk_is_not_the_project_s_fault(tmp_path: Path, wheels: Path, objects: MemoryObjects) -> None:
    with file_system(tmp_path / "disk", "1m") as disk:
        node = Node(disk / "node", objects, wheels)
        filler = fill(disk)
        os.truncate(filler, filler.stat().st_size - 12 * 1024)  # enough to begin
        with pytest.raises(OSError, match="No space left on device") as caught:
            await node.prepare({"requirements.txt": "smile\n"})
        assert caught.value.errno in DISK_FULL


async def test_two_versions_lie_side_by_side_and_equal_locks_are_shared(node: Node) -> None:
    old = await node.prepare({"requirements.txt": "smile==1.0\n"})
    new = await node.prepare({"requirements.txt": "smile==2.0\n"})
    again = await node.prepare({"requirements.txt": "# another text\nsmile==2.0\n"})
    assert old is not None
    assert new is not None
    assert (imported_version(old, "smile"), imported_version(new, "smile")) == ("1.0", "2.0")
    assert again == new


async def test_lock_of_the_first_node_holds_on_others_and_later(
    node: Node, objects: MemoryObjects, tmp_path: Path, wheels: Path
) -> None:
    first = await node.prepare({"requirements.txt": "smile\n"})
    write_wheel(wheels, "smile", "3.0")
    other = Node(tmp_path / "other", objects, wheels)
    assert first is not None
    elsewhere = await other.prepare({"requirements.txt": "smile\n"})
    assert elsewhere is not None
    assert elsewhere.name == first.name
    assert imported_version(elsewhere, "smile") == "2.0"
    (lock,) = objects.objects.values()
    assert all(entry.has_hash for entry in parse_lock(lock.decode()))


async def test_changed_wheel_is_refused(node: Node, objects: MemoryObjects, tmp_path: Path, wheels: Path) -> None:
    await node.prepare({"requirements.txt": "smile==2.0\n"})
    write_wheel(wheels, "smile", "2.0", module="VERSION = 'evil'\n")
    other = Node(tmp_path / "other", objects, wheels)
    with pytest.raises(PackagesError, match=r"[Hh]ash"):
        await other.prepare({"requirements.txt": "smile==2.0\n"})


async def test_installed_packages_need_no_index(node: Node, wheels: Path) -> None:
    first = await node.prepare({"requirements.txt": "smile\n"})
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert await node.prepare({"requirements.txt": "smile\n"}) == first


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"requirements.txt": "torch\nnumpy>=1.20\n"}, id="requirements"),
        pytest.param(
            {"pyproject.toml": '[project]\nname = "p"\nversion = "1"\ndependencies = ["torch"]\n'}, id="project"
        ),
        pytest.param({"pyproject.toml": "[tool.ruff]\nline-length = 100\n"}, id="no dependencies"),
        pytest.param({"requirements.txt": "# nothing yet\n"}, id="empty"),
        pytest.param({"train.py": "pass\n"}, id="no file"),
    ],
)
async def test_what_the_node_has_is_not_installed(node: Node, files: dict[str, str]) -> None:
    assert await node.prepare(files, is_task=True) is None


async def test_dependencies_of_a_pyproject_are_installed(node: Node) -> None:
    text = '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["smile~=1.0", "torch"]\n'
    folder = await node.prepare({"pyproject.toml": text})
    assert folder is not None
    assert imported_version(folder, "smile") == "1.0"
    assert not (folder / "torch").exists()


async def test_included_files_count(node: Node) -> None:
    files = {"requirements.txt": "-r more/base.txt\n", "more/base.txt": "smile\n-c limits.txt\n", "more/limits.txt": ""}
    new = await node.prepare(files)
    old = await node.prepare({**files, "more/limits.txt": "smile<2\n"})
    assert new is not None
    assert old is not None
    assert (imported_version(new, "smile"), imported_version(old, "smile")) == ("2.0", "1.0")


@pytest.mark.parametrize(("line", "folder"), [("-e .", ""), ("./libs/own", "libs/own/"), ("-r more.txt", "libs/own/")])
async def test_what_the_projects_own_folders_need_is_installed(node: Node, line: str, folder: str) -> None:
    project = '[project]\nname = "own"\nversion = "1"\ndependencies = ["{}"]\n'
    files = {"requirements.txt": f"{line}\n", f"{folder}src/own/__init__.py": "", "more.txt": "--editable ./libs/own\n"}
    old = await node.prepare({**files, f"{folder}pyproject.toml": project.format("smile<2")})
    # Another file of the project, and so another lock.
    new = await node.prepare({**files, f"{folder}pyproject.toml": project.format("smile")})
    assert old is not None
    assert new is not None
    assert (imported_version(old, "smile"), imported_version(new, "smile")) == ("1.0", "2.0")
    assert not (new / "own").exists()


async def test_project_may_say_that_the_node_is_enough(node: Node) -> None:
    assert await node.prepare({"requirements.txt": "no-such-package\n"}, Packages(source="node")) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        pytest.param(
            {"requirements.txt": "grin\nsmile==99\n"},
            r"requirements.txt, line 2 \(smile==99\): .*smile==99",
            id="version",
        ),
        pytest.param({"requirements.txt": "emoji\n"}, r"line 1 \(emoji\): emoji was not found", id="unknown"),
        pytest.param({"requirements.txt": "=== no\n"}, r"requirements.txt", id="syntax"),
        pytest.param({"requirements.txt": "-r ../../secrets.txt\n"}, "leads out of the project", id="outside"),
        pytest.param({"requirements.txt": "-r absent.txt\n"}, "absent.txt cannot be read", id="absent"),
        pytest.param({"requirements.txt": "torch==1.0\n"}, "The node has torch .*packages", id="another torch"),
        pytest.param({"pyproject.toml": "[project\n"}, "pyproject.toml is no TOML", id="toml"),
    ],
)
async def test_wrong_requirements_fail_for_good_with_their_line(node: Node, files: dict[str, str], reason: str) -> None:
    with pytest.raises(PackagesError, match=reason) as found:
        await node.prepare(files)
    assert found.value.permanent
    assert str(found.value).startswith("packages: ")


async def test_package_that_needs_another_torch_is_refused(node: Node, wheels: Path) -> None:
    write_wheel(wheels, "vision", "1.0", requires=("torch==1.0",))
    with pytest.raises(PackagesError, match="The node has torch"):
        await node.prepare({"requirements.txt": "vision\n"})


async def test_torch_of_the_project_is_installed_when_asked_for(node: Node, wheels: Path) -> None:
    write_wheel(wheels, "torch", "1.0")
    write_wheel(wheels, "vision", "1.0", requires=("torch==1.0",))
    folder = await node.prepare({"requirements.txt": "vision\n"}, Packages(torch="project"))
    assert folder is not None
    assert imported_version(folder, "torch") == "1.0"


async def test_task_cannot_replace_what_the_trainer_needs(node: Node, wheels: Path) -> None:
    write_wheel(wheels, "pydantic", "1.10")
    files = {"requirements.txt": "pydantic==1.10\n"}
    with pytest.raises(PackagesError, match="pydantic"):
        await node.prepare(files, is_task=True)
    folder = await node.prepare(files)
    assert folder is not None
    assert imported_version(folder, "pydantic") == "1.10"


def uv_lock(wheels: Path, *dependencies: str) -> dict[str, str]:
    """A project with the lock that uv writes for packages of an index."""
    names = [text.partition("=")[0] for text in dependencies]
    lines = ["version = 1", 'requires-python = ">=3.11"']
    for text in (*dependencies, "grin==1.1"):
        name, _, version = text.partition("==")
        wheel = wheels / f"{name}-{version}-py3-none-any.whl"
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
        url = f"https://index.test/{wheel.name}"
        lines += ["[[package]]", f'name = "{name}"', f'version = "{version}"']
        lines += ['source = { registry = "https://index.test/simple" }']
        lines += ['dependencies = [{ name = "grin" }]'] if name == "smile" else []
        lines += [f'wheels = [{{ url = "{url}", hash = "sha256:{sha256}" }}]']
    listed = ", ".join(f'{{ name = "{name}" }}' for name in names)
    lines += ["[[package]]", 'name = "p"', 'version = "1"', 'source = { virtual = "." }', f"dependencies = [{listed}]"]
    project = (
        f'[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = {json.dumps(dependencies)}\n'
    )
    return {"pyproject.toml": project, "uv.lock": "\n".join(lines) + "\n"}


async def test_lock_of_uv_is_honoured_as_it_is(node: Node, wheels: Path) -> None:
    files = uv_lock(wheels, "smile==1.0")
    folder = await node.prepare(files)
    assert folder is not None
    assert imported_version(folder, "smile") == "1.0"


async def test_lock_of_uv_with_another_torch_is_refused_unless_asked_for(node: Node, wheels: Path) -> None:
    write_wheel(wheels, "torch", "1.0")
    files = uv_lock(wheels, "smile==1.0", "torch==1.0")
    with pytest.raises(PackagesError, match=r"pyproject.toml asks for torch==1.0.*The node has torch"):
        await node.prepare(files)
    folder = await node.prepare(files, Packages(torch="project"))
    assert folder is not None
    assert imported_version(folder, "torch") == "1.0"


async def test_eviction_spares_what_a_generation_uses(tmp_path: Path, objects: MemoryObjects, wheels: Path) -> None:
    node = Node(tmp_path / "node", objects, wheels, max_bytes=0)
    running = await node.prepare({"requirements.txt": "smile==1.0\n"}, run="running")
    ended = await node.prepare({"requirements.txt": "smile==2.0\n"}, run="ended")
    node.end("ended")
    latest = await node.prepare({"requirements.txt": "grin\n"}, run="latest")
    assert running is not None
    assert ended is not None
    assert latest is not None
    assert running.is_dir()
    assert latest.is_dir()
    assert not ended.exists()
    assert await node.prepare({"requirements.txt": "smile==2.0\n"}) == ended
    assert imported_version(ended, "smile") == "2.0"


def test_settings_of_pip_reach_the_installer_and_secrets_of_the_agent_do_not(tmp_path: Path) -> None:
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    (tmp_path / ".config" / "pip" / "pip.conf").write_text(
        f"[global]\nextra-index-url = https://a/simple\n  file:///nowhere\nfind-links = {tmp_path} /nowhere\n"
        "[install]\nno-index = true\n"
    )
    given = {"HOME": str(tmp_path), "PIP_INDEX_URL": "https://me:secret@index/simple", "AWS_SECRET_ACCESS_KEY": "x"}
    found = installer_environment({**given, "TRAINBUS_S3_SECRET_KEY": "y", "UV_HTTP_TIMEOUT": "5"})
    assert found["UV_DEFAULT_INDEX"] == "https://me:secret@index/simple"
    assert (found["UV_INDEX"], found["UV_INDEX_STRATEGY"]) == ("https://a/simple", "unsafe-best-match")
    assert (found["UV_FIND_LINKS"], found["UV_HTTP_TIMEOUT"]) == (str(tmp_path), "5")
    assert not {"AWS_SECRET_ACCESS_KEY", "TRAINBUS_S3_SECRET_KEY"} & set(found)
    assert has_no_index(given)
    assert installer_environment({**given, "UV_DEFAULT_INDEX": "https://b"})["UV_DEFAULT_INDEX"] == "https://b"


def test_error_names_the_line_and_no_credentials() -> None:
    stderr = "error: Request failed after 3 retries\n  cause: Failed to fetch: https://me:secret@index/simple/emoji/\n"
    text = explain_error(stderr, {"requirements.txt": "numpy\n--index-url https://me:secret@index\nemoji>=2\n"})
    assert "requirements.txt, line 3 (emoji>=2)" in text
    assert "secret" not in text
    assert redact("a https://u:p@h/x") == "a https://****@h/x"
    assert is_transient(stderr)
    assert not is_transient("error: No solution found when resolving dependencies\n  cause: Because timed out==2")


def test_requirements_decide_before_a_pyproject_and_a_lock_before_both(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "p"\ndependencies = ["a"]\n')
    kinds = []
    for name in ("", "requirements.txt", "uv.lock"):
        if name:
            (tmp_path / name).write_text("a\n")
        found = find_requirements(tmp_path)
        assert found is not None
        kinds.append(found.kind)
    assert kinds == ["pyproject.toml", "requirements.txt", "uv.lock"]


def test_requirements_of_comments_ask_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# packages of this project\n\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("  # none\n")
    assert find_requirements(tmp_path) is None
    (tmp_path / "more.txt").write_text("numpy  # for arrays\n")
    assert find_requirements(tmp_path) is not None
