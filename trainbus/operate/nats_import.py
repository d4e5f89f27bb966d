"""Import nats-py without aiohttp, which only its WebSockets need: half of a short command's time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def aiohttp_hidden() -> Iterator[None]:
    """Make ``import aiohttp`` fail in the block, unless it is loaded already. nats-py is prepared for that."""
    if "aiohttp" in sys.modules:
        yield
        return
    # None in this place makes `import aiohttp` raise ImportError.
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["aiohttp"]
