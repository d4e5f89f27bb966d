"""The HTTP interface of a service: uvicorn in the service's own frame, on a socket that the service opens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from services.kit.metrics import READERS_CUT_OFF
from services.kit.service import Service

log = structlog.get_logger(__name__)


#: Seconds within which a reader has to take what waits for it, some 50 KB at the least, or it is cut off.
READER_PATIENCE_S = 60.0


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP that ends the connection of a reader which takes nothing: else its answer would be held for ever.

    It comes back where it was: with ``Last-Event-ID`` to a stream of events, with ``Range`` to a file.
    """

    _deadline: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = asyncio.get_running_loop().call_later(READER_PATIENCE_S, self._cut_off)

    def resume_writing(self) -> None:
        self._forget_deadline()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut_off(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        log.warning("cut off a slow reader", path=self.scope["path"], client=self.client, waiting_bytes=waiting)
        READERS_CUT_OFF.inc()
        # Not close: it would first wait until the reader has taken what is in the buffer.
        self.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The service's frame handles signals.
        yield


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on an address, and send each part of an answer at once.

    asyncio sets ``TCP_NODELAY`` only on sockets that name TCP as their protocol, which ``create_server`` does not:
    the body of an answer would wait 40 ms for the acknowledgement of its headers. Connections have what their
    listener has.

    Raises:
        OSError: the port is in use, or the host is not this machine's.
    """
    listener = socket.create_server((host, port))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def serve_http(
    service: Service,
    api: ASGIApp,
    host: str,
    port: int,
    *,
    grace_s: int,
    report_port: Callable[[int | None], None],
    protocol: Callable[..., PatientProtocol] = PatientProtocol,
) -> None:
    """Answer HTTP requests for as long as the service runs.

    Args:
        protocol: makes the protocol of a connection from uvicorn's arguments.
        port: 0 takes a free one.
        grace_s: how long open requests may take to end when the service stops.
        report_port: is called with the port once the service listens, and with None at the end.
    """
    config = uvicorn.Config(
        api,
        http=protocol,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=grace_s,
        server_header=False,
    )
    server = _Server(config)
    listens, ended = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        # The service opens the socket, so that a port in use ends it with an error that names the port.
        listener = open_listener(host, port)
        listens.set()
        bound_port = listener.getsockname()[1]
        report_port(bound_port)
        log.info(f"{service.name} listens", url=f"http://{host}:{bound_port}")
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
            report_port(None)
            ended.set()

    async def stop() -> None:
        server.should_exit = True
        if listens.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), grace_s + 2)

    service.add_background_task(serve)
    service.add_stop_action(stop)
