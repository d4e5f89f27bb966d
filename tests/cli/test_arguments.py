"""What people type without a stack: times, and policies by name or file."""

from __future__ import annotations

import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainbus.client.errors import TrainbusError
from trainbus.commands import toml_writer
from trainbus.commands.main import app
from trainbus.commands.times import parse_duration, parse_time

NOW = datetime(2026, 11, 20, 15, 30, tzinfo=UTC)
DAY = datetime(2026, 11, 20, tzinfo=UTC)
MOMENTS = {
    "2026-11-19T14:00": datetime(2026, 11, 19, 14, tzinfo=UTC),
    "2026-11-19 14:00:05": datetime(2026, 11, 19, 14, 0, 5, tzinfo=UTC),
    "2026-11-19": datetime(2026, 11, 19, tzinfo=UTC),
    "2026-11-19T14:00+02:00": datetime(2026, 11, 19, 12, tzinfo=UTC),
    "14:05": DAY + timedelta(hours=14, minutes=5),
    "9:05": DAY + timedelta(hours=9, minutes=5),
    "2 h ago": NOW - timedelta(hours=2),
    "1h30m ago": NOW - timedelta(minutes=90),
    "3 days ago": NOW - timedelta(days=3),
    "90 ago": NOW - timedelta(seconds=90),
    "now": NOW,
    "yesterday": DAY - timedelta(days=1),
}


@pytest.mark.parametrize("text", MOMENTS)
def test_times(text: str) -> None:
    assert parse_time(text, NOW) == MOMENTS[text]


@pytest.mark.parametrize("text", ["", "soon", "ago", "25:99", "2 parsecs ago", "-3"])
def test_an_invalid_time_names_the_valid_forms(text: str) -> None:
    with pytest.raises(TrainbusError, match="write"):
        parse_time(text, NOW)


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("10m", 600), ("2h", 7200), ("1 h 30 min", 5400), ("1.5d", 129_600)]
)
def test_lengths_of_time(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


def test_toml_is_read_back_as_it_was() -> None:
    content = {
        "name": 'a "quoted" näme',
        "order": {"by": ["priority", "submitted"], "skip": True, "attained": {"levels_slot_s": [1.0, 2.5]}},
        "admit": {"quotas": [{"team": "a/b", "slots": 3}, {"team": "c", "slots": None}]},
        "fair_share": {"weights": {"research/vision": 2.0, "ops": 1}},
        "maintenance": [],
    }
    read: Any = tomllib.loads(toml_writer.dumps(content))
    del content["admit"]["quotas"][1]["slots"]  # type: ignore[index]
    assert read == content


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, ["policy", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_policies_are_listed_and_checked(tmp_path: Path) -> None:
    listed = json.loads(run("presets", "--json").stdout)
    assert "fifo" in {each["name"] for each in listed}
    assert "fifo-skip" in run("presets").stdout
    shown = run("check", "fair-share", "--set", "fair_share.half_life_s=60").stdout
    file = tmp_path / "own.toml"
    file.write_text(shown)
    again = json.loads(run("check", str(file), "--json").stdout)
    assert again["valid"]
    assert again["changes"]["fair_share"] == {"half_life_s": 60.0}
    file.write_text("[order]\nskipp = true\n")
    with pytest.raises(TrainbusError, match=r"order\.skipp: unknown field: did you mean order\.skip"):
        run("check", str(file))
    with pytest.raises(TrainbusError, match="there is no policy"):
        run("check", "no-such")
