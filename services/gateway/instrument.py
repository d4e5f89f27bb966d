"""What stands before every HTTP request: counting by route template (never by path), tracing, and one refusal."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import metrics
from services.gateway.problems import problem_response
from services.kit import telemetry


class SameSite:
    """ASGI middleware: refuses requests that a browser sends on behalf of another web site.

    The page and its API have no login of their own, so a page elsewhere must not be able to cancel runs.
    Clients that are no browsers send no such header and are not concerned.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            site = dict(scope["headers"]).get(b"sec-fetch-site", b"none")
            if site not in (b"none", b"same-origin"):
                refusal = problem_response(403, "requests from pages of other web sites are refused")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Instrument:
    """ASGI middleware; it passes streams through as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        answered = False

        def observe(status: int) -> None:
            nonlocal answered
            answered = True
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.HTTP_REQUESTS.labels(scope["method"], route, str(status)).inc()
            metrics.HTTP_SECONDS.labels(route).observe(time.monotonic() - started)

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                observe(message["status"])
            await send(message)

        try:
            with _start_span(scope):
                await self._app(scope, receive, send_observed)
        except Exception:
            if not answered:
                observe(500)
            raise


def _start_span(scope: Scope) -> AbstractContextManager[Any]:
    """A span around what changes something: the run that it asks for goes on with the caller's trace."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return nullcontext()
    caller = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
    return telemetry.start_span(f"HTTP {scope['method']}", SpanKind.SERVER, caller)
