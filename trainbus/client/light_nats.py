"""Importing nats-py without what only WebSockets need: aiohttp is half of a short command's time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_aiohttp() -> Iterator[None]:
    """Let imports in the block believe that aiohttp is not installed, unless it is loaded already."""
    if "aiohttp" in sys.modules:
        yield
        return
    # None in this place makes `import aiohttp` raise ImportError, which nats-py is prepared for.
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["aiohttp"]
