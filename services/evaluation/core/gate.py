"""The gate between a finished training and the champion's place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from contracts.spec.training import Evaluation

#: Two numbers this close, relative to the larger, are taken for equal: 0.3 - 0.2 is not quite 0.1.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to promote, and why, in words with the numbers."""

    promote: bool
    reason: str


def metric_value(metrics: Mapping[str, float], name: str) -> float | None:
    """The metric ``name`` as measured on the test split, or None.

    ``validation/accuracy`` and ``accuracy`` are found as ``test/accuracy`` too, since that is what the same
    quantity is called when it is measured on the test split.
    """
    bare = name.rsplit("/", 1)[-1]
    for candidate in (name, f"test/{name}", f"test/{bare}", bare):
        value = metrics.get(candidate)
        if value is not None and math.isfinite(value):
            return value
    return None


def gate(
    wanted: Evaluation, candidate: Mapping[str, float], champion: Mapping[str, float] | None, champion_run_id: str = ""
) -> Verdict:
    """Decide whether the candidate takes the champion's place. ``champion`` is None if there is none.

    With ``min_improvement`` 0 or more the candidate must be truly better: a tie changes nothing. A negative one
    lets through what is worse by no more than that.
    """
    name, sign = wanted.metric, (1 if wanted.mode == "max" else -1)
    value = metric_value(candidate, name)
    if value is None:
        return Verdict(
            False, f"the evaluation gave no finite {name!r}: set evaluation.metric to one of {_names(candidate)}"
        )
    if wanted.threshold is not None and sign * (value - wanted.threshold) < -_slack(value, wanted.threshold):
        side = "below" if sign > 0 else "above"
        return Verdict(False, f"{name} {_n(value)} is {side} the threshold {_n(wanted.threshold)}")
    if champion is None:
        beyond = f" and passes the threshold {_n(wanted.threshold)}" if wanted.threshold is not None else ""
        return Verdict(True, f"{name} {_n(value)}{beyond}; the model had no champion")
    best = metric_value(champion, name)
    if best is None:
        return Verdict(
            False,
            f"the champion {champion_run_id} has no finite {name!r} on this dataset, so they cannot be compared: "
            "publish promote.requested to promote it all the same",
        )
    slack = _slack(value, best)
    improvement = sign * (value - best)
    compared = f"{name} {_n(value)} against the champion's {_n(best)} ({champion_run_id})"
    if improvement < wanted.min_improvement - slack or (wanted.min_improvement >= 0 and improvement <= slack):
        asked = f"at least {_n(wanted.min_improvement)} better" if wanted.min_improvement else "better"
        return Verdict(False, f"{compared}: not {asked}")
    return Verdict(True, f"{compared}: {'better' if improvement > slack else 'no worse than allowed'}")


def _slack(*values: float) -> float:
    return TOLERANCE * max(1e-300, *(abs(value) for value in values))


def _n(value: float | None) -> str:
    return f"{value:.6g}"


def _names(metrics: Mapping[str, float]) -> str:
    finite = sorted(name for name, value in metrics.items() if math.isfinite(value))
    return ", ".join(finite[:20]) or "(it gave none)"
