"""A project folder as a code package: one gzipped tar, the same bytes for the same content.

What git would ignore stays out (``.gitignore`` files at every level), so does what ``.trainbusignore``
names, and what is never code: repositories, virtual environments, caches, ``.env`` files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from trainbus.client.errors import USAGE, CliError

MAX_BYTES = 64 * 2**20
MAX_FILES = 5_000
IGNORE_FILES = (".gitignore", ".trainbusignore")
#: Kept out always, unless a ``.trainbusignore`` brings one back with ``!``.
NEVER = [
    ".git",
    ".hg",
    ".svn",
    ".trainbus",
    ".env",
    ".env.*",
    ".venv",
    "__pycache__",
    "*.py[co]",
    "*.egg-info",
    ".DS_Store",
    ".eggs",
    ".hypothesis",
    ".idea",
    ".ipynb_checkpoints",
    ".mypy_cache",
    ".nox",
    ".pytest_cache",
    ".ruff_cache",
    ".tox",
    ".vscode",
    "mlruns",
    "node_modules",
]


@dataclass(frozen=True, slots=True)
class Package:
    """A packed project."""

    body: bytes
    sha256: str
    files: tuple[str, ...]
    #: Bytes before compression.
    content_bytes: int
    git_commit: str | None
    git_dirty: bool | None

    def code(self, bucket: str) -> dict[str, Any]:
        """The ``code`` of a request that runs this package out of ``bucket``."""
        found = {
            "uri": f"s3://{bucket}/packages/{self.sha256}.tar.gz",
            "sha256": self.sha256,
            "git_commit": self.git_commit,
            "git_dirty": self.git_dirty,
        }
        return {name: value for name, value in found.items() if value is not None}


def pack(folder: Path) -> Package:
    """Pack a folder.

    Raises:
        CliError: it is no folder, holds nothing, is too large, or has a link that leads out of it.
    """
    if not folder.is_dir():
        raise CliError(f"{folder} is no folder: give the folder that holds your code", USAGE)
    found: list[tuple[str, Path, int]] = []
    for name, path in sorted(project_files(folder)):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise CliError(
                f"{name} is a link that leads out of {folder}: copy the file in, or name it in .trainbusignore", USAGE
            )
        found.append((name, path, path.stat().st_size))
    _check_size(folder, found)
    # A program that writes the same bytes for the same content: no times, owners or names of ours.
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path, _ in found:
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    body = gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)
    commit, dirty = git_state(folder)
    return Package(
        body,
        hashlib.sha256(body).hexdigest(),
        tuple(name for name, _, _ in found),
        sum(size for _, _, size in found),
        commit,
        dirty,
    )


def project_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name in the package, path) of every file that belongs to a project, in no particular order."""
    root = folder.resolve()
    # Ignore files of the folders above count as far up as the repository goes.
    above: list[tuple[Path, GitIgnoreSpec]] = [(root, GitIgnoreSpec.from_lines(NEVER))]
    repository = next((each for each in (root, *root.parents) if (each / ".git").exists()), None)
    if repository is not None and repository != root:
        between = [each for each in root.parents if each.is_relative_to(repository)]
        for each in reversed(between):
            above += _rules(each)
    yield from _walk(root, root, above)


def _walk(root: Path, folder: Path, above: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[tuple[str, Path]]:
    rules = above + _rules(folder)
    for entry in os.scandir(folder):
        path = Path(entry.path)
        is_folder = entry.is_dir()
        if _ignored(path, is_folder, rules):
            continue
        if not is_folder:
            if entry.is_file():
                yield path.relative_to(root).as_posix(), path
        elif entry.is_symlink():
            # Followed it could lead anywhere, or round in circles.
            raise CliError(
                f"{path.relative_to(root)} is a link to a folder: copy it in, or name it in .trainbusignore", USAGE
            )
        elif not (path / "pyvenv.cfg").exists():  # a virtual environment under whatever name
            yield from _walk(root, path, rules)


def _rules(folder: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    return [
        (folder, GitIgnoreSpec.from_lines((folder / name).read_text(errors="replace").splitlines()))
        for name in IGNORE_FILES
        if (folder / name).is_file()
    ]


def _ignored(path: Path, is_folder: bool, rules: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    """The last rule that says anything about ``path`` decides, as git has it."""
    verdict = False
    for base, spec in rules:
        name = path.relative_to(base).as_posix() + ("/" if is_folder else "")
        include = spec.check_file(name).include
        if include is not None:
            verdict = include
    return verdict


def _check_size(folder: Path, found: list[tuple[str, Path, int]]) -> None:
    if not found:
        raise CliError(f"{folder} holds no files to pack (everything is ignored?)", USAGE)
    total = sum(size for _, _, size in found)
    if total <= MAX_BYTES and len(found) <= MAX_FILES:
        return
    largest = sorted(found, key=lambda each: -each[2])[:5]
    listed = "\n".join(f"  {size / 2**20:8.1f} MiB  {name}" for name, _, size in largest)
    raise CliError(
        f"{folder} has {len(found):,} files of {total / 2**20:.1f} MiB; a package holds at most {MAX_FILES:,} files of "
        f"{MAX_BYTES // 2**20} MiB together. Name data and results in .trainbusignore. The largest:\n{listed}",
        USAGE,
    )


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The commit a folder is at, and whether anything in the folder differs from it; (None, None) outside git."""

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None
