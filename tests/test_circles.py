"""No two modules need each other: what both need has a module of its own."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("contracts", "services", "trainbus")


def list_modules() -> dict[str, Path]:
    """Return our modules by their names."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def list_imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that one imports, when it is loaded, later or for its types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                found.add(inner if inner in modules else node.module)
    return found


def test_no_two_modules_import_each_other() -> None:
    modules = list_modules()
    imports = {name: list_imports(path, modules) for name, path in modules.items()}
    circles = [(one, other) for one, found in imports.items() for other in found if one in imports.get(other, ())]
    assert [pair for pair in circles if pair[0] < pair[1]] == []
