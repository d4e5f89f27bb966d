"""The notebook in examples/ as it stands, cell by cell on a real stack."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Stack

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMITTED: list[dict[str, Any]] = json.loads((EXAMPLES / "client.ipynb").read_text())["cells"]


def printed(cells: list[dict[str, Any]]) -> list[str]:
    """What each code cell printed."""
    return [
        "".join(line for output in cell["outputs"] for line in output.get("text", ()))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


async def test_the_notebook_runs_as_it_stands(stack: Stack, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    (tmp_path / ".trainbus").symlink_to(stack.data_dir)
    notebook = tmp_path / "examples" / "client.ipynb"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "examples" / "run_notebook.py"), str(notebook),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    cells = json.loads(notebook.read_text())["cells"]
    assert [cell["source"] for cell in cells] == [cell["source"] for cell in COMMITTED]
    texts = "\n".join(printed(cells))
    for text in ("completed after", "exact", "digests-0.json", "needs at least 16 slots", "champion v"):
        assert text in texts


def test_the_committed_outputs_are_of_a_real_run() -> None:
    texts = "\n".join(printed(COMMITTED))
    assert "completed after 118 steps, exact" in texts
    assert any("image/png" in output.get("data", {}) for cell in COMMITTED for output in cell.get("outputs", ()))
    for private in ("127.0.0.1", "localhost", "/home/", "/tmp/", "nats://"):
        assert private not in json.dumps(COMMITTED)
