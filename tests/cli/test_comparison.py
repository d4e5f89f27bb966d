"""Runs side by side."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from contracts.spec.run import RunSpec
from trainbus.client.comparison import RunResult, compare_runs
from trainbus.client.errors import UsageError
from trainbus.client.runs import MetricPoint
from trainbus.client.views import RunView
from trainbus.commands.results import draw_curve


def result(label: str, losses: list[float], checkpoint: Any = None, **fields: Any) -> RunResult:
    spec = RunSpec.model_validate({"name": label, "command": ["true"], **fields})
    view = RunView(label, state="completed", step=len(losses), spec=spec)
    points = [MetricPoint(step, loss, datetime.now(UTC)) for step, loss in enumerate(losses, start=1)]
    return RunResult(label, view, {"train/loss": points, "train/lr": points}, checkpoint)


def test_what_differs_and_what_came_of_it() -> None:
    one = result("a", [0.5, 0.2, 0.3], params={"lr": 0.1, "width": 8}, env={"TOKEN": "secret-1"})
    other = result("b", [0.5, 0.4], params={"lr": 0.2, "width": 8}, env={"TOKEN": "secret-2"}, checkpoint=(1, {}))
    found = compare_runs([one, other])
    assert found.differences["params.lr"] == (0.1, 0.2)
    assert sorted(found.differences) == ["env.TOKEN", "params.lr"]
    assert "secret" not in str(found.differences)
    assert found.modes == {"train/loss": "min"}
    first = found.runs[0].metrics["train/loss"]
    assert (first.last, first.best, first.best_step) == (0.3, 0.2, 2)
    assert found.runs[1].step == 1
    assert list(compare_runs([one, other], ["train/lr"]).modes) == ["train/lr"]


def test_a_metric_that_no_run_has_is_refused() -> None:
    runs = [result("a", [0.5]), result("b", [0.4])]
    with pytest.raises(UsageError, match="has a metric 'train/los': did you mean 'train/loss'"):
        compare_runs(runs, ["train/los"])
    with pytest.raises(UsageError, match="'nope': there is: train/loss, train/lr"):
        compare_runs(runs, ["train/loss", "nope"])


def test_the_same_requests_have_no_differences() -> None:
    assert compare_runs([result("a", []), result("b", [])]).differences == {}


def test_a_curve_is_on_the_scale_of_all() -> None:
    drawn = draw_curve([(0, 0.0), (95, 1.0)], 0.0, 2.0, 95)
    assert (drawn[0], drawn[-1], len(drawn)) == ("▁", "▅", 48)


def test_the_step_of_a_script_that_reported_none_is_not_known() -> None:
    script = RunSpec(name="script", command=["true"])
    ended, running = RunView("a", state="completed", spec=script), RunView("b", state="running", spec=script)
    trained = RunView("c", state="completed", step=7, spec=script)
    found = compare_runs([RunResult(each.run_id, each, {}) for each in (ended, running, trained)])
    assert [each.step for each in found.runs] == [None, 0, 7]
