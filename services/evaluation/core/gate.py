"""The gates between a finished training and the champion's place. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from contracts.events.model import ModelApproved
from contracts.events.run import GateVerdict
from contracts.formats import format_bytes
from contracts.metric_names import LATENCY_MS
from contracts.spec.gates import ModelGates, SliceGate
from contracts.spec.training import Evaluation
from services.evaluation.core.bootstrap import DEFAULT_CONFIDENCE, PairedDifference
from services.evaluation.core.comparison import PredictionComparison, SliceResult

#: Two numbers this close, relative to the larger, are taken for equal: 0.3 - 0.2 is not quite 0.1.
TOLERANCE = 1e-9
MAX_NAMED_SLICES = 3


@dataclass(frozen=True, slots=True)
class Criteria:
    """What a candidate is judged by: the request's ``evaluation`` and the gates of its model."""

    evaluation: Evaluation
    gates: ModelGates = field(default_factory=ModelGates)

    @property
    def threshold(self) -> float | None:
        return self.evaluation.threshold if self.gates.threshold is None else self.gates.threshold

    @property
    def min_improvement(self) -> float:
        return self.evaluation.min_improvement if self.gates.min_improvement is None else self.gates.min_improvement

    @property
    def confidence(self) -> float:
        """How sure an improvement must be where pairs can show it; 0: the measured difference alone counts."""
        return DEFAULT_CONFIDENCE if self.gates.confidence is None else self.gates.confidence

    @property
    def sign(self) -> int:
        """1 where more of the metric is better, -1 where less is."""
        return 1 if self.evaluation.mode == "max" else -1

    @property
    def needs_pairs(self) -> bool:
        """Whether both models' predictions on the same samples are needed."""
        regressions = any(each.max_regression is not None for each in self.gates.slices.values())
        return bool(self.gates.confidence) or regressions


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a candidate and of the champion that it would replace."""

    candidate: Mapping[str, float]
    #: None: the model has no champion.
    champion: Mapping[str, float] | None = None
    champion_run_id: str = ""
    #: None: the candidate's evaluation kept no predictions.
    predictions: PredictionComparison | None = None
    #: Bytes of the weights; None: not known.
    size_bytes: int | None = None
    exactness: str | None = None
    #: Whether a second training reached the same state; None: there is none yet.
    reproduced: bool | None = None
    approval: ModelApproved | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to promote, and why, in words with the numbers."""

    promote: bool
    reason: str
    gates: tuple[GateVerdict, ...] = ()
    #: What the candidate waits for, once it has passed every other gate.
    awaits: Literal["approval", "reproduction"] | None = None


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


def judge(criteria: Criteria, evidence: Evidence) -> Verdict:
    """Decide whether the candidate takes the champion's place: every gate must pass.

    With a minimum improvement of 0 or more the candidate must be truly better: a tie changes nothing. A negative one
    lets through what is worse by no more than that.
    """
    return conclude(tuple(_judge_all(criteria, evidence)))


def conclude(gates: tuple[GateVerdict, ...]) -> Verdict:
    """Return the verdict that the gates' verdicts add up to."""
    failed = [gate for gate in gates if gate.passed is False]
    if failed:
        return Verdict(False, "; ".join(gate.words for gate in failed), gates)
    if waiting := next((gate for gate in gates if gate.passed is None), None):
        awaits: Literal["approval", "reproduction"] = "approval" if waiting.name == "approval" else "reproduction"
        return Verdict(False, waiting.words, gates, awaits)
    told = [gate.words for gate in gates if gate.name in ("improvement", "approval")]
    return Verdict(True, "; ".join(told), gates)


def renew_pending(gates: tuple[GateVerdict, ...], criteria: Criteria, evidence: Evidence) -> Verdict:
    """Return the verdict of gates that were judged before, with what people have answered since."""
    stand = tuple(gate for gate in gates if gate.name not in ("reproduction", "approval"))
    return conclude((*stand, *_judge_people(criteria, evidence)))


def _judge_all(criteria: Criteria, evidence: Evidence) -> Iterator[GateVerdict]:
    name = criteria.evaluation.metric
    value = metric_value(evidence.candidate, name)
    if value is None:
        found = _names(evidence.candidate)
        words = f"the evaluation gave no finite {name!r}: set evaluation.metric to one of {found}"
        yield GateVerdict(name="metric", passed=False, words=words)
        return
    if criteria.threshold is not None:
        yield _judge_threshold(criteria, value, criteria.threshold)
    yield _judge_improvement(criteria, evidence, value)
    for metric, bounds in criteria.gates.bounds.items():
        yield _judge_bounds(metric, metric_value(evidence.candidate, metric), bounds.min, bounds.max)
    for column, limit in criteria.gates.slices.items():
        yield _judge_slices(column, limit, evidence)
    if criteria.gates.max_latency_ms is not None:
        latency = metric_value(evidence.candidate, LATENCY_MS)
        yield _judge_ceiling(
            "latency", latency, criteria.gates.max_latency_ms, lambda ms: f"{ms:.4g} ms", "the evaluation measured none"
        )
    if criteria.gates.max_size_bytes is not None:
        size = None if evidence.size_bytes is None else float(evidence.size_bytes)
        limit_bytes = criteria.gates.max_size_bytes
        yield _judge_ceiling("size", size, limit_bytes, format_bytes, "the checkpoint's manifest cannot be read")
    if criteria.gates.exact:
        passed = evidence.exactness == "exact"
        found = evidence.exactness or "not recorded"
        words = (
            "the checkpoint is exact" if passed else f"the checkpoint is not exact ({found}): train it in exact mode"
        )
        yield GateVerdict(name="exactness", passed=passed, words=words)
    yield from _judge_people(criteria, evidence)


