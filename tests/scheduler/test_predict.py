"""Predictions of how long runs take: what is mixed, what is conditional, what is causal."""

from __future__ import annotations

import json
import math
import random
import statistics
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.scheduling import Predict
from contracts.spec.run import RunSpec
from services.scheduler.core.state.durations import (
    MAX_PER_KEY,
    Distribution,
    History,
    Observation,
    RunKind,
    RunningTimes,
    run_kind_of,
    sample,
)

CONFIG = Predict(window=1000)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DURATIONS = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60)


def only(*values: float) -> Distribution:
    return Distribution([(1.0, sample(values, 3600.0))])


def probability_over(predicted: Distribution, s: float, attained_s: float = 0.0) -> float:
    """Return the probability that the run takes longer than ``s``, all in all."""
    return 1.0 if s <= attained_s else predicted.survival(s) / predicted.survival(attained_s)


def test_nothing_known_is_the_prior() -> None:
    predicted = History().predict(RunKind("ada"), CONFIG)
    assert predicted.mean_remaining_s() == pytest.approx(CONFIG.prior_s)
    assert predicted.mean_remaining_s(7200) == pytest.approx(7200 + CONFIG.prior_s)
    assert probability_over(predicted, predicted.quantile(0.9)) == pytest.approx(0.1)


def test_quantiles_of_what_was_seen() -> None:
    predicted = only(*range(1, 101))
    assert [predicted.quantile(q) for q in (0.1, 0.5, 0.9)] == pytest.approx([10, 50, 90], abs=1)
    assert predicted.mean_remaining_s() == pytest.approx(50.5)


def test_conditional_on_what_it_has_had() -> None:
    predicted = only(10, 20, 30, 100)
    assert predicted.mean_remaining_s(25) == pytest.approx((5 + 75) / 2)
    assert predicted.quantile(0.5, 25) == 30
    assert predicted.quantile(0.9, 25) == 100
    assert probability_over(predicted, 30, 25) == pytest.approx(0.5)
    assert probability_over(predicted, 10, 25) == 1


def test_a_run_that_has_outlived_all_others_continues() -> None:
    history = History()
    for _ in range(50):
        history.add(RunKind("ada"), 60, NOW)
    predicted = history.predict(RunKind("ada"), CONFIG)
    assert predicted.quantile(0.5) == 60
    assert predicted.mean_remaining_s(100_000) == pytest.approx(103_600)
    assert predicted.quantile(0.5, 100_000) > 130_000


@pytest.mark.parametrize(
    ("asked", "median_s"),
    [
        (RunKind("ada", slots=8), 800),  # its own kind
        (RunKind("ada", slots=2), 800),  # the user's runs of other sizes
        (RunKind("eve", slots=8), 800),  # others' of that size
        (RunKind("eve", slots=1), 10),
        (RunKind("eve", slots=64), 10),  # all of them: bob's are more
    ],
)
def test_falls_back_from_narrow_to_wide(asked: RunKind, median_s: float) -> None:
    history = History()
    for _ in range(40):
        history.add(RunKind("ada", slots=8), 800, NOW)
    for _ in range(100):
        history.add(RunKind("bob", slots=1), 10, NOW)
    assert history.predict(asked, CONFIG).quantile(0.5) == median_s


def test_few_runs_of_a_kind_leave_room_for_the_wider_one() -> None:
    history = History()
    for _ in range(100):
        history.add(RunKind("bob"), 10, NOW)
    history.add(RunKind("ada"), 5000, NOW)
    predicted = history.predict(RunKind("ada"), Predict(enough=5))
    assert 0.1 < probability_over(predicted, 4000) < 0.5
    for _ in range(50):
        history.add(RunKind("ada"), 5000, NOW)
    assert probability_over(history.predict(RunKind("ada"), Predict(enough=5)), 4000) > 0.9


def test_the_newest_count() -> None:
    history = History()
    for number in range(3 * MAX_PER_KEY):
        history.add(RunKind("ada"), 100 if number < 2 * MAX_PER_KEY else 7, NOW)
    predicted = history.predict(RunKind("ada"), CONFIG)
    assert predicted.quantile(0.9) == 7
    assert probability_over(predicted, 50) < 0.05


def test_a_prediction_changes_only_when_something_was_added() -> None:
    history = History()
    history.add(RunKind("ada"), 10, NOW)
    first = history.predict(RunKind("ada"), CONFIG)
    assert history.predict(RunKind("ada"), CONFIG) is first
    history.add(RunKind("bob"), 1000, NOW)
    assert history.predict(RunKind("ada"), CONFIG) is not first


def test_runs_that_go_on_are_evidence() -> None:
    history = History()
    for _ in range(20):
        history.add(RunKind("ada"), 60, NOW)
    running = RunningTimes(NOW)
    for _ in range(20):
        running.add(RunKind("ada"), 90_000)
    assert probability_over(history.predict(RunKind("ada"), CONFIG), 3600) < 0.1
    beside = history.predict_beside(RunKind("ada"), CONFIG, running)
    assert 0.4 < probability_over(beside, 3600) < 0.6
    assert beside.quantile(0.9) > 90_000


