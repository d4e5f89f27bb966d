"""The packages of a project, installed beside those of the node: resolved once, locked by hash, shared.

A project asks for packages in ``uv.lock``, ``requirements.txt`` or ``pyproject.toml``. The first node that runs it
resolves them and puts the lock into the object store, named by everything that decides it; other nodes and later
attempts install the same files. What the node has itself in a fitting version is not installed again. The rest lies in
a folder named by the hash of its lock, which precedes the node's packages on the path of the ranks and of the processes
that serve a model.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from contracts.project_paths import PROJECT_FILES, find_local_projects
from contracts.spec.run import Packages
from services.kit.concurrency import run_in_thread
from services.kit.packages.node_packages import OWN, TORCH, NodePackages, find_conflict, find_torch_conflict
from services.kit.packages.requirement_lock import (
    FULL_DISK_SIGN,
    LockEntry,
    asks_for_packages,
    explain_error,
    find_unlocked,
    format_lock,
    included_files,
    index_options,
    is_transient,
    parse_lock,
    redact,
    select_missing,
)
from services.kit.packages.uv_process import InstallerTimeoutError, read_installer_environment, run_installer
from services.kit.store.errors import ObjectExists, ObjectNotFound
from services.kit.store.files import is_inside
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

#: Part of every lock's key: another number resolves everything anew.
LOCK_VERSION = "1"
#: Link in a generation's folder to the packages that it uses.
LINK_NAME = "packages"
UV_LOCK, REQUIREMENTS, PYPROJECT = "uv.lock", "requirements.txt", "pyproject.toml"
MAX_FILE_BYTES = 8 * 2**20


class PackagesError(ValueError):
    """The project's packages cannot be had; the text says what to change."""

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        """``permanent``: another attempt would fail alike."""
        super().__init__(f"packages: {reason}")
        self.permanent = permanent


@dataclass(frozen=True, slots=True)
class ProjectRequirements:
    """What a project asks for. ``files``: name -> text, the one that decides first."""

    kind: str
    files: Mapping[str, str]

    @property
    def options(self) -> list[str]:
        """Lines of the files that say where packages are."""
        return [line for text in self.files.values() for line in index_options(text)]


def find_requirements(folder: Path) -> ProjectRequirements | None:
    """Return what the project in ``folder`` asks for; None if it asks for nothing.

    Raises:
        PackagesError: a file cannot be read.
    """
    if (folder / UV_LOCK).is_file() and (folder / PYPROJECT).is_file():
        return ProjectRequirements(UV_LOCK, {name: _read(folder, name) for name in (UV_LOCK, PYPROJECT)})
    files: dict[str, str] = {}
    if (folder / REQUIREMENTS).is_file():
        _read_included(folder, REQUIREMENTS, files)
    # Lines that are comments, or include such files, ask for nothing.
    if any(asks_for_packages(text) for text in files.values()):
        # Folders of the project that are asked for: what they need themselves is decided by their own files.
        for project in find_local_projects(folder):
            paths = (project / name for name in PROJECT_FILES)
            files |= {
                name: _read(folder, name) for path in paths if path.is_file() for name in [_name_of(path, folder)]
            }
        return ProjectRequirements(REQUIREMENTS, files)
    if (folder / PYPROJECT).is_file():
        text = _read(folder, PYPROJECT)
        try:
            project = tomllib.loads(text).get("project", {})
        except tomllib.TOMLDecodeError as error:
            raise PackagesError(f"{PYPROJECT} is no TOML: {error}. Correct it and submit again") from error
        if project.get("dependencies") or "dependencies" in project.get("dynamic", ()):
            return ProjectRequirements(PYPROJECT, {PYPROJECT: text})
    return None


