"""The HTTP interface of a service: uvicorn in the service's own frame, on a socket that the service opens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from services.kit.service import Service

log = structlog.get_logger(__name__)


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
    service: Service, api: FastAPI, host: str, port: int, *, grace_s: int, report_port: Callable[[int | None], None]
) -> None:
    """Answer HTTP requests for as long as the service runs.

    Args:
        port: 0 takes a free one.
        grace_s: how long open requests may take to end when the service stops.
        report_port: is called with the port once the service listens, and with None at the end.
    """
    config = uvicorn.Config(
        api,
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