def test_the_newest_ended_runs_do_not_stand_for_all() -> None:
    """Of a user's runs half take a minute and half a day: in a window of the last hours, hardly any of the long ones
    has ended, yet those that go on say how many there are.
    """
    history = History()
    config = Predict(window=100, enough=1)
    begun = [NOW + timedelta(seconds=600 * number) for number in range(2000)]
    runs = [(at, 60.0 if number % 2 else 86_400.0) for number, at in enumerate(begun)]
    now = begun[-1]
    for at, run_s in sorted(runs, key=lambda each: each[0] + timedelta(seconds=each[1])):
        if at + timedelta(seconds=run_s) <= now:
            history.add(RunKind("ada"), run_s, at + timedelta(seconds=run_s))
    running = RunningTimes(now)
    for at, run_s in runs:
        if at + timedelta(seconds=run_s) > now:
            running.add(RunKind("ada"), (now - at).total_seconds())
    beside = history.predict_beside(RunKind("ada"), config, running)
    assert beside.mean_remaining_s() == pytest.approx((60 + 86_400) / 2, rel=0.15)


def test_kaplan_meier_of_a_textbook() -> None:
    # Six runs: 1, 3 and 5 have ended; 2, 4 and 6 go on.
    found = sample([1, 3, 5], 1000, Observation([2, 4, 6]))
    assert found.values[:3] == (1, 3, 5)
    assert found.steps[1:4] == pytest.approx((5 / 6, 5 / 6 * 3 / 4, 5 / 6 * 3 / 4 * 1 / 2))


def test_the_state_is_json_and_predicts_the_same() -> None:
    rng = random.Random(5)
    history = History()
    for _ in range(700):
        history.add(
            RunKind(rng.choice("abc"), task=rng.choice("xy"), slots=rng.choice((1, 8))), rng.expovariate(1e-3), NOW
        )
    again = History.from_state(json.loads(json.dumps(history.to_state())))
    for user in "abcd":
        one, other = (each.predict(RunKind(user, task="x", slots=8), CONFIG) for each in (history, again))
        assert [one.quantile(q / 10) for q in range(1, 10)] == [other.quantile(q / 10) for q in range(1, 10)]
    history.add(RunKind("a"), 1, NOW)
    again.add(RunKind("a"), 1, NOW)
    assert history.to_state() == again.to_state()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.state.durations.MAX_DURATIONS", 1000)
    monkeypatch.setattr("services.scheduler.core.state.durations.MAX_PER_KEY", 50)
    history = History()
    for number in range(5000):
        history.add(RunKind(f"user-{number}"), number, NOW)
    kept = {key: len(newest) for key, _, _, newest, _ in history.to_state()["windows"]}
    assert sum(kept.values()) <= 1000
    assert kept[RunKind("user-4999").keys[0]] == 1
    assert RunKind("user-1").keys[0] not in kept


def test_the_kind_of_a_request() -> None:
    def spec(**more: object) -> RunSpec:
        return RunSpec.model_validate({"name": "n", "command": ["x"], **more})

    assert run_kind_of(spec(name="sweep-17")) == run_kind_of(spec(name="sweep-4"))
    assert run_kind_of(spec(user="ada")) != run_kind_of(spec(user="bob"))
    assert run_kind_of(spec(slots=8)) != run_kind_of(spec(slots=1))
    assert run_kind_of(spec(data={"dataset_id": "0" * 64})).dataset == "0" * 64
    assert run_kind_of(spec(data={"source": "s3://lake/a/", "format": "jsonl"})).dataset == "s3://lake/a/"


@given(DURATIONS, st.lists(st.floats(0.1, 1e6), max_size=20), st.floats(0, 1e6), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=200)
def test_answers_agree_with_each_other(ended: list[float], running: list[float], attained: float, q: float) -> None:
    predicted = Distribution([(0.9, sample(ended, 100.0, Observation(running))), (0.1, sample((), 100.0))])
    at = predicted.quantile(q, attained)
    assert at >= attained
    assert probability_over(predicted, at, attained) <= (1 - q) + 1e-6
    assert predicted.quantile(min(q + 0.005, 0.999), attained) >= at
    assert predicted.survival(attained) > 0
    assert predicted.mean_remaining_s(attained) > 0


@pytest.mark.parametrize("attained", [0.0, 15.0, 500.0])
def test_draws_have_the_distribution(attained: float) -> None:
    ended = [1.0, 5, 10, 20, 20, 40, 80, 1000]
    predicted = Distribution([(0.8, sample(ended, 50.0, Observation([30, 60]))), (0.2, sample((), 50.0))])
    rng = random.Random(1)
    drawn = [predicted.quantile(rng.random(), attained) for _ in range(4000)]
    assert min(drawn) >= attained
    for s in (7.0, 25, 100, 2000):
        share = sum(each > s for each in drawn) / len(drawn)
        assert share == pytest.approx(probability_over(predicted, s, attained), abs=0.03)


def test_mean_is_that_of_the_draws() -> None:
    predicted = only(3, 8, 19, 70)
    rng = random.Random(2)
    drawn = statistics.fmean(predicted.quantile(rng.random(), 5) - 5 for _ in range(5000))
    assert math.isclose(drawn, predicted.mean_remaining_s(5), rel_tol=0.05)
