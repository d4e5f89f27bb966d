"""Numbers and reasons as sentences and tables have them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise

#: The reasons of requests that gave none: a sentence does not repeat them.
DEFAULT_REASONS = frozenset(
    {
        *("cancelled by request", "drained by request", "undrained by request", "pinned by request"),
        *("promoted by request", "rolled back by request", "configured by request", "staged by request"),
        *("unpinned by request", "stopped by request", "adopted by request"),
    }
)


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun: ``1 slot``, ``2 slots``, ``1,024 slots``."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def format_metrics(values: Mapping[str, float], limit: int | None = None) -> str:
    """Return metric values in four significant digits: ``accuracy 0.9712, loss 0.08321``."""
    shown = [f"{name} {value:.4g}" for name, value in sorted(values.items())[:limit]]
    return ", ".join(shown) + (" ..." if limit is not None and len(values) > limit else "")


def format_bytes(count: float) -> str:
    """Return bytes in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``42 s``, ``1 m 20 s``, ``2 h 5 m``."""
    units = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
    whole = max(0, round(seconds))
    for (size, unit), (smaller, small_unit) in pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def format_time(moment: datetime) -> str:
    """Return a time to the second: ``2026-01-31 12:00:00 UTC``."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def format_reason(reason: str) -> str:
    """Return a reason as the end of a sentence, '' for one that says nothing."""
    return f": {reason}" if reason and reason not in DEFAULT_REASONS else ""