class PackageEnvironments:
    """The installed packages of a node, below ``folder``: ``installed/<key>``, ``locks/<key>`` and uv's own cache."""

    def __init__(
        self,
        folder: Path,
        runs_folder: Path,
        objects: ObjectStore,
        bucket: str,
        *,
        max_bytes: int,
        timeout_s: float,
        may_build: bool = True,
        environment: Mapping[str, str] | None = None,
        count_lookup: Callable[[str], object] = lambda outcome: None,
    ) -> None:
        """Make the environments.

        Args:
            runs_folder: its folders' folders are what uses the packages (``prepare``).
            environment: with the settings of the package index; None: this process's own.
            count_lookup: called with ``hit`` or ``miss`` whenever packages are wanted.
        """
        self._folder, self._runs_folder = folder, runs_folder
        self._objects, self._bucket = objects, bucket
        self._max_bytes, self._timeout_s, self._may_build = max_bytes, timeout_s, may_build
        self._environment = os.environ if environment is None else environment
        self._count_lookup = count_lookup
        self._locks: dict[str, asyncio.Lock] = {}
        #: Held while packages are linked or evicted: none is evicted that a generation is about to use.
        self._links = asyncio.Lock()

    async def prepare(self, code: Path, generation: Path, asked: Packages, *, is_task: bool) -> Path | None:
        """Install what the project in ``code`` asks for; return the folder, None if the node has everything.

        ``generation``: the folder of the generation, or the model, that uses it, until it is done or removed.

        Raises:
            PackagesError: the packages cannot be had.
            TransientError: the store was away for too long.
            OSError: the disk is full.
        """
        if asked.source == "node":
            return None
        requirements = await run_in_thread(find_requirements, code)
        if requirements is None:
            return None
        has_torch = asked.torch == "node"
        node = await run_in_thread(NodePackages.read, has_torch=has_torch)
        key = _lock_key(requirements, node, is_task)
        try:
            async with self._lock(key):
                entries = await self._read_or_resolve(key, requirements, node, code, has_torch, is_task)
            missing = select_missing(entries, node.versions)
            if not missing:
                return None
            _check_shadowed(missing, node, has_torch=has_torch, is_task=is_task)
            lock = format_lock(missing)
            name = hashlib.sha256("\0".join((lock, _platform())).encode()).hexdigest()
            async with self._lock(name):
                return await self._link_installed(name, lock, missing, requirements, node, code, generation)
        except InstallerTimeoutError as error:
            raise PackagesError(f"{error}: is the package index slow?", permanent=False) from error

    # -- resolve ------------------------------------------------------------

    async def _read_or_resolve(
        self,
        key: str,
        requirements: ProjectRequirements,
        node: NodePackages,
        code: Path,
        has_torch: bool,
        is_task: bool,
    ) -> list[LockEntry]:
        path = self._folder / "locks" / f"{key}.txt"
        if path.is_file():
            return parse_lock(path.read_text())
        uri = f"s3://{self._bucket}/locks/{key}.txt"
        try:
            text = (await self._objects.get(uri)).decode()
        except ObjectNotFound:
            entries = await self._resolve(requirements, node, code, has_torch, is_task)
            text = await self._store_lock(uri, format_lock(entries))
        _write_whole(path, text)
        return parse_lock(text)

    async def _store_lock(self, uri: str, text: str) -> str:
        """Put a lock into the store; return the one that is there, which may be another node's."""
        try:
            await self._objects.put(uri, text.encode(), if_absent=True, content_type="text/plain")
        except ObjectExists:
            return (await self._objects.get(uri)).decode()
        return text

    async def _resolve(
        self, requirements: ProjectRequirements, node: NodePackages, code: Path, has_torch: bool, is_task: bool
    ) -> list[LockEntry]:
        with tempfile.TemporaryDirectory(prefix="trainbus-packages-") as temporary:
            work = Path(temporary)
            if requirements.kind == UV_LOCK:
                text = await self._export(requirements, node, code, has_torch)
            else:
                text = await self._compile(requirements, node, code, work, has_torch, is_task)
        entries = parse_lock(text)
        unlocked = find_unlocked(select_missing(entries, node.versions))
        if unlocked is not None:
            raise PackagesError(
                f"{redact(unlocked.text)} has no hash: name a version that the package index has, or a git commit"
            )
        log.info("packages resolved", kind=requirements.kind, packages=len(entries))
        return entries

    async def _export(self, requirements: ProjectRequirements, node: NodePackages, code: Path, has_torch: bool) -> str:
        """Return uv.lock as a requirement file. Without torch and what only torch needs, where the node's is used."""
        arguments = ["export", "--frozen", "--no-dev", "--no-emit-local", "--no-header", "--no-annotate", "--quiet"]
        if has_torch:
            arguments += ["--prune", TORCH]
            project = tomllib.loads(requirements.files[PYPROJECT]).get("project", {})
            needed = find_conflict(project.get("dependencies", ()), TORCH, node.versions.get(TORCH, ""))
            if needed is not None:
                raise PackagesError(_torch_hint(f"{PYPROJECT} asks for {needed}", node))
        return await self._run_uv(arguments, requirements, code)

    async def _compile(
        self,
        requirements: ProjectRequirements,
        node: NodePackages,
        code: Path,
        work: Path,
        has_torch: bool,
        is_task: bool,
    ) -> str:
        """Resolve, with the node's versions where they fit."""
        wheels, constraints, output = work / "wheels", work / "constraints.txt", work / "lock.txt"
        wheels.mkdir()
        await run_in_thread(node.write_wheels, wheels)
        fixed = node.own_constraints if is_task else []
        fixed += [f"{name}=={node.versions[name]}" for name in (TORCH, OWN) if name in node.versions]
        constraints.write_text("".join(f"{line}\n" for line in fixed))
        arguments = ["pip", "compile", requirements.kind, "--generate-hashes", "--no-header", "--no-annotate"]
        arguments += ["--constraints", str(constraints), "--output-file", str(output), "--no-strip-extras", "--quiet"]
        # The pins of a lock that is there already are preferred.
        output.write_text(node.fingerprint + "\n")
        if await self._has_everything(arguments, wheels, code):
            return output.read_text()
        output.write_text(node.fingerprint + "\n")
        await self._run_uv(arguments, requirements, code, wheels=wheels)
        return output.read_text()

    async def _has_everything(self, arguments: Sequence[str], wheels: Path, code: Path) -> bool:
        """Whether the node's packages alone are enough; the lock is then written. No index is asked."""
        bare = {name: value for name, value in (await self._uv_environment())[0].items() if "INDEX" not in name}
        status, _, _ = await run_installer(
            [*arguments, "--no-index", "--offline", "--no-build"],
            folder=code,
            environment={**bare, "UV_FIND_LINKS": str(wheels)},
            timeout_s=self._timeout_s,
        )
        return status == 0

    # -- install ------------------------------------------------------------

    async def _link_installed(
        self,
        name: str,
        lock: str,
        entries: Sequence[LockEntry],
        requirements: ProjectRequirements,
        node: NodePackages,
        code: Path,
        generation: Path,
    ) -> Path:
        folder = self._folder / "installed" / name
        link = generation / LINK_NAME
        async with self._links:
            _replace_link(link, folder)
            if folder.is_dir():
                os.utime(folder)
                self._count_lookup("hit")
                return folder
        self._count_lookup("miss")
        await self._install(folder, lock, entries, requirements, node, code)
        async with self._links:
            await run_in_thread(self._evict)
        return folder

    async def _install(
        self,
        folder: Path,
        lock: str,
        entries: Sequence[LockEntry],
        requirements: ProjectRequirements,
        node: NodePackages,
        code: Path,
    ) -> None:
        """Install into a new ``folder``, whole or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            target, file = partial / "packages", partial / "lock.txt"
            options = "".join(f"{line}\n" for line in requirements.options)
            file.write_text(options + lock)
            arguments = ["pip", "install", "--target", str(target), "--requirements", str(file), "--no-deps"]
            arguments += ["--compile-bytecode", "--quiet"]
            if all(entry.has_hash for entry in entries):
                arguments.append("--require-hashes")
            await self._run_uv(arguments, requirements, code)
            target.mkdir(exist_ok=True)  # of entries that no marker selects here
            if TORCH in node.versions:
                conflict = await run_in_thread(find_torch_conflict, target, node.versions[TORCH])
                if conflict is not None:
                    raise PackagesError(_torch_hint(conflict, node))
            if not folder.exists():
                target.replace(folder)
            log.info("packages installed", folder=folder.name, packages=len(entries))
        finally:
            await run_in_thread(shutil.rmtree, partial, ignore_errors=True)

    async def _run_uv(
        self, arguments: Sequence[str], requirements: ProjectRequirements, code: Path, wheels: Path | None = None
    ) -> str:
        """Run uv and return its output. ``wheels``: a folder of packages beside those of the index."""
        environment, has_no_index = await self._uv_environment()
        if wheels is not None:
            environment["UV_FIND_LINKS"] = ",".join(filter(None, (environment.get("UV_FIND_LINKS"), str(wheels))))
        extra = ["--no-index"] if has_no_index and arguments[0] == "pip" else []
        if not self._may_build and arguments[0] == "pip":
            extra.append("--no-build")
        status, output, errors = await run_installer(
            [*arguments, *extra], folder=code, environment=environment, timeout_s=self._timeout_s
        )
        if status == 0:
            return output
        log.warning("packages cannot be had", errors=redact(errors)[-2000:])
        reason = explain_error(errors, requirements.files)
        if FULL_DISK_SIGN in errors:
            raise OSError(errno.ENOSPC, f"{FULL_DISK_SIGN}: {reason}")
        if is_transient(errors):
            raise PackagesError(f"{reason}. Can this node reach the package index?", permanent=False)
        if re.search(r"\btorch\b", reason):
            raise PackagesError(_torch_hint(reason, await run_in_thread(NodePackages.read)))
        raise PackagesError(f"{reason}. Correct {requirements.kind} and submit again")

    async def _uv_environment(self) -> tuple[dict[str, str], bool]:
        environment, has_no_index = await read_installer_environment(self._environment)
        own = {"UV_CACHE_DIR": str(self._folder / "uv"), "UV_PYTHON": sys.executable}
        return {**environment, **own}, has_no_index

    # -- evict --------------------------------------------------------------

    def _evict(self) -> None:
        """Delete what no generation uses, oldest use first, until the limit is kept."""
        if _measure_bytes(self._folder) <= self._max_bytes:
            return
        # Installed files are links into uv's cache where they can be, so it goes first.
        shutil.rmtree(self._folder / "uv", ignore_errors=True)
        used = {link.readlink() for link in self._runs_folder.glob(f"*/*/{LINK_NAME}") if _is_used(link)}
        installed = [path for path in (self._folder / "installed").iterdir() if path.name[0] != "."]
        for path in sorted(installed, key=lambda each: each.stat().st_mtime):
            if _measure_bytes(self._folder) <= self._max_bytes:
                return
            if path not in used:
                trash = path.with_name(f".evicted-{path.name}")
                path.replace(trash)
                shutil.rmtree(trash, ignore_errors=True)
                log.info("packages evicted", folder=path.name)

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())


def _check_shadowed(missing: Sequence[LockEntry], node: NodePackages, *, has_torch: bool, is_task: bool) -> None:
    """Refuse what must not precede the node's packages: another torch, and what the Trainer cannot use."""
    for entry in missing:
        if entry.name == TORCH and has_torch and TORCH in node.versions:
            raise PackagesError(_torch_hint(f"the project asks for torch {entry.version}", node))
        needed = find_conflict(node.own_constraints, entry.name, entry.version) if is_task else None
        if needed is not None:
            raise PackagesError(
                f"the project asks for {entry.name} {entry.version}, and a Task runs in one process with the Trainer, "
                f"which needs {needed}: ask for a version that fits, or run the project as a command"
            )


