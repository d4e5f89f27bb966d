"""A process with torch imported that forks ranks and model processes: ``python -m trainbus.ranks.warm --socket PATH``.

Importing torch takes seconds, forking takes milliseconds. This process imports everything a rank needs, and
has no threads, no process group and no CUDA, so a fork of it is as good as a fresh start. It serves any
number of connections, one JSON object a line: ``fork``, ``ping``; and sends ``exited`` to all when a child ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

# A pool of threads would not survive the fork, so the libraries must not start one. The children set their own number.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import safetensors.torch  # noqa: E402

# The first optimizer that is made imports torch._dynamo, which takes longer than all the rest.
import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402
import torch.nn.parallel  # noqa: E402
import torch.profiler  # noqa: E402

from contracts.model_process import MODEL_PROCESS_MODULE  # noqa: E402
from contracts.ranks import PACKAGES_DIR_VARIABLE  # noqa: E402
from trainbus.agent_link import process_exit  # noqa: E402
from trainbus.ranks import rank  # noqa: E402
from trainbus.ranks.large_pages import use_large_pages  # noqa: E402

#: How long to stay without a connection and without children.
IDLE_S = 60.0
#: Goes on while the machine is suspended.
BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
#: The modules whose ``main`` a fork may run.
RANK_MODULE = "trainbus.ranks.rank"
FORKED_MODULES = (RANK_MODULE, MODEL_PROCESS_MODULE)
WARMED = (safetensors.torch, torch._dynamo, torch.distributed, torch.nn.parallel, torch.profiler)


class WarmServer:
    """Forks on request and reports how each child ended. One thread, no locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Connection -> what it has sent so far of its next line.
        self._connections: dict[socket.socket, bytes] = {}
        #: pid -> where its exit code goes.
        self._children: dict[int, Path] = {}
        self._ending = False
        self._idle_since = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._listener.setblocking(False)
        # Signals come in through a socket, so that one select waits for everything.
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until SIGTERM, or until this process has been idle for a while."""
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        while not self._ending and not self._is_idle():
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            self._reap()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _on_terminate(self, *_: object) -> None:
        self._ending = True

    def _is_idle(self) -> bool:
        if self._connections or self._children:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since > IDLE_S

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(5.0)  # a client that does not read must not hold up the others for long
        self._connections[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        *lines, self._connections[connection] = (self._connections[connection] + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._send(connection, self._answer_request(line))

    def _answer_request(self, line: bytes) -> dict[str, Any]:
        request_id = None
        try:
            request = json.loads(line)
            request_id = request.get("id")
            match request.get("op"):
                case "ping":
                    return {"op": "pong", "pid": os.getpid()}
                case "fork":
                    return {"op": "forked", "id": request_id, "pid": self._fork(request)}
                case other:
                    return {"op": "error", "id": request_id, "error": f"there is no op {other!r}"}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            return {"op": "error", "id": request_id, "error": f"{type(error).__name__}: {error}"}

    def _fork(self, request: dict[str, Any]) -> int:
        env = {str(name): str(value) for name, value in request["env"].items()}
        if packages_dir := env.get(PACKAGES_DIR_VARIABLE):
            _check_packages(Path(packages_dir))
        start_before = request.get("start_before")
        if start_before is not None and time.clock_gettime(BOOT_CLOCK) >= start_before:
            raise ValueError("the request came too late")
        module = str(request.get("module", RANK_MODULE))
        if module not in FORKED_MODULES:
            raise ValueError(f"a fork of {module!r} is not offered")
        cwd, log, exit_file = str(request["cwd"]), str(request["log"]), Path(request["exit_file"])
        # Opened before the fork, so that what is wrong with them is this request's error.
        log_fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not os.path.isdir(cwd):
                raise NotADirectoryError(cwd)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._run_child(module, env, cwd, log_fd, exit_file)
        finally:
            os.close(log_fd)
        self._children[pid] = exit_file
        return pid

    def _run_child(self, module: str, env: dict[str, str], cwd: str, log_fd: int, exit_file: Path) -> NoReturn:
        """Close everything of the parent in the child, and run the module's ``main`` there."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            self._selector.close()
            for sock in (self._listener, self._wake_read, self._wake_write, *self._connections):
                sock.close()
            null_fd = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null_fd, 0)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            os.close(null_fd)
            os.close(log_fd)
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            if packages_dir := env.get(PACKAGES_DIR_VARIABLE):
                sys.path.insert(0, packages_dir)  # load_task puts the project's code before it
            sys.argv = [module]
            process_exit.exit_file = exit_file
            importlib.import_module(module).main()
        except BaseException:
            traceback.print_exc()
        os._exit(rank.EXIT_FAILED)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            exit_file = self._children.pop(pid, None)
            if exit_file is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            try:
                process_exit.write_exit_file(exit_file, code)
            except OSError as error:  # the run's folder may be gone already
                print(f"trainbus.ranks.warm: {exit_file}: {error}", file=sys.stderr, flush=True)
            for connection in list(self._connections):
                self._send(connection, {"op": "exited", "pid": pid, "code": code})

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if self._connections.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()


def _check_packages(folder: Path) -> None:
    """Refuse a project's packages of which this process has imported another version: a fork would have that one.

    Raises:
        ValueError: a module of ``folder`` is imported here.
    """
    modules = {each.name.partition(".")[0] for each in folder.iterdir() if not each.name.endswith(".dist-info")}
    imported = sorted(modules & {name.partition(".")[0] for name in sys.modules})
    if imported:
        raise ValueError(f"the project has its own {', '.join(imported)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args()
    with contextlib.suppress(ImportError):
        import PIL.PngImagePlugin  # noqa: F401  (most image tasks use it; it is optional)
    # Memory of imported modules stays shared with the children if the garbage collector does not touch it.
    gc.collect()
    gc.freeze()
    use_large_pages()
    WarmServer(arguments.socket).serve()


if __name__ == "__main__":
    main()
