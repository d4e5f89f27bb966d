"""Report metrics from any script: one JSON line appended to the rank's journal. Standard library only."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Mapping

# Spelled here too (contracts.ranks.LAUNCH_VARIABLE), because importing contracts means importing pydantic.
_LAUNCH_VARIABLE = "TRAINBUS_LAUNCH"

_journal_fd: int | None = None
_warned = False


def report(
    values: Mapping[str, float] | None = None, /, *, step: int, epoch: int = 0, samples: int = 0, **metrics: float
) -> None:
    """Report metrics at ``step``; never block on the network, never fail the script.

    Names with a slash go in as a mapping: ``report({"validation/loss": 0.3}, step=10, lr=1e-3)``.
    ``samples`` is how many samples have been consumed so far, if the script knows. Values that are not finite are
    dropped. In a script that trainbus did not start this only warns, once.
    """
    fd = _open_journal()
    if fd is None:
        return
    merged = {**(values or {}), **metrics}
    numbers = {str(name): float(value) for name, value in merged.items() if math.isfinite(float(value))}
    line = {
        "kind": "metrics",
        "step": int(step),
        "time": time.time(),
        "values": numbers,
        "epoch": int(epoch),
        "samples_consumed": int(samples),
    }
    # One write() of one line on an O_APPEND file: lines of several threads or processes never mix.
    os.write(fd, json.dumps(line).encode() + b"\n")


def _open_journal() -> int | None:
    global _journal_fd, _warned
    if _journal_fd is not None:
        return _journal_fd
    launch = os.environ.get(_LAUNCH_VARIABLE)
    if not launch:
        if not _warned:
            _warned = True
            warnings.warn(
                f"trainbus.report() does nothing: {_LAUNCH_VARIABLE} is not set, so this script was not started "
                "by trainbus (submit it with a 'command')",
                stacklevel=3,
            )
        return None
    path = os.path.join(os.path.dirname(launch), f"rank_{int(os.environ.get('RANK', '0'))}.jsonl")
    _journal_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return _journal_fd
