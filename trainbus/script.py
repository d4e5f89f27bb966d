"""What a script of any kind can call in a run: metrics, checkpoints, artifacts, stop. Standard library only.

A script that uses none of it keeps what it leaves in the folder ``TRAINBUS_OUTPUT_DIR``. Outside a run every call is
harmless: ``report`` prints, ``checkpoint`` and ``artifact`` say once that nothing is kept.
The variables and the journal's lines, for scripts in other languages: ``contracts/ranks.py`` and ``docs/events.md``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

# Spelled here too (contracts.ranks has them), because importing contracts means importing pydantic.
_LAUNCH = "TRAINBUS_LAUNCH"
_OUTPUT_DIR = "TRAINBUS_OUTPUT_DIR"
_RESUME_DIR = "TRAINBUS_RESUME_DIR"
_RESUME_STEP = "TRAINBUS_RESUME_STEP"
_INIT_DIR = "TRAINBUS_INIT_DIR"
_PARAMS = "TRAINBUS_PARAMS"
_STOP_FILE = "stop.json"
_STOP_SEEN_FILE = "stop_seen"


class _Process:
    """What this process has opened and seen."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.journal_fd: int | None = None
        self.has_warned = False
        self.last_step: int | None = None
        self.listens = False
        self.has_signal = False
        self.lock = threading.Lock()


_state = _Process()


def _current() -> _Process:
    """Return the state of this process: a fork has another rank perhaps, and its own journal."""
    global _state
    if _state.pid != os.getpid():
        _state = _Process()
    return _state


def report(
    values: Mapping[str, float] | None = None,
    /,
    *,
    step: int | None = None,
    epoch: int | None = None,
    total_steps: int | None = None,
    samples: int = 0,
    **metrics: float,
) -> None:
    """Report metrics; never block on the network, never fail the script.

    Names with a slash go in as a mapping: ``report({"validation/loss": 0.3}, step=10, lr=1e-3)``. NaN and infinity are
    values: they are told, and are best at nothing. Outside a run the values are printed.

    Args:
        step: where the values belong; without it the epoch, or else one more than the step before.
        epoch: the current epoch.
        total_steps: at which step the script will be done, for the progress and the time that is left.
        samples: how many samples have been consumed so far, if the script knows.
    """
    state = _current()
    numbers = _to_floats({**(values or {}), **metrics})
    with state.lock:
        if step is None:
            step = epoch if epoch is not None else _last_step(state) + 1
        state.last_step = int(step)
    if not _is_in_run():
        text = " ".join(f"{name}={value:.6g}" for name, value in numbers.items())
        print(f"step {step}: {text}", flush=True)
        return
    line: dict[str, Any] = {
        "kind": "metrics",
        "step": int(step),
        "values": numbers,
        "epoch": int(epoch or 0),
        "samples_consumed": int(samples),
    }
    if total_steps is not None:
        line["total_steps"] = int(total_steps)
    append_line(line)


def checkpoint(
    path: str | os.PathLike[str],
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    *,
    epoch: int | None = None,
) -> None:
    """Keep this file or folder as the run's checkpoint; return once it is copied on this machine.

    The copy is uploaded in the background. After a crash, a preemption or a move to another node ``resume()`` returns
    a folder with this file, or with the content of this folder. Of each node, one rank does this for all of its ranks
    (``LOCAL_RANK`` 0): call it on every rank. One checkpoint has what all nodes keep; of one name, rank 0's counts.

    Args:
        path: the file or folder.
        step: the step that it belongs to; without it the last reported one.
        metrics: what ranks it (``retention.metric``); without them the last reported ones.
        epoch: the epoch that it belongs to.

    Raises:
        FileNotFoundError: there is no such file or folder, on rank 0's node.
    """
    source = Path(path)
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0 and (os.environ.get("LOCAL_RANK", str(rank)) != "0" or not source.exists()):
        return
    if not source.exists():
        raise FileNotFoundError(f"there is no {str(source)!r} to keep: save it before trainbus.checkpoint()")
    if not _is_in_run():
        _warn_outside(f"{source} is not kept")
        return
    line: dict[str, Any] = {"kind": "keep", "path": str(_copy(source))}
    if step is not None:
        line["step"] = int(step)
    if epoch is not None:
        line["epoch"] = int(epoch)
    if metrics is not None:
        line["metrics"] = _to_floats(metrics)
    append_line(line)


def resume() -> Path | None:
    """Return the folder of the last kept checkpoint; None where the run begins."""
    folder = os.environ.get(_RESUME_DIR)
    return Path(folder) if folder and Path(folder).is_dir() else None


