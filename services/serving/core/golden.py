"""The golden set: samples of the evaluation, and what the model answered there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.model_process import Sample, Tensor

#: The output of a model that names none, and the one with the class's name where predictions are named.
PREDICTION, CLASS = "prediction", "class"
#: Relative tolerance for outputs that a model computes in 16 bits: kernels differ in their last bits.
HALF_TOLERANCE = 1e-2
#: Mismatches that an explanation lists.
MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """Samples by key, and for each what the evaluation kept, by column; empty where it kept nothing."""

    samples: Mapping[str, Sample] = field(default_factory=dict)
    expected: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many samples were compared, how many answers they had, and which of these differ, in words."""

    samples: int
    answers: int
    mismatches: tuple[str, ...]


def compare_answers(
    keys: Sequence[str],
    expected: Mapping[str, Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    outputs: Sequence[Tensor],
    tolerance: float,
) -> Comparison:
    """Compare each answer with the evaluation's, in every output that both have.

    Args:
        answers: what a client gets for the samples of ``keys``.
        outputs: the tensors that the answers were made of; their types decide the tolerance.
        tolerance: for numbers with a fraction, relative to the column's largest. Anything else must be equal.
    """
    tolerances = {each.name: _tolerance_of(each, tolerance) for each in outputs}
    scales = {name: _scale([row.get(name) for row in expected.values()]) for name in tolerances}
    samples, compared, mismatches = 0, 0, []
    for key, answer in zip(keys, answers, strict=True):
        names = sorted(answer.keys() & expected.get(key, {}).keys())
        samples, compared = samples + bool(names), compared + len(names)
        for name in names:
            wanted = expected[key][name]
            is_named = name == PREDICTION and CLASS in answer and isinstance(wanted, str)
            given = answer[CLASS if is_named else name]
            if not _is_equal(wanted, given, tolerances[name], tolerances[name] * scales[name]):
                mismatches.append(f"sample {key!r} gets {name} {given}, the evaluation had {wanted}")
    return Comparison(samples, compared, tuple(mismatches))


def _tolerance_of(output: Tensor, tolerance: float) -> float:
    # A bfloat16 is sent as the float32 whose lower half is zero.
    data = output.data
    is_half = output.datatype == "FP16" or (output.datatype == "FP32" and not any(data[0::4]) and not any(data[1::4]))
    return max(tolerance, HALF_TOLERANCE) if is_half else tolerance


def _scale(values: Sequence[Any]) -> float:
    """Return the largest size of a finite number in a column of numbers, or of lists of them."""
    sizes = [0.0]
    for value in values:
        if isinstance(value, list):
            sizes.append(_scale(value))
        elif isinstance(value, (int, float)) and math.isfinite(value):
            sizes.append(abs(value))
    return max(sizes)


def _is_equal(wanted: Any, given: Any, relative: float, absolute: float) -> bool:
    if isinstance(given, list) and len(given) == 1 and not isinstance(wanted, list):
        given = given[0]
    if isinstance(wanted, list):
        if not isinstance(given, list) or len(wanted) != len(given):
            return False
        return all(_is_equal(each, other, relative, absolute) for each, other in zip(wanted, given, strict=True))
    if isinstance(wanted, float) and not math.isfinite(wanted):
        return given is None  # JSON has no NaN
    if isinstance(wanted, float) or isinstance(given, float):
        if not isinstance(wanted, (int, float)) or not isinstance(given, (int, float)):
            return False
        return math.isclose(wanted, given, rel_tol=relative, abs_tol=absolute)
    return bool(wanted == given)


def explain_mismatches(comparison: Comparison) -> str:
    """Return one sentence."""
    listed = "; ".join(comparison.mismatches[:MAX_LISTED])
    found = len(comparison.mismatches)
    return f"{found} of {comparison.answers} answers are not those of the evaluation: {listed}"
