"""What trainbus does on a GPU: one command, one table, ten minutes on one H100-class GPU.

    python -m loadtest.gpu [--mini] [--folder DIR]

The digests of disturbed runs against the undisturbed one's (GPT, CNN, LoRA; fp32 and bf16; two ranks on one GPU among
them), the check of the node's GPUs, a step against a plain loop, a checkpoint's stall against that of torch's own
staging, its durable rate against the disk's, and the time from SIGKILL to the next step. On a machine without a GPU it
runs on the CPU, in miniature (``--mini``, one minute), so that it works on the day a card is there: its figures then
say nothing of GPUs, and nothing is kept. Exit code 1: a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from loadtest.common import report
from loadtest.gpu import node, rates
from loadtest.gpu.common import FULL, MINI, Row, Sizes, device
from loadtest.gpu.runs import Runs


def measure(sizes: Sizes, folder: Path) -> list[Row]:
    """Return all rows; a section that fails is a row, too."""
    runs = Runs(folder, sizes)
    try:
        rows = _section("node", node.measure)
        rows += _section("runs", runs.measure)
    finally:
        runs.close()
    rows += _section("steps", lambda: rates.measure_steps(sizes))
    return rows + _section("checkpoint", lambda: rates.measure_checkpoint(sizes, folder))


def _section(name: str, work: Callable[[], list[Row]]) -> list[Row]:
    try:
        return work()
    except Exception as error:
        text = str(error).strip() or "no message"
        return [Row(name, f"failed: {type(error).__name__}: {text[-1500:]}", "", False)]


def show(rows: list[Row]) -> None:
    table = Table(title=f"trainbus on {_device_name()}", title_justify="left")
    for column in ("figure", "measured", "target", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(row.figure, row.measured, row.target, {True: "met", False: "MISSED", None: ""}[row.ok])
    Console().print(table)


def _device_name() -> str:
    return torch.cuda.get_device_name(0) if device().type == "cuda" else "a CPU: nothing here is of a GPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", action="store_true", help="in miniature; always so on a machine without a GPU")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary folder")
    args = parser.parse_args()
    is_mini = args.mini or device().type == "cpu"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(MINI if is_mini else FULL, Path(folder))
    show(rows)
    if not is_mini:
        figures = {"device": _device_name(), "rows": [row._asdict() for row in rows]}
        report("gpu", [(row.figure, row.measured, row.target) for row in rows], figures)
    sys.exit(any(row.ok is False for row in rows))


if __name__ == "__main__":
    main()
