"""When a checkpoint is due, where two of them differ, and which of its weights are evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from contracts.ranks import CheckpointLine, Launch
from contracts.spec.training import Training
from tests.trainbus.support import journal, linear_dataset, request, write_launch
from tests.trainbus.test_trainer import Linear, train
from trainbus.evaluation.evaluate import evaluate
from trainbus.trainer.checkpoint import CheckpointSchedule, FailureHistory, compare
from trainbus.trainer.validation import measure_split
from trainbus.trainer.world import World, limit_threads


def training(**changes: Any) -> Training:
    return Training.model_validate({"max_steps": 100, **changes})


def test_every_checkpoint_restarts_a_fixed_interval() -> None:
    schedule = CheckpointSchedule(training(checkpoint_every_s=60), 1000)
    assert [schedule.is_due_at_time(1000 + s) for s in (0, 59.9, 60)] == [False, False, True]
    schedule.record_time(1090)
    schedule.record_cost(30)  # does not change a requested interval
    assert [schedule.is_due_at_time(1090 + s) for s in (0, 59.9, 60)] == [False, False, True]


@pytest.mark.parametrize(
    ("machines", "history", "costs", "expected_s"),
    [
        pytest.param(
            1, FailureHistory(), [], math.sqrt(2 * 1.0 * 86_400), id="a second is assumed, and one failure a day"
        ),
        pytest.param(1, FailureHistory(), [0.5], math.sqrt(2 * 0.5 * 86_400), id="what one cost"),
        pytest.param(1, FailureHistory(), [1, 3], math.sqrt(2 * 2.0 * 86_400), id="later ones count for more"),
        pytest.param(
            4, FailureHistory(), [2], math.sqrt(2 * 2.0 * 21_600), id="four machines fail four times as often"
        ),
        pytest.param(
            4, FailureHistory(3, 3600), [2], math.sqrt(2 * 2.0 * 6300), id="it has failed three times in an hour"
        ),
        pytest.param(1, FailureHistory(0, 86_400), [2], math.sqrt(2 * 2.0 * 172_800), id="a day without a failure"),
        pytest.param(1, FailureHistory(99, 0), [50], 500, id="never more than a tenth of the time"),
    ],
)
def test_the_auto_interval_weighs_checkpoint_cost_against_failures(
    machines: int, history: FailureHistory, costs: list[float], expected_s: float
) -> None:
    schedule = CheckpointSchedule(training(checkpoint_every_s="auto"), 50, machines=machines, history=history)
    for seconds in costs:
        schedule.record_cost(seconds)
    assert schedule.interval_s == pytest.approx(expected_s)
    assert [schedule.is_due_at_time(50 + expected_s * part) for part in (0.999, 1.001)] == [False, True]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param({}, [6], id="at the end of an epoch"),
        pytest.param({"checkpoint_every_steps": 4}, [4, 8], id="every n steps"),
        pytest.param({"checkpoint_every_steps": 4, "checkpoint_at_steps": [1, 8]}, [1, 4, 8], id="and at these"),
    ],
)
def test_checkpoint_steps_are_the_same_for_every_rank(wanted: dict[str, Any], expected: list[int]) -> None:
    schedule = CheckpointSchedule(training(**wanted), 0)
    assert [step for step in range(1, 10) if schedule.is_due_at_step(step, epoch_ended=step == 6)] == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, None, id="order is nothing"),
        pytest.param({"b": "1", "a": "1"}, {"b": "2", "a": "2"}, "a", id="the first by name"),
        pytest.param({"a": "1"}, {"a": "1", "b": "2"}, "b", id="ours lacks one"),
        pytest.param({"a": "1", "b": "2"}, {"b": "3"}, "a", id="theirs lacks one"),
        pytest.param({}, {}, None, id="nothing"),
    ],
)
def test_the_first_difference_of_two_states_is_found(
    ours: dict[str, str], theirs: dict[str, str], expected: str | None
) -> None:
    assert compare(ours, theirs) == compare(theirs, ours) == expected


def test_evaluation_uses_the_moving_average_of_the_weights(tmp_path: Path) -> None:
    limit_threads({})
    dataset, world, metrics = linear_dataset(tmp_path / "data"), World(), {}
    for name, options in {"averaged": {"ema_decay": 0.95}, "plain": {}}.items():
        folder = tmp_path / name
        trainer, outcome = train(folder, dataset, Linear(), **options)
        saved = [line for line in journal(folder) if isinstance(line, CheckpointLine)][-1]
        wanted = {"run_id": "rtest", "checkpoint_uri": "s3://models/x.json", "split": "validation"}
        path = write_launch(
            tmp_path / f"evaluate-{name}",
            request(kind="evaluate", evaluate=wanted),
            dataset,
            tmp_path,
            resume_folder=Path(saved.folder),
        )
        found, _ = evaluate(Launch.model_validate_json(path.read_bytes()), Linear(), dataset, world)
        assert found.pop("validation/latency_ms") > 0  # measured there alone
        # What decided on the best checkpoint in training is what is evaluated, to the last bit.
        assert found == {key: value for key, value in outcome.metrics.items() if key.startswith("validation/")}
        weights = measure_split(Linear(), trainer.strategy.model, trainer.data.validation_split, world, "fp32")
        metrics[name] = (found["validation/loss"], weights["loss"])
    assert metrics["averaged"][1] == metrics["plain"][1] == metrics["plain"][0]  # averages do not disturb the weights
    assert metrics["averaged"][0] != metrics["averaged"][1]
