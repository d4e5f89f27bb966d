"""Supervise the embedded stack: start all processes at once, restart those that end, stop them in order.

The supervisor is a process with one thread (it forks the services) and without asyncio. Its parent holds the other
end of a pipe: when the pipe closes, for any reason, the stack stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from contracts.events import BY_TYPE
from services.kit.ports import PortsError
from trainbus.embedded import process, registry
from trainbus.embedded.layout import (
    BUCKETS,
    WORKER,
    Layout,
    StackOptions,
    Unit,
    plan_stack,
    stack_file,
    write_json,
)
from trainbus.embedded.servers import Server, ServerError, read_tail

#: Exit codes of the supervisor.
EXIT_STOPPED, EXIT_FAILED, EXIT_LOCKED = 0, 1, 3
#: Seconds before a dead child is started again; the last one repeats.
RESTART_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 5.0)
#: A child that ran this long is restarted with the first delay again.
STABLE_AFTER_S = 20.0
#: Ends of one child after which a stack that is not ready yet is given up.
MAX_START_ATTEMPTS = 4
TICK_S = 0.05
#: Seconds between two checks of the nodes that the autoscaler wants.
NODES_CHECK_S = 0.25
#: A little more than a service gives its handlers to finish.
SERVICE_STOP_S = 15.0
#: Imported before the services are forked; not their own modules, since those register metrics.
SHARED_IMPORTS = (
    "contracts.topology",
    "services.kit.service",
    "services.kit.store.objects",
    "services.kit.jobs",
    "services.kit.lease",
    "aioboto3",
    "aiobotocore.client",
    "botocore.handlers",
)


@dataclass(slots=True)
class Child:
    """A process under supervision: a service forked from here, or one of the two servers."""

    name: str
    start: Callable[[], int]
    log_path: Path
    unit: Unit | None = None
    #: The autoscaler's file about this node, if the autoscaler wants it.
    wanted_by: Path | None = None
    server: Server | None = None
    pid: int | None = None
    started_at: float = 0.0
    start_again_at: float | None = None
    restarts: int = 0
    #: Ends in a row, each soon after the start.
    early_ends: int = 0
    ready: bool = False
    #: When a node that the autoscaler no longer wants is killed.
    kill_at: float | None = None


class StartError(Exception):
    """The stack cannot start; the text names the part and has the end of its log."""


@dataclass(slots=True)
class Supervisor:
    """One run of the stack, from its start to its end."""

    layout: Layout
    #: Read end of the pipe whose closing stops the stack; None: only signals stop it.
    watch_fd: int | None
    children: list[Child] = field(default_factory=list)
    stop_requests: int = 0
    #: The process that makes the buckets, while it runs.
    init_pid: int | None = None
    was_ready: bool = False
    nodes_check_at: float = 0.0
    _wakeup: socket.socket | None = None
    #: Kept open: the kernel writes each signal into it.
    _sender: socket.socket | None = None

    def run(self) -> int:
        """Supervise until asked to stop; return the exit code."""
        process.adopt_orphans()
        self._catch_signals()
        code = EXIT_STOPPED
        try:
            self._start_all()
            while not self.stop_requests:
                self._tick()
        except (StartError, ServerError, PortsError) as error:
            print_status(str(error))
            code = EXIT_FAILED
        finally:
            self._stop_all()
        return code

    @property
    def _init_log(self) -> Path:
        return self.layout.data_dir / "logs" / "init.log"

    # -- start --------------------------------------------------------------

    def _start_all(self) -> None:
        for server in (self.layout.nats, self.layout.s3):
            server.before_exec = process.end_with_parent()
            self.children.append(Child(server.name, _starter(server), server.log_path, server=server))
        for child in self.children:
            self._start(child)
        for name in SHARED_IMPORTS:
            importlib.import_module(name)
        for event in BY_TYPE.values():
            event.model_rebuild()  # compiled once here, and not by each service for itself
        environment = self.layout.units[0].environment
        self.init_pid = process.fork(_make_buckets, "trainbus init", environment, self._init_log)
        for unit in self.layout.units:
            child = Child(unit.name, _forker(unit), unit.log_path, unit=unit)
            self.children.append(child)
            self._start(child)
        self._write_state()
        self._register()

    def _register(self) -> None:
        """Make the stack known to commands in other folders; a folder that cannot be written stops nothing."""
        try:
            registry.register(self.layout.data_dir, self.layout.options.name)
        except OSError as error:
            print_status(f"commands in other folders do not find this stack: {error}")

    def _start(self, child: Child) -> None:
        child.pid, child.started_at, child.start_again_at, child.ready = child.start(), time.monotonic(), None, False

    # -- while it runs ------------------------------------------------------

    def _tick(self) -> None:
        """Collect ended children, start those that are due, check which are ready; then wait for a tick."""
        self._collect()
        now = time.monotonic()
        changed = self.layout.scales and now >= self.nodes_check_at and self._scale_nodes(now)
        for child in self.children:
            if child.start_again_at is not None and now >= child.start_again_at:
                self._start(child)
                child.restarts += 1
                changed = True
            if child.pid is not None and not child.ready and _answers(child):
                child.ready = True
                if child.restarts and self.was_ready:
                    print_status(f"{child.name} is ready again after {now - child.started_at:.1f} s")
        if not self.was_ready and self.init_pid is None and all(child.ready for child in self.children):
            self.was_ready = changed = True
        if changed:
            self._write_state()
        self._wait()

    def _scale_nodes(self, now: float) -> bool:
        """Start the nodes that the autoscaler wants, stop the others; return whether any started or ended.

        Files of an earlier run of the stack count: the autoscaler deletes those that it no longer wants.
        """
        self.nodes_check_at = now + NODES_CHECK_S
        wanted = self.layout.find_wanted_nodes()
        gone = [child for child in self.children if child.kill_at is not None and child.pid is None]
        self.children = [child for child in self.children if child not in gone]
        for child in self.children:
            if child.wanted_by is None or child.name in wanted:
                continue
            if child.kill_at is None:
                print_status(f"{child.name} is no longer wanted and is stopped")
                child.kill_at = now + self.layout.options.grace_s
                child.start_again_at = None
                if child.pid is not None:
                    _kill(child.pid, signal.SIGTERM)
            elif now > child.kill_at and child.pid is not None:
                _kill(child.pid, signal.SIGKILL)
        known = {child.name for child in self.children}
        new = [name for name in wanted if name not in known]
        for name in new:
            unit = self.layout.make_wanted_node(wanted[name])
            child = Child(name, _forker(unit), unit.log_path, unit=unit, wanted_by=wanted[name])
            self.children.append(child)
            print_status(f"{name} is wanted and is started")
            self._start(child)
        return bool(gone or new)

    def _collect(self) -> None:
        """Note the children that have ended and schedule their restarts."""
        for child in self.children:
            if child.pid is None or (code := _poll_exit(child)) is None:
                continue
            child.pid, child.ready = None, False
            if child.kill_at is not None:
                continue
            ran_s = time.monotonic() - child.started_at
            child.early_ends = 1 if ran_s > STABLE_AFTER_S else child.early_ends + 1
            delay_s = RESTART_DELAYS_S[min(child.early_ends, len(RESTART_DELAYS_S)) - 1]
            child.start_again_at = time.monotonic() + delay_s
            print_status(
                f"{child.name} {_describe_end(code)}; it restarts in {delay_s:g} s (its log: {child.log_path})"
            )
            if not self.was_ready and child.early_ends >= MAX_START_ATTEMPTS:
                tail = read_tail(child.log_path)
                raise StartError(f"{child.name} ended {child.early_ends} times at its start; its log ends:\n{tail}")
        if self.init_pid is not None:
            pid, status = os.waitpid(self.init_pid, os.WNOHANG)
            if pid:
                self.init_pid = None
                if status:
                    raise StartError(f"the buckets could not be made:\n{read_tail(self._init_log, 40)}")
        process.reap(known=[child.pid for child in self.children if child.pid is not None])

    def _wait(self) -> None:
        """Sleep for a tick, or until a child ends, a signal comes or the parent ends."""
        assert self._wakeup is not None
        watched: list[Any] = [self._wakeup] + ([] if self.watch_fd is None else [self.watch_fd])
        ready, _, _ = select.select(watched, [], [], TICK_S)
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)
        if self.watch_fd in ready and os.read(self.watch_fd or 0, 1) == b"":
            self.watch_fd = None
            self.stop_requests += 1

    def _write_state(self) -> None:
        write_json(
            stack_file(self.layout.data_dir),
            {
                "state": "ready" if self.was_ready else "starting",
                "pid": os.getpid(),
                "nats_url": self.layout.nats.url,
                "s3_endpoint": self.layout.s3.endpoint,
                "gateway_url": self.layout.gateway_url,
                "serving_url": self.layout.serving_url,
                "mlflow_tracking_uri": self.layout.mlflow_uri,
                "nodes": self.layout.options.nodes,
                "slots": self.layout.options.slots,
                "processes": [
                    {
                        "name": child.name,
                        "service": child.unit.service if child.unit else child.name,
                        "pid": child.pid,
                        "ready": child.ready,
                        "url": child.unit.url if child.unit else None,
                        "restarts": child.restarts,
                        "log": str(child.log_path),
                    }
                    for child in self.children
                ],
            },
        )

    # -- stop ---------------------------------------------------------------

    def _stop_all(self) -> None:
        """Stop the workers first, with time for their checkpoints; then the services; NATS and S3 last."""
        started_at, asked = time.monotonic(), self.stop_requests
        units = [child for child in self.children if child.unit is not None]
        workers = [child for child in units if child.unit and child.unit.service == WORKER]
        self._end_children(workers, self.layout.options.grace_s if self.was_ready else 2.0, asked)
        self._end_children([child for child in units if child not in workers], SERVICE_STOP_S, asked)
        for server in (self.layout.s3, self.layout.nats):
            server.stop()
        left = process.end_all(lambda: process.descendants(os.getpid()))
        stack_file(self.layout.data_dir).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            registry.unregister(self.layout.data_dir)
        more = f", {left} leftover processes ended" if left else ""
        print_status(
            f"stopped in {time.monotonic() - started_at:.1f} s{more}; the data stays in {self.layout.data_dir}"
        )

    def _end_children(self, children: list[Child], patience_s: float, asked: int) -> None:
        """Send SIGTERM to children; kill those that run after ``patience_s`` or at another stop request."""
        for child in children:
            child.start_again_at = None
            if child.pid is not None:
                _kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while alive := [child for child in children if child.pid is not None]:
            for child in alive:
                if _poll_exit(child) is not None:
                    child.pid = None
            if time.monotonic() > deadline or self.stop_requests > asked:
                for child in alive:
                    if child.pid is not None:
                        print_status(f"{child.name} did not stop in time and is killed")
                        _kill(child.pid, signal.SIGKILL)
                        os.waitpid(child.pid, 0)
                        child.pid = None
            time.sleep(0.01)

    def _catch_signals(self) -> None:
        self._wakeup, self._sender = socket.socketpair()
        for end in (self._wakeup, self._sender):
            end.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

        def stop(_number: int, _frame: object) -> None:
            self.stop_requests += 1

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)


def print_status(text: str) -> None:
    """Print a line with the time."""
    with contextlib.suppress(OSError):
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _starter(server: Server) -> Callable[[], int]:
    def start() -> int:
        server.spawn()
        assert server.process is not None
        return server.process.pid

    return start


def _forker(unit: Unit) -> Callable[[], int]:
    return lambda: process.fork(
        lambda: process.run_service(unit.service), f"trainbus service {unit.name}", unit.environment, unit.log_path
    )


def _poll_exit(child: Child) -> int | None:
    """Return the exit code of a child (negative: the signal); None while it runs."""
    if child.server is not None:
        assert child.server.process is not None
        return child.server.process.poll()
    assert child.pid is not None
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _answers(child: Child) -> bool:
    if child.server is not None:
        return child.server.answers()
    assert child.unit is not None
    connection = http.client.HTTPConnection("127.0.0.1", child.unit.port, timeout=0.5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _describe_end(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _make_buckets() -> int:
    import asyncio

    from services.kit import telemetry
    from services.kit.settings import Settings
    from services.kit.store.objects import ObjectStore

    settings = Settings()
    telemetry.set_up("init", settings)

    async def ensure_buckets() -> None:
        async with ObjectStore(settings) as objects:
            for name in BUCKETS:
                await objects.ensure_bucket(getattr(settings, f"bucket_{name}"))

    asyncio.run(ensure_buckets())
    return 0


def lock(data_dir: Path, patience_s: float = 0.5) -> IO[str] | None:
    """Lock a data folder until this process ends; return None if another stack has it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    file = (data_dir / "stack.lock").open("a+")
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # A process that checks whether a stack runs holds the lock for an instant.
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    # A killed stack has left its file, which a reader would take for this stack's.
    stack_file(data_dir).unlink(missing_ok=True)
    return file


def main(options: str, watch_fd: str | None = None) -> int:
    """Supervise the stack of these options, in JSON; ``launch.py`` starts this process."""
    fields = json.loads(options)
    given = StackOptions(**fields | {"data_dir": Path(fields["data_dir"]).resolve()})
    held = lock(given.data_dir)
    if held is None:
        return EXIT_LOCKED
    with held:
        return Supervisor(plan_stack(given, os.environ), None if watch_fd is None else int(watch_fd)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
