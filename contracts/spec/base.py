"""What every part of a request is."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Metric = Annotated[str, Field(min_length=1, max_length=200)]
Mode = Literal["min", "max"]


class SpecPart(BaseModel):
    """A part of a request: frozen, and as strict about unknown fields as the request itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="after")
    def _follows_its_rules(self) -> Self:
        # pydantic validates a nested model without a check by the class's own, strict validator. The schema around it
        # does not count. A fact reads parts without their rules (``contracts/lenient.py``), so each part has a check.
        return self
