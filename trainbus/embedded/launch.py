"""Start, find and stop an embedded stack from another process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainbus.embedded import process
from trainbus.embedded.layout import StackOptions, stack_file

#: Exit code of a supervisor that found another one on its data folder.
EXIT_LOCKED = 3
READY_TIMEOUT_S = 180.0


class StackError(Exception):
    """The stack does not start or stop; the text says what to do."""


@dataclass(frozen=True, slots=True)
class StackInfo:
    """A running stack, as its ``stack.json`` describes it."""

    data_dir: Path
    state: str
    pid: int
    nats_url: str
    s3_endpoint: str
    gateway_url: str
    mlflow_tracking_uri: str
    nodes: int
    slots: int
    processes: list[dict[str, Any]]
    #: Where promoted models answer; '' of a stack that is older than serving.
    serving_url: str = ""

    @property
    def ready(self) -> bool:
        return self.state == "ready"


def read_stack(data_dir: Path) -> StackInfo | None:
    """Return the stack that runs on a data folder, else None, also where a killed stack has left its file."""
    try:
        content = json.loads(stack_file(data_dir).read_text())
    except (OSError, ValueError):
        return None
    if not is_locked(data_dir):
        return None
    names = [each.name for each in fields(StackInfo) if each.name in content]
    return StackInfo(data_dir.resolve(), **{name: content[name] for name in names})


def _describe_unready(info: StackInfo | None) -> str:
    """Return which parts of a stack are not ready, and their logs."""
    parts = [f"\n  {each['name']}: see {each['log']}" for each in info.processes if not each["ready"]] if info else []
    return ". Not ready yet:" + "".join(parts) if parts else ""


def is_locked(data_dir: Path) -> bool:
    """Whether a supervisor holds the data folder."""
    try:
        import fcntl
    except ImportError:  # Windows: a client works there, an embedded stack does not
        return False
    with contextlib.suppress(OSError), (data_dir / "stack.lock").open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class StackProcess:
    """An embedded stack that ends with this process; a context manager."""

    def __init__(self, options: StackOptions, *, output: Path | None = None, detach: bool = False) -> None:
        self.options, self._output, self._detach = options, output, detach
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None

    def __enter__(self) -> StackProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the supervisor. It stops the stack when this process ends, even by SIGKILL: a pipe closes."""
        options = json.dumps(asdict(self.options), default=str)
        command = [sys.executable, "-m", "trainbus.embedded.supervisor", options]
        pass_fds: tuple[int, ...] = ()
        read_end: int | None = None
        if not self._detach:
            # If the supervisor is killed, its children become this process's, which ends them.
            process.adopt_orphans()
            read_end, self._pipe = os.pipe()
            command.append(str(read_end))
            pass_fds = (read_end,)
        with contextlib.ExitStack() as files:
            out = files.enter_context(self._output.open("ab")) if self._output else None
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=pass_fds,
                # Ctrl-C in the terminal reaches this process only, which stops the stack in order.
                start_new_session=True,
            )
        if read_end is not None:
            os.close(read_end)

    def poll(self) -> int | None:
        """Return the supervisor's exit code; None while it runs."""
        assert self._supervisor is not None
        return self._supervisor.poll()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> StackInfo:
        """Wait until every service is ready and return the stack.

        Raises:
            StackError: another stack is on the data folder, or a part does not start.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            code = self.poll()
            if code == EXIT_LOCKED:
                raise StackError(describe_lock(self.options.data_dir))
            if code is not None:
                raise StackError(f"the stack did not start (exit code {code}){self._output_tail()}")
            info = read_stack(self.options.data_dir)
            if info is not None and info.ready and self._supervisor and info.pid == self._supervisor.pid:
                return info
            if time.monotonic() > deadline:
                raise StackError(
                    f"the stack is not ready after {timeout_s:.0f} s{_describe_unready(info)}{self._output_tail()}"
                )
            time.sleep(0.03)

    def stop(self, patience_s: float = 60.0) -> None:
        """Stop everything in order and wait; kill what is left after ``patience_s`` seconds."""
        if self._supervisor is None:
            return
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        elif self._supervisor.poll() is None:
            self._supervisor.terminate()
        try:
            self._supervisor.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self.end_orphans()

    def stop_at_once(self) -> None:
        """Stop without waiting for checkpoints."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.terminate()

    def end_orphans(self) -> None:
        """End the children of a killed supervisor."""
        assert self._supervisor is not None
        supervised = self._supervisor.returncode
        if supervised is not None and supervised < 0 and not self._detach:
            process.end_all(lambda: process.descendants(os.getpid()))
            stack_file(self.options.data_dir).unlink(missing_ok=True)

    def _output_tail(self) -> str:
        from trainbus.embedded.servers import read_tail

        return "" if self._output is None else f":\n{read_tail(self._output, 20)}"


def wait_stack_ready(data_dir: Path, timeout_s: float = READY_TIMEOUT_S) -> StackInfo:
    """Wait until the stack that another process started on a data folder is ready, and return it.

    Raises:
        StackError: it ended, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while is_locked(data_dir):
        info = read_stack(data_dir)
        if info is not None and info.ready:
            return info
        if time.monotonic() > deadline:
            raise StackError(f"the stack on {data_dir} is not ready after {timeout_s:.0f} s{_describe_unready(info)}")
        time.sleep(0.05)
    raise StackError(f"the stack on {data_dir} has just stopped: start it again with `trainbus up`")


def stop_stack(data_dir: Path, patience_s: float = 60.0) -> bool:
    """Stop the stack that runs on a data folder; False if there was none."""
    info = read_stack(data_dir)
    if info is None:
        return False
    os.kill(info.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while is_locked(data_dir):
        if time.monotonic() > deadline:
            raise StackError(f"the stack on {data_dir} (process {info.pid}) has not stopped after {patience_s:.0f} s")
        time.sleep(0.05)
    return True


def describe_lock(data_dir: Path) -> str:
    """Return the message about a data folder that another stack uses."""
    holder = ""
    with contextlib.suppress(OSError):
        holder = (data_dir / "stack.lock").read_text().strip()
    return (
        f"another stack (process {holder}) already runs on {data_dir}: "
        f"use it as it is, stop it with `trainbus down`, or give another --data-dir"
    )
