"""Times in records."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: A number of seconds beyond the year 5000 is a number of milliseconds.
_MAX_S = 95_617_584_000


def parse_instant(value: Any) -> int:
    """Return microseconds since 1970 (UTC) of an ISO 8601 text, a date, a ``datetime`` or a number of seconds.

    What names no zone is UTC.

    Raises:
        ValueError: it is not a time; the message names the accepted forms.
    """
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError(f"{value[:60]!r} is no time: write ISO 8601, 2026-05-01T12:00:00Z") from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or abs(value) > _MAX_S:
            raise ValueError(f"{value!r} is no time in seconds since 1970; are these milliseconds?")
        return round(value * 1_000_000)
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if not isinstance(value, datetime):
        raise ValueError(f"a {type(value).__name__} is no time: write ISO 8601, or seconds since 1970")
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    passed: timedelta = value - _EPOCH
    return passed // _MICROSECOND