def resume_step() -> int:
    """Return the step of the last kept checkpoint; 0 where the run begins."""
    try:
        return int(os.environ.get(_RESUME_STEP) or 0)
    except ValueError:
        return 0


def init_dir() -> Path | None:
    """Return the folder of the checkpoint that the run begins with (``--init-from``), in every start; None without."""
    folder = os.environ.get(_INIT_DIR)
    return Path(folder) if folder and Path(folder).is_dir() else None


def output_dir() -> Path:
    """Return the folder whose content is kept with the run; outside a run ``./outputs``. It exists."""
    folder = Path(os.environ.get(_OUTPUT_DIR) or "outputs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def artifact(path: str | os.PathLike[str], name: str | None = None) -> None:
    """Keep a file as the run's artifact: a report, a plot, a table. Its name is ``name``, or the file's own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the name leads out of the folder of artifacts.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {str(source)!r} to keep as an artifact")
    target_name = Path(name or source.name)
    if target_name.is_absolute() or ".." in target_name.parts:
        raise ValueError(f"the artifact's name {str(target_name)!r} must be a path without '..'")
    if not _is_in_run():
        _warn_outside(f"{source} is not kept")
        return
    target = output_dir() / target_name
    if source.resolve() != target.resolve():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
    append_line({"kind": "artifact", "path": target_name.as_posix()})


def should_stop() -> bool:
    """Return whether the run is asked to stop: save, then end with exit code 0.

    From its first call on, SIGTERM does not end the process by itself; the script has the run's ``grace_s`` to end.
    In a script of several ranks ask on rank 0, and broadcast the answer.

    Once the answer is yes, exit code 0 means stopped: the run starts again from what is kept. A script that trains to
    its end nevertheless starts again too; it resumes its last state, finds nothing left to do, and ends.
    """
    state = _current()
    if not state.listens:
        state.listens = True
        _listen(state)
    launch = os.environ.get(_LAUNCH)
    if not launch:
        return state.has_signal
    folder = os.path.dirname(launch)
    is_asked = state.has_signal or os.path.exists(os.path.join(folder, _STOP_FILE))
    if is_asked:
        _mark_stop_seen(folder)
    return is_asked


def params() -> dict[str, Any]:
    """Return the run's parameters (``--param``, ``params`` in the request)."""
    if text := os.environ.get(_PARAMS):
        return dict(json.loads(text))
    if launch := os.environ.get(_LAUNCH):
        return dict(json.loads(Path(launch).read_bytes())["spec"].get("params") or {})
    return {}


def _is_in_run() -> bool:
    return bool(os.environ.get(_LAUNCH))


def _last_step(state: _Process) -> int:
    return resume_step() if state.last_step is None else state.last_step


def _to_floats(values: Mapping[str, float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _warn_outside(consequence: str) -> None:
    state = _current()
    if not state.has_warned:
        state.has_warned = True
        print(f"trainbus: {consequence}: this script was not started by trainbus", file=sys.stderr, flush=True)


def _listen(state: _Process) -> None:
    """Make SIGTERM a request, unless the script handles it; in a thread that may not, the stop file remains."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:

        def on_signal(number: int, frame: FrameType | None) -> None:
            state.has_signal = True

        signal.signal(signal.SIGTERM, on_signal)


def _mark_stop_seen(folder: str) -> None:
    """Leave an empty file for the agent, before the script can act on the answer and end.

    One file serves all ranks of the node: creating it is atomic, and it never changes.
    """
    with suppress(OSError):  # the script must not fail for it
        os.close(os.open(os.path.join(folder, _STOP_SEEN_FILE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def _copy(source: Path) -> Path:
    """Copy a file or folder into the generation's folder, whole or not at all; return the copy, a folder."""
    kept = Path(os.environ[_LAUNCH]).parent / "kept"
    kept.mkdir(exist_ok=True)
    name = uuid.uuid4().hex
    partial, target = kept / f".{name}.partial", kept / name
    try:
        if source.is_dir():
            shutil.copytree(source, partial, symlinks=True)
        else:
            partial.mkdir()
            shutil.copyfile(source, partial / source.name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)
    return target


def append_line(line: Mapping[str, Any]) -> None:
    """Append a line to the rank's journal, in one of the forms of ``contracts/ranks.py``."""
    state = _current()
    if state.journal_fd is None:
        folder = os.path.dirname(os.environ[_LAUNCH])
        path = os.path.join(folder, f"rank_{int(os.environ.get('RANK', '0'))}.jsonl")
        state.journal_fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    # One write() of one line on an O_APPEND file: lines of several threads or processes never mix.
    os.write(state.journal_fd, json.dumps({"time": time.time(), **line}).encode() + b"\n")
