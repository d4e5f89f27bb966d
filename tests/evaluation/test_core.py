"""Tables of what the evaluation service decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.model import ModelPromoted
from contracts.events.run import CheckpointRef, RunExited
from contracts.spec.run import RunSpec
from contracts.spec.training import Evaluation
from services.evaluation.core.comparison import ModelPicture, PredictionComparison
from services.evaluation.core.decide import RequestEvaluation, evaluation_request
from services.evaluation.core.footprint import slot_hours
from services.evaluation.core.gate import Criteria, Evidence, Verdict, judge, metric_value
from services.evaluation.core.report import Comparison, markdown, parse_predictions
from services.evaluation.core.report_page import render_page
from services.evaluation.core.state import State, Version
from services.evaluation.plot import comparison_png
from tests.checkpoint.facts import placed, support


def wanted(metric: str = "accuracy", mode: Any = "max", **fields: Any) -> Evaluation:
    return Evaluation(metric=metric, mode=mode, **fields)


Metrics = dict[str, float]


def gate(evaluation: Evaluation, candidate: Metrics, champion: Metrics | None, champion_run_id: str = "") -> Verdict:
    return judge(Criteria(evaluation), Evidence(candidate, champion, champion_run_id))


GATE: dict[str, tuple[Evaluation, Metrics, Metrics | None, bool, str]] = {
    "no champion": (wanted(), {"accuracy": 0.5}, None, True, "accuracy 0.5; the model had no champion"),
    "no champion, above threshold": (wanted(threshold=0.9), {"accuracy": 0.91}, None, True, "passes the threshold 0.9"),
    "at the threshold": (wanted(threshold=0.3), {"accuracy": 0.1 + 0.2}, None, True, "0.3"),
    "below threshold": (wanted(threshold=0.9), {"accuracy": 0.89}, None, False, "0.89 is below the threshold 0.9"),
    "above threshold, min": (wanted("loss", "min", threshold=1), {"loss": 2}, None, False, "above the threshold 1"),
    "better": (wanted(), {"accuracy": 0.92}, {"accuracy": 0.91}, True, "0.92 against the champion's 0.91 (rc): better"),
    "tie": (wanted(), {"accuracy": 0.91}, {"accuracy": 0.91}, False, "not better"),
    "worse": (wanted(), {"accuracy": 0.90}, {"accuracy": 0.91}, False, "not better"),
    "lower is better": (wanted("loss", "min"), {"loss": 0.1}, {"loss": 0.2}, True, "better"),
    "higher loss": (wanted("loss", "min"), {"loss": 0.3}, {"loss": 0.2}, False, "not better"),
    "improves too little": (wanted(min_improvement=0.02), {"accuracy": 0.92}, {"accuracy": 0.91}, False, "least 0.02"),
    "improves just enough": (wanted(min_improvement=0.1), {"accuracy": 0.3}, {"accuracy": 0.2}, True, "better"),
    "allowed to be worse": (wanted(min_improvement=-0.1), {"accuracy": 0.85}, {"accuracy": 0.9}, True, "no worse than"),
    "metric missing": (wanted("f1"), {"accuracy": 0.9}, None, False, "set evaluation.metric to one of accuracy"),
    "nothing measured": (wanted(), {}, None, False, "(it gave none)"),
    "not a number": (wanted(), {"accuracy": math.nan}, {"accuracy": 0.1}, False, "no finite 'accuracy'"),
    "infinite": (wanted(), {"accuracy": math.inf}, None, False, "no finite"),
    "champion without it": (wanted(), {"accuracy": 0.9}, {"loss": 1.0}, False, "cannot be compared"),
    "as the split calls it": (wanted("validation/accuracy"), {"test/accuracy": 0.9}, None, True, "0.9"),
}


@pytest.mark.parametrize("case", GATE)
def test_gate(case: str) -> None:
    evaluation, candidate, champion, promote, words = GATE[case]
    verdict = gate(evaluation, candidate, champion, "rc")
    assert verdict.promote is promote, verdict.reason
    assert words in verdict.reason


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 10), st.sampled_from(["min", "max"]))
def test_two_runs_never_both_beat_each_other(a: float, b: float, improvement: float, mode: Any) -> None:
    evaluation = wanted("m", mode, min_improvement=improvement)
    verdicts = [gate(evaluation, {"m": x}, {"m": y}).promote for x, y in ((a, b), (b, a))]
    assert verdicts.count(True) <= 1


def test_the_exact_name_goes_before_the_splits() -> None:
    metrics = {"accuracy": 0.1, "test/accuracy": 0.2, "validation/accuracy": 0.3}
    assert {name: metric_value(metrics, name) for name in metrics} == metrics


ROLLBACKS: dict[str, tuple[str, str | None]] = {
    "nothing yet": ("", None),
    "one": ("A", None),
    "two": ("AB", "A"),
    "rolled back": ("AB<", None),
    "rolled back and on": ("AB<C", "A"),
    "two back": ("ABC<", "A"),
    "nonsense on the bus": ("<<A<", None),
}


@pytest.mark.parametrize("case", ROLLBACKS)
def test_rollback_goes_back_one_promotion_each_time(case: str) -> None:
    history, before = ROLLBACKS[case]
    state = State(models={"m": [_version(n, letter) for n, letter in enumerate(history, start=1)]})
    found = state.before_champion("m")
    assert (found.fact.run_id if found else None) == before


def _version(number: int, letter: str) -> Version:
    back = letter == "<"
    run_id = "back" if back else letter
    fact = ModelPromoted(model="m", version=number, run_id=run_id, checkpoint_uri="s3://models/x", rollback=back)
    return Version(fact, number, "")


PREDICTIONS: dict[str, tuple[Any, tuple[tuple[int, ...], ...] | None]] = {
    "numbers": ({"labels": [0, 1, 1], "predictions": [0, 1, 0], "classes": ["a", "b"]}, ((1, 0), (1, 1))),
    "names": ({"labels": ["a", "b"], "predictions": ["b", "b"], "classes": ["a", "b"]}, ((0, 1), (0, 1))),
    "lengths differ": ({"labels": [0], "predictions": [], "classes": ["a"]}, None),
    "unknown class": ({"labels": [7], "predictions": [0], "classes": ["a"]}, None),
    "negative": ({"labels": [-1], "predictions": [0], "classes": ["a"]}, None),
    "no classes": ({"labels": [], "predictions": [], "classes": []}, None),
    "too many classes": ({"labels": [], "predictions": [], "classes": list(range(51))}, None),
    "another shape": ([1, 2], None),
    "nested": ({"labels": [[0]], "predictions": [0], "classes": ["a"]}, None),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_predictions(case: str) -> None:
    data, counts = PREDICTIONS[case]
    found = parse_predictions(json.dumps(data).encode())
    assert (found.counts if found else None) == counts
    assert parse_predictions(b"\xff{") is None


@pytest.mark.parametrize("champion", [{}, {"test/loss": 0.2, "test/accuracy": 0.9}])
@pytest.mark.parametrize("candidate", [{}, {"test/loss": 0.1, "test/accuracy": 0.95, "other": math.nan}])
def test_a_report_says_the_numbers_and_is_the_same_each_time(candidate: Metrics, champion: Metrics) -> None:
    comparison = Comparison(
        name="digits <cnn>",
        run_id="r1",
        model="digits",
        dataset_id=None,
        criteria=Criteria(wanted(threshold=0.9)),
        candidate=candidate,
        champion=champion,
        champion_label="v1 (r0)" if champion else "",
        verdict=Verdict(True, "accuracy 0.95: better"),
        predictions=PredictionComparison(
            ModelPicture(2, parse_predictions(b'{"labels": [0, 1], "predictions": [0, 0], "classes": ["a", "b"]}'))
        ),
    )
    png = comparison_png(comparison)
    assert png.startswith(b"\x89PNG")
    assert png == comparison_png(comparison)
    text, page = markdown(comparison), render_page(comparison)
    assert "accuracy 0.95: better" in text
    assert "digits &lt;cnn&gt;" in page
    assert "<cnn>" not in page
    assert "State digest" not in text
    ref = CheckpointRef(uri="s3://models/c.json", step=40, epoch=1, samples_consumed=40)
    committed = CheckpointCommitted(
        run_id="r1", generation=1, checkpoint=ref, size_bytes=1, exactness="exact", state_digest="d" * 64
    )
    exact = markdown(replace(comparison, committed=committed))
    assert "- Exactness: exact: the same to the bit" in exact
    assert f"- State digest: {'d' * 64}" in exact
    if candidate and champion:
        assert [line.split("|")[1].strip() for line in text.splitlines() if "0.05" in line] == ["test/accuracy"]


TASK: dict[str, Any] = {
    "task": "task:T",
    "code": {"uri": "s3://code/c", "sha256": "0" * 64},
    "slots": {"min": 4, "max": 8},
    "gang": {"bundle": 4, "apart": True, "together": "switch"},
    "resources": {"accelerators": ["h200"], "cpus": 4},
    "scheduling": {"tier": "production", "clusters": ["north"]},
}
#: The request of a training -> slots and gang of its evaluation.
EVALUATION_SLOTS: dict[str, tuple[dict[str, Any], tuple[int, int], dict[str, Any]]] = {
    "one": ({"training": {"epochs": 1}}, (1, 1), {"bundle": 1, "apart": False, "together": "switch"}),
    "in shards": ({"training": {"epochs": 1, "strategy": "fsdp2"}}, (4, 8), TASK["gang"]),
    "in shards of DeepSpeed": (
        {"training": {"epochs": 1, "strategy": "deepspeed", "zero_stage": 3}}, (4, 8), TASK["gang"],
    ),
    "whole copies of DeepSpeed": (
        {"training": {"epochs": 1, "strategy": "deepspeed", "zero_stage": 1}},
        (1, 1),
        {"bundle": 1, "apart": False, "together": "switch"},
    ),
    "its own": (
        {"training": {"epochs": 1}, "evaluation": {"metric": "a", "mode": "max", "slots": 4}, "model": "m"},
        (4, 4),
        TASK["gang"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EVALUATION_SLOTS)
def test_an_evaluation_has_the_resources_of_its_training(case: str) -> None:
    fields, slots, gang = EVALUATION_SLOTS[case]
    trained = RunSpec.model_validate({"name": "r", **TASK, **fields})
    step = RequestEvaluation("e", "r1", "s3://models/c", None, 5, "accuracy", "max")
    request = evaluation_request(step, trained)
    assert (request.slots.min, request.slots.max) == slots
    assert {name: getattr(request.gang, name) for name in gang} == gang
    assert (request.resources, request.scheduling) == (trained.resources, trained.scheduling)
    assert request.evaluate is not None
    assert (request.evaluate.metric, request.evaluate.mode) == ("accuracy", "max")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "evaluate.py"], ["python", "-m", "trainbus.script_evaluation", "python", "evaluate.py"]),
        (None, ["./train.sh"]),
    ],
)
def test_a_script_is_measured_by_its_own_command(command: list[str] | None, expected: list[str]) -> None:
    trained = RunSpec.model_validate(
        {
            "name": "r",
            "command": ["./train.sh"],
            "model": "m",
            "evaluation": {"metric": "a", "mode": "max", "command": command},
        }
    )
    assert evaluation_request(RequestEvaluation("e", "r1", "s3://models/c", None, 5), trained).command == expected


def test_slot_hours_are_of_placements_that_count() -> None:
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    run = placed()
    end = RunExited(run_id=run.run_id, generation=1, node_id="a", outcome="succeeded", exit_code=0)
    ends = [end, end.model_copy(update={"node_id": "b"})]
    lies = [placed(9), placed(world_size=10**30), placed(members=())]
    facts = [(fact, begun) for fact in (*support(run), run, *lies)]
    assert slot_hours([*facts, *((each, begun + timedelta(hours=2)) for each in ends)]) == 8
    assert slot_hours((fact, begun) for fact in lies) is None
