"""The parameters that several routes take."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query
from pydantic import AfterValidator

from services.gateway.pages import MAX_INTEGER

MAX_KEY = 255
#: The longest range of events in one answer.
MAX_RANGE = 10_000

Key = Annotated[
    str | None, Header(alias="Idempotency-Key", max_length=MAX_KEY, description="the same key is the same request")
]
LastEventId = Annotated[
    int,
    Header(alias="Last-Event-ID", ge=0, description="go on after this event"),
    # After the last number that a stream can have there is nothing, as after any that is greater.
    AfterValidator(lambda sequence: min(sequence, MAX_INTEGER)),
]
Follow = Annotated[bool, Query(description="false: what there is now, as JSON")]
Limit = Annotated[int, Query(ge=1, le=500)]
RangeLimit = Annotated[int, Query(ge=1, le=MAX_RANGE, description="without follow: at most so many events")]
Reason = Annotated[str, Query(max_length=2000)]
Text = Annotated[str | None, Query(max_length=200)]
