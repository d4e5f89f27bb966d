"""How many slots a run can use, what each of them has, how they lie together, and when they may be had."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import AwareDatetime, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from contracts.base import Token
from contracts.spec.base import SpecPart


class Slots(SpecPart):
    """How many slots (GPUs, or CPU slots on a node without) a run can use: anything between the two."""

    min: int = Field(1, ge=1, le=1_000_000)
    max: int = Field(1, ge=1, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        """Read a plain number as both limits."""
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler.resolve_ref_schema(handler(schema))
        limits = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "exactly this many"}
        return {"anyOf": [dict(json_schema), limits]}

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"slots.max ({self.max}) is smaller than slots.min ({self.min})")
        return self


class Resources(SpecPart):
    """What each slot of a run needs; without it, one whole accelerator of any kind."""

    #: Kinds of accelerator that will do; empty: any.
    accelerators: tuple[str, ...] = Field((), max_length=50)
    #: Share of one accelerator: below 1 it is shared with other runs under a limit, 0 means none at all.
    share: float = Field(1.0, ge=0, le=1)
    #: A MIG slice of this profile (``1g.10gb``) instead of an accelerator.
    mig_profile: str | None = Field(None, min_length=1, max_length=50)
    cpus: float = Field(0.0, ge=0, le=100_000)
    memory_bytes: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _whole_slice(self) -> Self:
        if self.mig_profile is not None and self.share != 1:
            raise ValueError("resources.share is of a whole accelerator: leave it out with resources.mig_profile")
        return self


class Gang(SpecPart):
    """How the slots of a run lie together. All of them are placed at once, or none."""

    #: Slots come in bundles of this many, each bundle on one node.
    bundle: int = Field(1, ge=1, le=1_000_000)
    #: Each bundle on a node of its own.
    apart: bool = False
    #: Label of nodes (``switch``, ``zone``; ``node`` for the node itself) that all slots should have in common.
    together: str | None = Field(None, min_length=1, max_length=100)
    #: Whether ``together`` is a must, rather than a wish.
    strict: bool = False


class Scheduling(SpecPart):
    """When and where a run may have its slots."""

    #: Clusters that will do; empty: any. A run never lies across two.
    clusters: tuple[Token, ...] = Field((), max_length=100)
    #: ``spot`` capacity may be taken away at short notice; ``any`` leaves the choice to the policy's tiers.
    capacity: Literal["any", "on-demand", "spot"] = "any"
    #: A name that the policy maps to capacity, for example production and research.
    tier: Token | None = None
    #: When it should be done, for policies that order by it.
    deadline: AwareDatetime | None = None
    #: The longest it may have its slots, all in all; it is then stopped and fails. Backfill and promised starts
    #: rely on it.
    limit_s: float | None = Field(None, gt=0)
    #: Whether others may take its slots.
    preemptible: bool = True
    #: Whether it takes turns with runs of the same standing.
    time_slice: bool = False
