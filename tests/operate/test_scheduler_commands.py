"""``trainbus scheduler replay`` and ``what-if`` on a file, without a stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contracts.scheduling import Policy
from trainbus.client.errors import TrainbusError
from trainbus.commands.main import app
from trainbus.operate.history.log import line_of
from trainbus.operate.simulation import generate
from trainbus.operate.simulation.engine import simulate
from trainbus.operate.simulation.traces import at


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, ["scheduler", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a small simulated cluster."""
    lines: list[str] = []
    simulate(
        generate.jobs(40, 16, 3, per_node=8),
        Policy(),
        listeners=(lambda fact, sequence, now_s: lines.append(line_of(fact, sequence, at(now_s))),),
    )
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_file_is_replayed(log: Path) -> None:
    result = run("replay", "--log", str(log))
    assert result.exit_code == 0
    assert "differences" in result.stdout
    text = log.read_text()
    waiting = '"type":"trainbus.run.waiting.v1"'
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if waiting in line)
    lines[first] = lines[first].replace('"code":"', '"code":"not-', 1)
    log.write_text("\n".join(lines))
    answer = json.loads(run("replay", "--log", str(log), "--json").stdout)
    assert answer["difference_count"] == 1
    with pytest.raises(TrainbusError, match="there is no file"):
        run("replay", "--log", str(log.with_name("none")))
    log.write_text("nonsense\n")
    with pytest.raises(TrainbusError, match="line 1"):
        run("replay", "--log", str(log))


def test_what_if_compares_scenarios(log: Path, tmp_path: Path) -> None:
    args = ("what-if", "--log", str(log), "--nodes", "1x8", "--add", "2x8", "--policy", "fifo", "--price", "gpu=2")
    answer = json.loads(run(*args, "--json").stdout)
    was, played, fewer, more = answer["scenarios"]
    assert [each["slots"] for each in answer["scenarios"]] == [16, 16, 8, 32]
    assert was["jobs"] == played["jobs"] == 40
    assert more["avg_wait_s"] <= played["avg_wait_s"] <= fewer["avg_wait_s"]
    assert fewer["cost"] < more["cost"]
    shown = run(*args, "--plot", str(tmp_path / "plots"))
    assert "1x8, fifo" in shown.stdout
    assert (tmp_path / "plots" / "what_if.png").stat().st_size > 10_000
    for wrong, text in (
        (("what-if", "--log", str(log)), "nothing to compare"),
        (("what-if", "--log", str(log), "--nodes", "many"), "are no nodes"),
        (("what-if", "--log", str(log), "--nodes", "1x8", "--from", "2030-01-01"), "nothing was submitted"),
    ):
        with pytest.raises(TrainbusError, match=text):
            run(*wrong)
