"""Times and durations as users type them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from trainbus.client.errors import UsageError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_NAMES = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d", "week": "w"}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*[a-z]*\s*)+")


def parse_duration(text: str) -> float:
    """Return the seconds of ``90``, ``10m``, ``1 h 30 min`` or ``2 days``.

    Raises:
        UsageError: the text is no duration.
    """
    plain = text.strip().lower()
    if _DURATION.fullmatch(plain):
        parts = [(float(number), _unit_s(unit)) for number, unit in _PART.findall(plain)]
        if all(size for _, size in parts):
            return sum(number * size for number, size in parts)
    raise UsageError(f"{text!r} is no duration: write 90s, 10m, 2h or 1d")


def parse_time(text: str, now: datetime) -> datetime:
    """Return the time of ISO 8601 (UTC unless it has a zone), of a time of today, or of ``2 h ago``.

    Raises:
        UsageError: the text is no time.
    """
    plain = text.strip()
    if plain.lower().endswith("ago"):
        return now - timedelta(seconds=parse_duration(plain[:-3]))
    if plain.lower() in ("now", "today", "yesterday"):
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return {"now": now, "today": midnight, "yesterday": midnight - timedelta(days=1)}[plain.lower()]
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", plain):
        plain = f"{now:%Y-%m-%d}T{plain.zfill(len(plain) + (plain[1] == ':'))}"
    try:
        time = datetime.fromisoformat(plain)
    except ValueError:
        raise UsageError(f"{text!r} is no time: write 2026-11-20T14:00 (UTC), 14:00 or '2 h ago'") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_since(text: str, now: datetime) -> datetime:
    """Return the time that a duration (``10m``) before now, or a time as of ``parse_time``, means.

    Raises:
        UsageError: the text is neither.
    """
    if _DURATION.fullmatch(text.strip().lower()):
        return now - timedelta(seconds=parse_duration(text))
    return parse_time(text, now)


def _unit_s(name: str) -> float:
    if not name:
        return 1.0
    singular = name.removesuffix("s") if len(name) > 1 else name
    return UNITS_S.get(singular) or UNITS_S.get(_NAMES.get(singular, ""), 0.0)
