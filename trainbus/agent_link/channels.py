"""A rank's two channels to its agent: the journal (a file) and the control socket.

Appending to the journal never waits. A thread serves the socket and reconnects for ever; a training step only reads the
flags that it sets.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from contracts.disk_space import DISK_FULL
from contracts.progress import ring_name
from contracts.ranks import (
    CONTROL_LINE,
    EXIT_STOPPED,
    EndedLine,
    HelloLine,
    JournalLine,
    Launch,
    MetricsLine,
    PeerLostLine,
    StopLine,
    UrgentLine,
    json_line,
)
from trainbus.agent_link.process_exit import hard_exit
from trainbus.agent_link.ring import RingWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

RECONNECT_INTERVAL_S = 0.2


class Journal:
    """Reports to the agent without waiting for it.

    Events are lines, one ``write()`` each, so a kill leaves only whole lines. Metrics of a step go to the ring beside
    the journal, which takes no system call; they become lines where the ring cannot hold them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()
        self._ended = self._is_full = False
        self._ring = _open_ring(path)
        #: Called after urgent lines, to wake the agent.
        self.ring_doorbell: Callable[[], None] = lambda: None

    def metrics(
        self,
        step: int,
        values: Mapping[str, float],
        *,
        epoch: int = 0,
        samples_consumed: int = 0,
        total_steps: int | None = None,
    ) -> None:
        """Report ``values``, NaN and infinity among them."""
        with self._lock:
            if self._ended:
                return
            if self._ring is not None and self._ring.record(step, values, epoch, samples_consumed, total_steps):
                return
        self._append(
            MetricsLine(
                time=time.time(),
                step=step,
                values=dict(values),
                epoch=epoch,
                samples_consumed=samples_consumed,
                total_steps=total_steps,
            )
        )

    def heartbeat(self, step: int) -> None:
        """Show that this rank makes progress with ``step`` steps done: after each step, and within longer work."""
        with self._lock:
            if self._ring is not None:
                self._ring.write_heartbeat(step)

    def append(self, line: UrgentLine) -> None:
        """Append a line and wake the agent; after an ``EndedLine`` lines of other threads are dropped."""
        self._append(line)
        self.ring_doorbell()

    def _append(self, line: JournalLine) -> None:
        data = json_line(line)
        with self._lock:
            if self._ended:
                return
            self._ended = isinstance(line, EndedLine)
            self._write(data)

    def _write(self, data: bytes) -> None:
        """Append a whole line, or none where the disk is full: training goes on without what it reports."""
        size_bytes = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            written = 0
        if written == len(data):
            return
        if written:
            os.ftruncate(self._fd, size_bytes)
        if not self._is_full:
            print(f"trainbus: what this rank reports is lost while the disk of {self.path.parent} is full", flush=True)
        self._is_full = True


def _open_ring(journal: Path) -> RingWriter | None:
    """Open the ring beside a rank's journal; None where the file system has no room for one."""
    rank = journal.stem.removeprefix("rank_")
    if not rank.isdigit():
        return None
    try:
        return RingWriter(journal.with_name(ring_name(int(rank))))
    except (OSError, ValueError) as error:
        print(f"trainbus: metrics go to the journal: {error}", flush=True)
        return None


class Control:
    """The agent's requests. The training loop reads them; the link's thread or a signal sets them."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.reason = ""
        #: Called from the link's thread when another rank is gone.
        self.on_peer_lost: Callable[[], None] = lambda: None

    def request_stop(self, reason: str) -> None:
        """Request a stop at the next step that all ranks agree on. A second request changes nothing."""
        if not self._stop.is_set():
            self.reason = reason
            self._stop.set()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()


class AgentLink:
    """Keeps the control socket open from a thread, for as long as the process lives.

    A stop without a checkpoint ends the process at once. An agent that stays away is not this process's concern: the
    node's guard ends ranks whose node may count as lost.
    """

    def __init__(
        self, launch: Launch, rank: int, journal: Journal, control: Control, exit: Callable[[int], object] = hard_exit
    ) -> None:
        self._launch = launch
        self._hello = json_line(HelloLine(rank=rank, pid=os.getpid(), generation=launch.generation))
        self._journal = journal
        self._control = control
        self._exit = exit
        self._socket: socket.socket | None = None
        #: Set when a stop must end the process without the training loop's help (runs of kind evaluate).
        self.stop_at_once = False

    def start(self) -> None:
        self._journal.ring_doorbell = self._ring_doorbell
        threading.Thread(target=self._serve, name="trainbus-agent-link", daemon=True).start()

    def _ring_doorbell(self) -> None:
        """Wake the agent. A lost ring only costs time: the agent polls the journal anyway."""
        connection = self._socket
        if connection is None:
            return
        try:
            connection.send(b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return  # full or broken: the reading thread notices and reconnects

    def _serve(self) -> None:
        while True:
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(5.0)
                connection.connect(str(self._launch.socket))
                connection.sendall(self._hello)
            except OSError:
                connection.close()
                time.sleep(RECONNECT_INTERVAL_S)
                continue
            self._socket = connection
            self._read(connection)
            self._socket = None
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        """Handle lines until the connection ends."""
        connection.settimeout(None)
        pending = b""
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.strip():
                    self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        try:
            command = CONTROL_LINE.validate_json(line)
        except ValidationError as error:
            # A newer agent may send lines that this version does not know.
            print(f"trainbus: ignored a control line: {error.errors()[0]['msg']}", flush=True)
            return
        match command:
            case PeerLostLine():
                self._control.on_peer_lost()
            case StopLine(checkpoint=False) as stop:
                self._end_at_once(stop.reason)
            case StopLine() as stop if self.stop_at_once:
                self._end_at_once(stop.reason)
            case StopLine() as stop:
                self._control.request_stop(stop.reason)

    def _end_at_once(self, reason: str) -> None:
        self._journal.append(EndedLine(time=time.time(), outcome="stopped", error=reason))
        self._exit(EXIT_STOPPED)
