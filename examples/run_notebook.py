"""Run a notebook's code cells in order and write their outputs into it: python examples/run_notebook.py client.ipynb

It needs no Jupyter. Each cell runs in the notebook's folder, in one namespace; ``await`` works at the top level.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import base64
import contextlib
import inspect
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Output = dict[str, Any]


class NotebookRunner:
    """The namespace and the event loop in which the cells of one notebook run."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.loop = asyncio.Runner()

    def run_cell(self, source: str) -> list[Output]:
        """Run a cell and return its outputs: what it printed, the value of its last expression, its figures."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = self._evaluate(source)
        outputs: list[Output] = []
        if text := printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
        if value is not None:
            outputs.append({"output_type": "execute_result", "metadata": {}, "data": {"text/plain": [repr(value)]}})
        return [*outputs, *_take_figures()]

    def _evaluate(self, source: str) -> Any:
        """Run the statements of a cell and return the value of a last expression."""
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        self._run(ast.Module(body, []), "exec")
        return self._run(ast.Expression(last.value), "eval") if isinstance(last, ast.Expr) else None

    def _run(self, tree: ast.Module | ast.Expression, mode: str) -> Any:
        code = compile(tree, "<cell>", mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, self.namespace)  # noqa: S307 - this is what a notebook is for
        return self.loop.run(_await(value)) if inspect.iscoroutine(value) else value


async def _await(value: Any) -> Any:
    return await value


def _take_figures() -> Iterator[Output]:
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        yield {
            "output_type": "display_data",
            "metadata": {},
            "data": {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]},
        }
    plt.close("all")


def run_notebook(path: Path) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells as they run now."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    runner, count = NotebookRunner(), 0
    before = Path.cwd()
    os.chdir(path.parent)
    sys.path.insert(0, "")
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell["execution_count"] = count
                cell["outputs"] = runner.run_cell("".join(cell["source"]))
                for output in cell["outputs"]:
                    if output["output_type"] == "execute_result":
                        output["execution_count"] = count
    finally:
        sys.path.remove("")
        os.chdir(before)
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    given: Path = parser.parse_args().notebook
    given.write_text(json.dumps(run_notebook(given.resolve()), indent=1, ensure_ascii=False) + "\n")
