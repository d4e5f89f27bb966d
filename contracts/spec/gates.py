"""What a candidate must pass to become a registered model's champion."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from contracts.spec.base import Metric, SpecPart
from contracts.spec.data import Bounds

Column = Annotated[str, Field(min_length=1, max_length=200)]


class SliceGate(SpecPart):
    """How well a candidate must do on each value of one metadata column of the predictions."""

    #: How much worse than the champion the mean score of a slice may be.
    max_regression: float | None = Field(None, ge=0, allow_inf_nan=False)
    #: What the mean score of each slice must reach, also without a champion.
    min_score: float | None = Field(None, allow_inf_nan=False)
    #: Slices with fewer samples are shown and not judged.
    min_samples: int = Field(30, ge=1)

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.max_regression is None and self.min_score is None:
            raise ValueError("a slice gate needs max_regression or min_score")
        return self


class ModelGates(SpecPart):
    """The gates of a model. A field that is set replaces what a run's own ``evaluation`` says."""

    #: What the run's evaluation metric must reach.
    threshold: float | None = Field(None, allow_inf_nan=False)
    #: How much better than the champion the candidate must be in that metric.
    min_improvement: float | None = Field(None, allow_inf_nan=False)
    #: How sure the improvement must be, above 0.5: the lower end of a one-sided paired bootstrap interval at this level
    #: must reach ``min_improvement``. 0: the measured difference alone counts. None: 0.95 where the predictions of both
    #: models give pairs of the metric, else as 0.
    confidence: float | None = Field(None, lt=1)
    #: Limits of other metrics of the evaluation, by name.
    bounds: dict[Metric, Bounds] = Field(default_factory=dict, max_length=50)
    #: Limits of slices, by the metadata column that they are cut by.
    slices: dict[Column, SliceGate] = Field(default_factory=dict, max_length=20)
    #: Ceiling of the evaluation's metric ``latency_ms``.
    max_latency_ms: float | None = Field(None, gt=0, allow_inf_nan=False)
    #: Ceiling of the weights' bytes in the checkpoint.
    max_size_bytes: int | None = Field(None, ge=1)
    #: Whether the checkpoint must be exact: the same bits on any number of processes.
    exact: bool = False
    #: Whether a second training (``trainbus reproduce``) must have reached the same bits.
    reproduced: bool = False
    #: Whether a person must approve (``trainbus models approve``).
    approval: bool = False

    @field_validator("confidence")
    @classmethod
    def _is_off_or_above_chance(cls, confidence: float | None) -> float | None:
        if confidence is not None and confidence != 0 and not confidence > 0.5:
            raise ValueError("confidence must be above 0.5, or 0 for none")
        return confidence
