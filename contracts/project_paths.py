"""The folders of a project that its modules are imported from, as if the project were installed.

These are the project's own folder, ``src`` where a project keeps its packages there, and the folders of the project
that its files ask for: ``-e .`` and ``./libs/common`` in requirements.txt, paths and workspace members of uv in
pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REQUIREMENTS, PYPROJECT = "requirements.txt", "pyproject.toml"
#: Files that make a folder an installable project.
PROJECT_FILES = (PYPROJECT, "setup.cfg", "setup.py")
#: A line of requirements that names a folder: its path, without extras.
LOCAL_LINE = re.compile(r"^(?:(?:-e|--editable)[ =]*)?(\.{1,2}(?:/[^\s\[;#]*)?|(?<=[ =])[^\s\[;#:+]+)(?=[\s\[;#]|$)")
INCLUDE_LINE = re.compile(r"^(?:-r|--requirement)[ =]*(\S+)")


def find_import_folders(folder: Path) -> list[Path]:
    """Return the folders for Python's path, the project's own first."""
    found = [folder, *_src_folder(folder)]
    for project in find_local_projects(folder):
        found += _src_folder(project) or [project]
    return list(dict.fromkeys(found))


def find_local_projects(folder: Path) -> list[Path]:
    """Return the folders inside a project that its files ask for as packages; the project itself may be one."""
    named = [*_named_in_requirements(folder, folder / REQUIREMENTS, set()), *_named_in_pyproject(folder)]
    root = folder.resolve()
    inside = [path for path in named if path.is_dir() and path.resolve().is_relative_to(root)]
    return list(dict.fromkeys(folder / path.resolve().relative_to(root) for path in inside))


def _src_folder(folder: Path) -> list[Path]:
    """Return ``src`` if the project's packages are in there."""
    src = folder / "src"
    is_layout = src.is_dir() and not (src / "__init__.py").exists()
    return [src] if is_layout and any((folder / name).is_file() for name in PROJECT_FILES) else []


def _named_in_requirements(folder: Path, file: Path, seen: set[Path]) -> Iterator[Path]:
    if file in seen or not file.resolve().is_relative_to(folder.resolve()):
        return
    seen.add(file)
    for line in _read_text(file).splitlines():
        if (local := LOCAL_LINE.match(line.strip())) is not None:
            yield folder / local[1]  # pip and uv take it from where they run, also in an included file
        elif (included := INCLUDE_LINE.match(line.strip())) is not None:
            yield from _named_in_requirements(folder, file.parent / included[1], seen)


def _named_in_pyproject(folder: Path) -> Iterator[Path]:
    try:
        uv = tomllib.loads(_read_text(folder / PYPROJECT)).get("tool", {}).get("uv", {})
        sources: list[Any] = [*uv.get("sources", {}).values()]
        members: list[str] = [*uv.get("workspace", {}).get("members", ())]
        for source in sources:
            if isinstance(source, dict) and isinstance(source.get("path"), str):
                yield folder / source["path"]
        for member in members:
            yield from sorted(folder.glob(member))
    except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):
        return  # its use as a list of packages says what is wrong


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError):
        return ""