def _judge_threshold(criteria: Criteria, value: float, threshold: float) -> GateVerdict:
    name = criteria.evaluation.metric
    passed = criteria.sign * (value - threshold) >= -_slack(value, threshold)
    side = "below" if criteria.sign > 0 else "above"
    words = f"{name} {_n(value)} passes the threshold {_n(threshold)}"
    if not passed:
        words = f"{name} {_n(value)} is {side} the threshold {_n(threshold)}"
    return GateVerdict(name="threshold", passed=passed, value=value, limit=threshold, words=words)


def _judge_improvement(criteria: Criteria, evidence: Evidence, value: float) -> GateVerdict:
    name, least = criteria.evaluation.metric, criteria.min_improvement
    gate = "improvement"
    if evidence.champion is None:
        beyond = f" passes the threshold {_n(criteria.threshold)}" if criteria.threshold is not None else ""
        return GateVerdict(name=gate, passed=True, words=f"{name} {_n(value)}{beyond}; the model had no champion")
    best = metric_value(evidence.champion, name)
    if best is None:
        words = (
            f"the champion {evidence.champion_run_id} has no finite {name!r} on this dataset, so they cannot be "
            "compared: publish promote.requested to promote it all the same"
        )
        return GateVerdict(name=gate, passed=False, limit=least, words=words)
    slack = _slack(value, best)
    improvement = criteria.sign * (value - best)
    compared = f"{name} {_n(value)} against the champion's {_n(best)} ({evidence.champion_run_id})"
    paired = evidence.predictions.difference if evidence.predictions and evidence.predictions.is_of_metric else None
    interval = (paired.low, paired.high) if paired else None
    if improvement < least - slack or (least >= 0 and improvement <= slack):
        asked = f"at least {_n(least)} better" if least else "better"
        words, passed = f"{compared}: not {asked}", False
    elif criteria.confidence and paired and not _describe_absent_pairs(criteria, evidence):
        words, passed = _judge_confidence(criteria, paired, compared, improvement)
    else:
        words, passed = f"{compared}: {'better' if improvement > slack else 'no worse than allowed'}", True
        if criteria.confidence:
            words += f", but how sure that is cannot be said: {_describe_absent_pairs(criteria, evidence)}"
            passed = criteria.gates.confidence is None
    return GateVerdict(name=gate, passed=passed, value=improvement, limit=least, interval=interval, words=words)


def _describe_absent_pairs(criteria: Criteria, evidence: Evidence) -> str:
    """Return why the predictions give no pairs of the metric; '' if they do."""
    found = evidence.predictions
    if found is None:
        return "its evaluation kept no predictions.parquet"
    if found.difference is None or found.problem:
        return found.problem or "the predictions give no pairs"
    if not found.is_of_metric:
        return (
            f"the scores of its predictions are not of {criteria.evaluation.metric!r}, which is no mean over samples: "
            "set evaluation.metric to one that is"
        )
    return ""


def _judge_confidence(
    criteria: Criteria, paired: PairedDifference, compared: str, improvement: float
) -> tuple[str, bool]:
    """Return in words whether the improvement is sure enough, and whether it is.

    The lower end of the paired bootstrap interval must reach the minimum. Where any improvement will do, it must also
    be unlikely between two equal models.
    """
    level, least = criteria.confidence, criteria.min_improvement
    samples = f"{paired.samples:,} paired samples"
    is_sure = paired.low > 0 if least == 0 else paired.low >= least
    if is_sure and least >= 0 and paired.p_value > 1 - level:
        words = f"equal models differ by as much with a chance of {paired.p_value:.2g}, more than {1 - level:.2g}"
        return f"{compared}: {words} ({samples}){_hint(criteria)}", False
    if is_sure:
        return f"{compared}: better by at least {_n(paired.low)} with {level:.4g} confidence ({samples})", True
    asked = f"at least {_n(least)} is asked" if least else "it must be above 0"
    return (
        f"{compared}: {_n(improvement)} better, but with {level:.4g} confidence only by {_n(paired.low)} or more, "
        f"and {asked} ({samples}){_hint(criteria)}",
        False,
    )


def _hint(criteria: Criteria) -> str:
    """Return how to do without confidence, for those who have not asked for any."""
    if criteria.gates.confidence is not None:
        return ""
    return "; `trainbus models gates MODEL --set confidence=0` lets the measured difference alone count"