def _torch_hint(reason: str, node: NodePackages) -> str:
    version = node.versions.get(TORCH, "none")
    return (
        f"{reason}. The node has torch {version}, and runs use it: ask for a version that fits, "
        'or submit with --torch project ("packages": {"torch": "project"} in a request)'
    )


def _lock_key(requirements: ProjectRequirements, node: NodePackages, is_task: bool) -> str:
    """Return the hash of everything that decides a lock."""
    files = [part for each in requirements.files.items() for part in each]
    parts = [LOCK_VERSION, requirements.kind, *files, node.fingerprint, str(is_task), _platform()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _platform() -> str:
    return f"{sysconfig.get_platform()} {sysconfig.get_config_var('SOABI') or ''}"


def _read(folder: Path, name: str) -> str:
    path = folder / name
    if not is_inside(path, folder):
        raise PackagesError(f"{name} leads out of the project: move the file into it")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PackagesError(f"{name} is larger than {MAX_FILE_BYTES:,} bytes: is it a list of packages?")
        return path.read_text()
    except (OSError, UnicodeError) as error:
        raise PackagesError(f"{name} cannot be read: {error}. Is it in the project, and not ignored?") from error


def _name_of(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read_included(folder: Path, name: str, files: dict[str, str]) -> None:
    if name in files:
        return
    files[name] = _read(folder, name)
    for included in included_files(files[name]):
        if "://" in included:
            raise PackagesError(f"{name} includes {redact(included)}: copy that file into the project")
        _read_included(folder, os.path.normpath(os.path.join(os.path.dirname(name), included)), files)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def _replace_link(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _is_used(link: Path) -> bool:
    """Whether the generation of a link may still run."""
    return link.is_symlink() and not (link.parent / "done.json").exists()


def _measure_bytes(folder: Path) -> int:
    """Return the bytes of a folder on the disk; a file with several links counts once."""
    sizes: dict[int, int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())
