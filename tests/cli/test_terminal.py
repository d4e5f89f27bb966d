"""What others chose as names, reasons and output does nothing to the terminal that it is printed on."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from contracts.events.run import RunAccepted, RunCompleted, RunFailed
from contracts.spec.run import RunSpec
from tests.answers import read_answers
from trainbus.client.errors import UsageError
from trainbus.commands import main, render, run_tables

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "\x1b[2Jgone \x1b]0;title\x07 \r\x9b31m \u202etxt [bold red]mark[/nope] \\"


def shown(renderable: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=400, force_terminal=True, color_system=None).print(renderable)
    return out.getvalue()


def test_every_character_that_acts_is_shown() -> None:
    assert render.visible("a\x1b[2J\x07\x9b\u202e") == r"a\x1b[2J\x07\x9b\u202e"
    assert render.visible("päivää\n\t日本") == "päivää\n\t日本"


def test_output_keeps_its_colours_and_moves_no_cursor() -> None:
    assert render.make_safe("\x1b[1;31mred\x1b[0m \x1b[2J\x1b]0;title\x07") == (
        "\x1b[1;31mred\x1b[0m " + r"\x1b[2J\x1b]0;title\x07" + "\x1b[0m"
    )
    assert render.make_safe("plain\tpäivää") == "plain\tpäivää"


def test_numbers_that_json_lacks_are_text() -> None:
    ended = RunCompleted(run_id="r1", generation=1, metrics={"loss": float("nan"), "margin": float("-inf")})
    found = json.loads(render.as_json({"event": ended, "lr": [float("inf"), 0.5]}), parse_constant=pytest.fail)
    assert found["event"]["metrics"] == {"loss": "NaN", "margin": "-Infinity"}
    assert found["lr"] == ["Infinity", 0.5]


def test_a_run_of_a_hostile_name() -> None:
    spec = RunSpec(name=HOSTILE, command=["true"])
    facts = [
        RunAccepted(run_id="r1", spec=spec, request_id="q", request_source="s"),
        RunFailed(run_id="r1", generation=1, reason=HOSTILE),
    ]
    (view,) = read_answers(*facts).runs.values()
    text = (
        shown(run_tables.render_runs([view], NOW))
        + shown(run_tables.render_run(view))
        + shown(run_tables.render_timeline(view.timeline))
    )
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")
    assert "[bold red]mark[/nope]" in text


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("there is no run '\x1b[2J'"), 2, r"there is no run '\x1b[2J'"),
        (FileNotFoundError(2, "No such file or directory", "/nowhere"), 1, "/nowhere: No such file or directory"),
        (OSError("it broke"), 1, "it broke"),
    ],
)
def test_errors_are_printed_in_words(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert (ended.value.code, capsys.readouterr().err) == (code, f"trainbus: {message}\n")
