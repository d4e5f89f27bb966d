"""Tables of gates, the statistics behind them, and what a report shows of hostile texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.events.model import ModelApproved
from contracts.predictions import Predictions, PredictionsInfo, PredictionsWriter
from contracts.spec.gates import ModelGates
from contracts.spec.training import Evaluation
from services.evaluation.core.bootstrap import compare_paired, flip_signs, resample_means
from services.evaluation.core.comparison import (
    MAX_REGRESSIONS,
    PredictionComparison,
    compare_predictions,
)
from services.evaluation.core.gate import Criteria, Evidence, Verdict, judge, renew_pending
from services.evaluation.core.report import Comparison, SampleContent, markdown, to_json
from services.evaluation.core.report_page import render_page

SAMPLES = 400
ACCURACY = Evaluation(metric="accuracy", mode="max")


def write_predictions(path: Path, wrong: set[int], **columns: Any) -> Predictions:
    """Write predictions of two classes by turns in which these samples are wrong."""
    targets = [number % 2 for number in range(SAMPLES)]
    answers = [target ^ (number in wrong) for number, target in enumerate(targets)]
    ids = [f"k{number:04d}" for number in range(SAMPLES)]
    probabilities = [[0.9, 0.1] if answer == 0 else [0.1, 0.9] for answer in answers]
    with PredictionsWriter(path, PredictionsInfo(classes=("cat", "dog"), score_of="accuracy")) as writer:
        rows = {"id": ids, "target": targets, "prediction": answers, "probabilities": probabilities}
        writer.write({**rows, **columns})
    return Predictions(path)


def compared(tmp_path: Path, candidate: set[int], champion: set[int], confidence: float = 0.95, **columns: Any) -> Any:
    own = write_predictions(tmp_path / "candidate.parquet", candidate, **columns)
    other = write_predictions(tmp_path / "champion.parquet", champion, **columns)
    return compare_predictions(own, other, 1 - len(candidate) / SAMPLES, "max", confidence, seed=1)


def judged(gates: ModelGates, found: PredictionComparison | None, candidate: int, champion: int | None) -> Verdict:
    """Judge a candidate with so many mistakes against a champion with so many."""
    metrics = {"test/accuracy": 1 - candidate / SAMPLES, "test/loss": 0.2, "test/latency_ms": 5.0}
    champion_metrics = None if champion is None else {"test/accuracy": 1 - champion / SAMPLES}
    evidence = Evidence(metrics, champion_metrics, "rc", found, size_bytes=1000, exactness="exact")
    return judge(Criteria(ACCURACY, gates), evidence)


#: Gates, the samples that candidate and champion get wrong -> promoted, words of the verdict.
PAIRED: dict[str, tuple[dict[str, Any], set[int], set[int], bool, str]] = {
    "sure": ({"confidence": 0.95}, set(range(10)), set(range(40)), True, "better by at least"),
    "not sure": ({"confidence": 0.95}, {1, 2, 3}, {4, 5, 6, 7}, False, "only by -0.0"),
    "better by too little": (
        {"confidence": 0.95, "min_improvement": 0.07},
        set(range(10)),
        set(range(40)),
        False,
        "0.07 is asked",
    ),
    "sure of the minimum": (
        {"confidence": 0.95, "min_improvement": 0.03},
        set(range(10)),
        set(range(40)),
        True,
        "better by at least",
    ),
    "sure, though nobody asked": ({}, set(range(10)), set(range(40)), True, "better by at least"),
    "noise, though nobody asked": ({}, {1, 2, 3}, {4, 5, 6, 7}, False, "`trainbus models gates MODEL --set conf"),
    "noise, and nobody minds": ({"confidence": 0}, {1, 2, 3}, {4, 5, 6, 7}, True, "0.9925 against the champion's"),
    "few, all of one sign": ({"confidence": 0.95}, {1}, {1, 2, 3, 4, 5}, False, "chance of 0.0"),
    "a slice worse": (
        {"slices": {"class": {"max_regression": 0.05}}},
        set(range(0, 60, 2)),
        {1, 3, *range(101, 181, 2)},
        False,
        "'cat' is worse by 0.15",
    ),
    "a slice below its floor": (
        {"slices": {"class": {"min_score": 0.9}}},
        set(range(0, 60, 2)),
        {1, 3, *range(101, 181, 2)},
        False,
        "'cat' has 0.85, below 0.9",
    ),
    "slices within": ({"slices": {"class": {"max_regression": 0.2}}}, set(range(0, 60, 2)), set(range(50)), True, ""),
    "no such column": ({"slices": {"country": {"min_score": 0.5}}}, {1}, set(range(50)), False, "no column 'country'"),
}


@pytest.mark.parametrize("case", PAIRED)
def test_gates_on_paired_samples(case: str, tmp_path: Path) -> None:
    gates, candidate, champion, promote, words = PAIRED[case]
    found = compared(tmp_path, candidate, champion)
    verdict = judged(ModelGates.model_validate(gates), found, len(candidate), len(champion))
    assert verdict.promote is promote, verdict.reason
    assert words in verdict.reason


SINGLE: dict[str, tuple[dict[str, Any], bool, str]] = {
    "threshold replaces the request's": ({"threshold": 0.99}, False, "below the threshold 0.99"),
    "bounds hold": ({"bounds": {"loss": {"max": 0.3}}}, True, ""),
    "bounds broken": ({"bounds": {"loss": {"max": 0.1}}}, False, "loss 0.2 is above 0.1"),
    "bounds of nothing": ({"bounds": {"f1": {"min": 0.1}}}, False, "no finite 'f1'"),
    "fast enough": ({"max_latency_ms": 5}, True, ""),
    "too slow": ({"max_latency_ms": 4}, False, "the latency of 5 ms is above 4 ms"),
    "too large": ({"max_size_bytes": 999}, False, "the size of 1000 B is above 999 B"),
    "exact": ({"exact": True}, True, ""),
    "nothing to be sure by": ({}, True, "better, but how sure that is cannot be said: its evaluation kept no"),
    "nothing to be sure by, and nobody minds": ({"confidence": 0}, True, "(rc): better"),
    "no predictions to be sure by": ({"confidence": 0.9}, False, "kept no predictions.parquet"),
    "not approved yet": ({"approval": True}, False, "a person must approve it"),
    "not reproduced yet": ({"reproduced": True, "approval": True}, False, "no second training"),
    "fails before anybody is asked": ({"approval": True, "threshold": 0.99}, False, "below the threshold"),
}


@pytest.mark.parametrize("case", SINGLE)
def test_gates_on_one_number(case: str) -> None:
    gates, promote, words = SINGLE[case]
    verdict = judged(ModelGates.model_validate(gates), None, 20, 40)
    assert verdict.promote is promote, verdict.reason
    assert words in verdict.reason
    assert (verdict.awaits is not None) == ("yet" in case)


def test_every_gate_has_a_verdict_and_people_come_last() -> None:
    gates = ModelGates(threshold=0.99, max_latency_ms=1, max_size_bytes=1, exact=True, approval=True)
    verdict = judged(gates, None, 20, 40)
    found = {gate.name: gate.passed for gate in verdict.gates}
    expected = {"threshold": False, "improvement": True, "latency": False, "size": False, "exactness": True}
    assert found == {**expected, "approval": None}
    assert verdict.awaits is None


@pytest.mark.parametrize(
    ("approved", "promote", "words"), [(True, True, "approved by ada"), (False, False, "declined")]
)
def test_an_answer_changes_what_waits_and_nothing_else(approved: bool, promote: bool, words: str) -> None:
    criteria = Criteria(ACCURACY, ModelGates(approval=True))
    waiting = judge(criteria, Evidence({"accuracy": 0.9}))
    answer = ModelApproved(model="m", run_id="r", approved=approved, user="ada")
    verdict = renew_pending(waiting.gates, criteria, Evidence({}, approval=answer))
    assert verdict.promote is promote
    assert words in verdict.reason


def test_predictions_of_other_samples_give_no_interval(tmp_path: Path) -> None:
    own = write_predictions(tmp_path / "a.parquet", {1})
    with PredictionsWriter(tmp_path / "b.parquet") as writer:
        writer.write({"id": ["k0000", "x"], "target": [0, 1], "prediction": [0, 1]})
    found = compare_predictions(own, Predictions(tmp_path / "b.parquet"), 0.9975, "max", 0.95, seed=1)
    assert found.difference is None
    verdict = judged(ModelGates(confidence=0.95), found, 1, 40)
    assert "not of the same samples: 400 of the candidate, 2 of the champion, 1 in both" in verdict.reason


def test_a_metric_that_is_no_mean_of_scores_gives_no_sure_improvement(tmp_path: Path) -> None:
    own, other = (write_predictions(tmp_path / f"{name}.parquet", {1}) for name in "ab")
    found = compare_predictions(own, other, 0.7, "max", 0.95, seed=1)
    assert not found.is_of_metric
    asked, unasked = (judged(gates, found, 1, 40) for gates in (ModelGates(confidence=0.95), ModelGates()))
    assert (asked.promote, unasked.promote) == (False, True)
    assert "no mean over samples" in asked.reason
    assert "no mean over samples" in unasked.reason


def test_worst_regressions_come_first_and_are_bounded(tmp_path: Path) -> None:
    found = compared(tmp_path, set(range(100, 150)), {3}, region=["eu", "us"] * (SAMPLES // 2))
    assert len(found.regressions) == MAX_REGRESSIONS
    first = found.regressions[0]
    assert (first.key, first.target, first.candidate, first.champion) == ("k0100", "cat", "dog", "cat")
    assert first.columns == {"region": "eu"}
    assert {each.column for each in found.slices} == {"class", "region"}
    assert found.candidate.calibration.error == pytest.approx(abs(0.875 - 0.9))


def simulate(random: Any, samples: int, champion: float, gain: float, changed: float) -> Any:
    """Return score differences of a model and a retrained one that is better by ``gain`` in truth."""
    base = random.random(samples) < champion
    flips = random.random(samples) < changed
    better = random.random(samples) < 0.5 + gain / (2 * changed)
    return np.where(flips, np.where(better, 1.0, -1.0), 0.0) + 0.0 * base


def test_a_model_against_itself_and_against_a_better_one() -> None:
    """A part of ``python -m loadtest.gates``, which makes 1,000 comparisons each."""
    random = np.random.default_rng(7)
    rounds, level, least = 150, 0.95, 0.012
    promoted = dict.fromkeys(("same", "better"), 0)
    for number in range(rounds):
        for name, gain, asked in (("same", 0.0, 0.0), ("better", 2 * least, least)):
            paired = compare_paired(simulate(random, 4000, 0.9, gain, 0.05), level, seed=number)
            sure = paired.low > 0 if asked == 0 else paired.low >= asked
            promoted[name] += sure and paired.p_value <= 1 - level
    # Five in a hundred, and three standard deviations of a binomial.
    assert promoted["same"] <= rounds * 0.05 + 3 * math.sqrt(rounds * 0.05 * 0.95)
    assert promoted["better"] >= 0.9 * rounds


@pytest.mark.parametrize("values", [np.full(50, 0.5), np.zeros(50), np.arange(30_000) / 3e4])
def test_resampling_is_of_the_mean_whatever_the_number_of_values(values: Any) -> None:
    random = np.random.default_rng(0)
    means = resample_means(values, random, 400)
    assert abs(means.mean() - values.mean()) < 0.01
    assert means.std() < 0.05
    assert (flip_signs(values, random, 400) < 0.01) == bool(values.any())


HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(1)">'


def test_a_page_shows_hostile_texts_as_texts(tmp_path: Path) -> None:
    found = compared(tmp_path, set(range(20)), {1}, **{HOSTILE: [HOSTILE] * SAMPLES})
    key = found.regressions[0].key
    verdict = Verdict(False, HOSTILE, judged(ModelGates(confidence=0.95), found, 20, 1).gates)
    comparison = Comparison(
        name=HOSTILE,
        run_id="r1",
        model="m",
        dataset_id=None,
        criteria=Criteria(ACCURACY),
        candidate={HOSTILE: 1.0, "test/accuracy": math.nan},
        champion={},
        champion_label=HOSTILE,
        verdict=verdict,
        predictions=found,
        samples={key: SampleContent(text=HOSTILE)},
    )
    page = render_page(comparison)
    assert "<script" not in page
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page
    assert HOSTILE.encode()[:8] in to_json(comparison)
    assert HOSTILE in markdown(comparison)
