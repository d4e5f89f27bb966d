"""The golden set: samples of the evaluation, and what the model answered there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.model_process import Sample, Tensor
from services.serving.core.rows import to_values

#: The output that is compared, and the one with the class's name where predictions are named.
PREDICTION, CLASS = "prediction", "class"
#: Mismatches that an explanation lists.
MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """Samples by key, and the predictions of the evaluation for them; empty where it kept none."""

    samples: Mapping[str, Sample] = field(default_factory=dict)
    predictions: Mapping[str, Any] = field(default_factory=dict)


def find_mismatches(
    keys: Sequence[str], expected: Mapping[str, Any], outputs: Sequence[Tensor], tolerance: float
) -> list[str]:
    """Return which answers differ from the evaluation's, in words; numbers may differ by the relative tolerance."""
    columns = {each.name: to_values(each) for each in outputs}
    if PREDICTION not in columns:
        return []
    found = []
    for row, key in enumerate(keys):
        if key not in expected:
            continue
        wanted, answer = expected[key], columns[PREDICTION][row]
        named = columns[CLASS][row] if CLASS in columns and isinstance(wanted, str) else answer
        if not _is_equal(wanted, named, tolerance):
            found.append(f"sample {key!r} gets prediction {named}, the evaluation had {wanted}")
    return found


def _is_equal(wanted: Any, answer: Any, tolerance: float) -> bool:
    if isinstance(wanted, float) or isinstance(answer, float):
        if not isinstance(wanted, (int, float)) or not isinstance(answer, (int, float)):
            # An output of several values is no prediction that the evaluation could have kept.
            return isinstance(answer, list)
        return math.isclose(wanted, answer, rel_tol=tolerance, abs_tol=tolerance)
    return isinstance(answer, list) or bool(wanted == answer)


def explain_mismatches(mismatches: Sequence[str], samples: int) -> str:
    """Return one sentence."""
    listed = "; ".join(mismatches[:MAX_LISTED])
    return f"{len(mismatches)} of {samples} samples are not answered as in the evaluation: {listed}"
