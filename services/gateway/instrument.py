"""Counts and times HTTP requests by route template, never by path."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import metrics


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

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                observe(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if not answered:
                observe(500)
            raise
