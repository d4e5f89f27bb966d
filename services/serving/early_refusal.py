"""Refuses requests for predictions before they are parsed, while too many wait.

A server that spends much of an answer's work on each refusal answers less the more it is asked. So what can be refused
is refused where its head arrives (``RefusingProtocol``), for a fifth of an answer of the smallest model; the rest, such
as a chunked body, before its body is read (``AdmissionMiddleware``).
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import TYPE_CHECKING, Any

import h11
from starlette.responses import JSONResponse

from services.kit.http_server import PatientProtocol
from services.serving.admission import OverloadedError
from services.serving.router import Router

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: The paths of predictions, and the model that they name. One that names a version may go to another process.
PREDICTION = re.compile(
    r"/predict(?:/(?P<predict>[^/]+))?|/v2/models/(?P<infer>[^/]+)(?:/versions/[^/]+)?/infer"
    r"|/v1/models/(?P<first>[^/]+):predict"
)
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)
#: Headers of requests that are left to the HTTP server.
UNCOMMON = re.compile(rb"\r\n(?:connection:[ \t]*close|transfer-encoding:|upgrade:|expect:)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"


def find_refusal(router: Router, path: str, query: str, *, is_arrival: bool = False) -> OverloadedError | None:
    """Return why a request that comes now must not wait; None where it may, or asks for no prediction."""
    if (match := PREDICTION.fullmatch(path)) is None:
        return None
    names_version = "/versions/" in path or bool(query)
    try:
        name = match["predict"] or match["infer"] or match["first"]
        router.check_admission(name, names_version=names_version, is_arrival=is_arrival)
    except OverloadedError as error:
        return error
    return None


def build_refusal(error: OverloadedError) -> JSONResponse:
    """Return the answer 503."""
    return _build_refusal(str(error), error.retry_after_s)


def _build_refusal(text: str, retry_after_s: int) -> JSONResponse:
    return JSONResponse({"error": text}, 503, {"Retry-After": str(retry_after_s)})


@functools.lru_cache(maxsize=1024)
def _encode_refusal(text: str, retry_after_s: int) -> bytes:
    refusal = _build_refusal(text, retry_after_s)
    lines = b"".join(b"%b: %b\r\n" % header for header in refusal.raw_headers)
    return b"HTTP/1.1 503 Service Unavailable\r\n%b\r\n%b" % (lines, bytes(refusal.body))


class RefusingProtocol(PatientProtocol):
    """HTTP that answers 503 to the head of a request."""

    def __init__(self, *arguments: Any, router: Router, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._router = router
        #: Bytes of the body of a refused request that are still to come.
        self._refused_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._refused_bytes:
            skipped = min(self._refused_bytes, len(data))
            self._refused_bytes -= skipped
            data = data[skipped:]
            if not data:
                return
        if (error := self._find_refusal(data)) is None:
            super().data_received(data)
        else:
            self._refuse(error)

    def _refuse(self, error: OverloadedError) -> None:
        self.transport.write(_encode_refusal(str(error), error.retry_after_s))
        self._unset_keepalive_if_required()
        loop = asyncio.get_running_loop()
        self.timeout_keep_alive_task = loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _find_refusal(self, data: bytes) -> OverloadedError | None:
        """Return why a request is refused, and count what is still to come of it."""
        if not data.startswith(b"POST /") or not self._is_between_requests():
            return None
        if (missing_bytes := count_missing_bytes(data)) is None:
            return None
        path, _, query = data[5 : data.find(b" ", 5)].decode("latin-1").partition("?")
        error = find_refusal(self._router, path, query, is_arrival=True)
        if error is not None:
            self._refused_bytes = missing_bytes
        return error

    def _is_between_requests(self) -> bool:
        connection = getattr(self, "conn", None)
        if not isinstance(connection, h11.Connection):
            return False
        states = (connection.our_state, connection.their_state)
        return states == (h11.IDLE, h11.IDLE) and not connection.trailing_data[0]


def count_missing_bytes(data: bytes) -> int | None:
    """Return how much of a request's body is not there; None where this is not one request of the plain kind."""
    end = data.find(HEAD_END)
    lengths = CONTENT_LENGTH.findall(data, 0, end + 2)
    if end < 0 or len(lengths) != 1 or UNCOMMON.search(data, 0, end):
        return None
    missing_bytes = end + len(HEAD_END) + int(lengths[0]) - len(data)
    return missing_bytes if missing_bytes >= 0 else None


class AdmissionMiddleware:
    """Refuses requests for predictions before their body is read, and counts those that are open."""

    def __init__(self, app: ASGIApp, router: Router) -> None:
        self._app, self._router = app, router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or PREDICTION.fullmatch(scope["path"]) is None:
            await self._app(scope, receive, send)
            return
        error = find_refusal(self._router, scope["path"], scope["query_string"].decode("latin-1"))
        if error is not None:
            await build_refusal(error)(scope, receive, send)
            return
        self._router.load.begin_request()
        try:
            await self._app(scope, receive, send)
        finally:
            self._router.load.end_request()
