"""A project folder as a code package: one gzipped tar, the same bytes for the same content.

Left out are files that git ignores (``.gitignore`` at every level), files that ``.trainbusignore`` names, and what
is never code: repositories, virtual environments, caches, ``.env`` files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec

from services.kit.code_package import MAX_BYTES, MAX_FILES
from trainbus.client.errors import UsageError

IGNORE_FILES = (".gitignore", ".trainbusignore")
#: Always left out, unless a ``.trainbusignore`` includes one again with ``!``.
ALWAYS_IGNORED = [
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
class CodePackage:
    """A packed project."""

    body: bytes
    sha256: str
    files: tuple[str, ...]
    #: Bytes before compression.
    content_bytes: int
    git_commit: str | None
    git_dirty: bool | None

    def code(self, uri: str) -> dict[str, Any]:
        """Return the ``code`` of a request that runs this package, which is stored at ``uri``."""
        found = {"uri": uri, "sha256": self.sha256, "git_commit": self.git_commit, "git_dirty": self.git_dirty}
        return {name: value for name, value in found.items() if value is not None}

    def mentions(self, words: Sequence[str]) -> bool:
        """Whether one of the words stands in a file, in capital letters or not."""
        pattern = re.compile("|".join(map(re.escape, words)).encode(), re.IGNORECASE)
        with tarfile.open(fileobj=io.BytesIO(self.body)) as archive:
            files = (archive.extractfile(each) for each in archive)
            return any(file is not None and pattern.search(file.read()) for file in files)


def pack_project(folder: Path) -> CodePackage:
    """Pack a project's folder.

    Raises:
        UsageError: it is no folder, holds no files, is too large, or has a link that leads out of it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the folder that holds your code")
    found: list[tuple[str, Path, int]] = []
    for name, path in sorted(walk_project(folder)):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"{name} is a link that leads out of {folder}: copy the file in, or name it in .trainbusignore"
            )
        found.append((name, path, path.stat().st_size))
    _check_size(folder, found)
    # No times and owners: the same content makes the same bytes.
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path, _ in found:
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    body = gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)
    commit, dirty = read_git_state(folder)
    return CodePackage(
        body,
        hashlib.sha256(body).hexdigest(),
        tuple(name for name, _, _ in found),
        sum(size for _, _, size in found),
        commit,
        dirty,
    )


def walk_project(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name in the package, path) of every file of a project, in no particular order."""
    root = folder.resolve()
    # Ignore files of the folders above count, up to the repository's own folder.
    above: list[tuple[Path, GitIgnoreSpec]] = [(root, GitIgnoreSpec.from_lines(ALWAYS_IGNORED))]
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
        if _is_ignored(path, is_folder, rules):
            continue
        if not is_folder:
            if entry.is_file():
                yield path.relative_to(root).as_posix(), path
        elif entry.is_symlink():
            # A link to a folder could lead out of the project, or in a circle.
            raise UsageError(
                f"{path.relative_to(root)} is a link to a folder: copy it in, or name it in .trainbusignore"
            )
        elif not (path / "pyvenv.cfg").exists():  # a virtual environment of any name
            yield from _walk(root, path, rules)


def _rules(folder: Path) -> list[tuple[Path, GitIgnoreSpec]]:
    return [
        (folder, GitIgnoreSpec.from_lines((folder / name).read_text(errors="replace").splitlines()))
        for name in IGNORE_FILES
        if (folder / name).is_file()
    ]


def _is_ignored(path: Path, is_folder: bool, rules: list[tuple[Path, GitIgnoreSpec]]) -> bool:
    """Whether ``path`` is ignored. The last rule that matches decides, as in git."""
    ignored = False
    for base, spec in rules:
        name = path.relative_to(base).as_posix() + ("/" if is_folder else "")
        include = spec.check_file(name).include
        if include is not None:
            ignored = include
    return ignored


def _check_size(folder: Path, found: list[tuple[str, Path, int]]) -> None:
    if not found:
        raise UsageError(f"{folder} holds no files to pack (everything is ignored?)")
    total = sum(size for _, _, size in found)
    if total <= MAX_BYTES and len(found) <= MAX_FILES:
        return
    largest = sorted(found, key=lambda each: -each[2])[:5]
    listed = "\n".join(f"  {size / 2**20:8.1f} MiB  {name}" for name, _, size in largest)
    raise UsageError(
        f"{folder} has {len(found):,} files of {total / 2**20:.1f} MiB; a package holds at most {MAX_FILES:,} files of "
        f"{MAX_BYTES // 2**20} MiB together. Name data and results in .trainbusignore. The largest:\n{listed}",
    )


def read_git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return a folder's commit and whether files in the folder differ from it; (None, None) outside git."""

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None