def _judge_bounds(metric: str, value: float | None, least: float | None, most: float | None) -> GateVerdict:
    name = f"bounds {metric}"
    if value is None:
        words = f"the evaluation gave no finite {metric!r}, of which the model's gates ask"
        return GateVerdict(name=name, passed=False, words=words)
    if least is not None and value < least - _slack(value, least):
        return GateVerdict(
            name=name, passed=False, value=value, limit=least, words=f"{metric} {_n(value)} is below {_n(least)}"
        )
    if most is not None and value > most + _slack(value, most):
        return GateVerdict(
            name=name, passed=False, value=value, limit=most, words=f"{metric} {_n(value)} is above {_n(most)}"
        )
    limit = most if least is None else least
    return GateVerdict(name=name, passed=True, value=value, limit=limit, words=f"{metric} {_n(value)} is within bounds")


def _judge_slices(column: str, gate: SliceGate, evidence: Evidence) -> GateVerdict:
    """Judge every value of a column that has enough samples, by its mean score."""
    name = f"slices {column}"
    found = evidence.predictions
    results = [each for each in found.slices if each.column == column] if found else []
    if not results:
        words = (
            f"the predictions have no column {column!r} to slice by"
            if found
            else f"its evaluation kept no predictions.parquet, so there are no slices by {column!r}"
        )
        return GateVerdict(name=name, passed=False, words=words)
    judged = [each for each in results if each.samples >= gate.min_samples]
    problems: list[str] = []
    if gate.max_regression is not None and evidence.champion is not None:
        if found is None or found.difference is None:
            why = found.problem if found else ""
            words = f"the slices by {column!r} cannot be compared with the champion's: {why or 'it has no predictions'}"
            return GateVerdict(name=name, passed=False, limit=gate.max_regression, words=words)
        problems += [_n_regression(each) for each in judged if _regression(each) > gate.max_regression + TOLERANCE]
    if gate.min_score is not None:
        problems += [
            f"{each.value!r} has {_n(each.candidate)}, below {_n(gate.min_score)}"
            for each in judged
            if each.candidate < gate.min_score - _slack(each.candidate, gate.min_score)
        ]
    if gate.max_regression is not None and evidence.champion is not None:
        value, limit = max((_regression(each) for each in judged), default=None), gate.max_regression
    else:
        value, limit = min((each.candidate for each in judged), default=None), gate.min_score or 0.0
    if problems:
        more = f" and {len(problems) - MAX_NAMED_SLICES} more" if len(problems) > MAX_NAMED_SLICES else ""
        words = f"slices by {column!r}: {', '.join(problems[:MAX_NAMED_SLICES])}{more}"
        return GateVerdict(name=name, passed=False, value=value, limit=limit, words=words)
    few = len(results) - len(judged)
    small = f" ({few} with fewer than {gate.min_samples} samples not judged)" if few else ""
    words = f"none of {len(judged)} slices by {column!r} is beyond the limit{small}"
    return GateVerdict(name=name, passed=True, value=value, limit=limit, words=words)


def _regression(result: SliceResult) -> float:
    return -result.difference.mean if result.difference else 0.0


def _n_regression(result: SliceResult) -> str:
    return f"{result.value!r} is worse by {_n(_regression(result))} ({result.samples:,} samples)"


def _judge_ceiling(name: str, value: float | None, limit: float, form: object, missing: str) -> GateVerdict:
    assert callable(form)
    if value is None:
        return GateVerdict(name=name, passed=False, limit=limit, words=f"the {name} is not known: {missing}")
    passed = value <= limit
    words = f"the {name} of {form(value)} is {'within' if passed else 'above'} {form(limit)}"
    return GateVerdict(name=name, passed=passed, value=value, limit=limit, words=words)


def _judge_people(criteria: Criteria, evidence: Evidence) -> Iterator[GateVerdict]:
    """Judge what somebody must do first: repeat the training, approve the promotion."""
    if criteria.gates.reproduced:
        words = {
            True: "a second training reached the same bits",
            False: "a second training reached other bits: `trainbus reproduce` shows where",
            None: "no second training has reached its state yet: `trainbus reproduce` starts one",
        }[evidence.reproduced]
        yield GateVerdict(name="reproduction", passed=evidence.reproduced, words=words)
    if criteria.gates.approval:
        yield _judge_approval(evidence.approval)


def _judge_approval(approval: ModelApproved | None) -> GateVerdict:
    if approval is None:
        return GateVerdict(name="approval", passed=None, words="a person must approve it: `trainbus models approve`")
    by = f" by {approval.user}" if approval.user else ""
    why = f": {approval.reason}" if approval.reason else ""
    words = f"{'approved' if approval.approved else 'declined'}{by}{why}"
    return GateVerdict(name="approval", passed=approval.approved, words=words)


def _slack(*values: float) -> float:
    return TOLERANCE * max(1e-300, *(abs(value) for value in values))


def _n(value: float | None) -> str:
    return f"{value:.6g}"


def _names(metrics: Mapping[str, float]) -> str:
    finite = sorted(name for name, value in metrics.items() if math.isfinite(value))
    return ", ".join(finite[:20]) or "(it gave none)"
