"""What every part of a request is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Metric = Annotated[str, Field(min_length=1, max_length=200)]
Mode = Literal["min", "max"]


class SpecPart(BaseModel):
    """A part of a request: frozen, and as strict about unknown fields as the request itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")
