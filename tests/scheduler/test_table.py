"""The table of all figures: a part that fails is named, and keeps no other from being measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loadtest.scheduler.__main__ as table
from loadtest.scheduler.__main__ import Bench, Failed, Line, Part, measured


def good(bench: Bench) -> Iterator[Line]:
    yield Line("waits", "1 s", "2 s", 0.5)


def broken(bench: Bench) -> Iterator[Line]:
    yield Line("first", "1", "1")
    raise Failed("python -m something ended with 2 and kept no figures")


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {"broken": Part(broken, False, 10), "good": Part(good, False, 20), "trace": Part(good, True, 5)}
    monkeypatch.setattr(table, "PARTS", found)
    monkeypatch.setattr(table, "RESULTS", tmp_path)


def test_one_part_fails_and_the_others_are_measured() -> None:
    lines, failed = measured(["broken", "trace", "good"], None, 1)
    assert failed == ["broken"]
    assert [(line.label, line.measured) for line in lines] == [
        ("trace", "left out"),
        ("first", "1"),
        ("broken", "failed"),
        ("waits", "1 s"),
    ]
    assert "ended with 2" in lines[2].target


def test_the_table_is_printed_and_the_exit_status_says_that_a_part_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[tuple[str, ...]] = []
    monkeypatch.setattr(table, "report", lambda name, rows, figures: printed.extend(rows))
    for only, status in (("good", 0), ("broken,good", 1)):
        monkeypatch.setattr("sys.argv", ["scheduler", "--only", only])
        printed.clear()
        assert table.main() == status
        assert ("waits", "1 s", "2 s  ratio 0.50") in printed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "god"], "there is no part god; there are broken, good, trace"),
        (["--traces", "/nowhere"], "/nowhere is no folder"),
    ],
)
def test_what_is_not_there_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.setattr("sys.argv", ["scheduler", *arguments])
    with pytest.raises(SystemExit):
        table.main()
    assert text in capsys.readouterr().err


def test_figures_of_an_earlier_run_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "why.json").write_text('{"named": 1}')
    bench = Bench(None, 1, {"good": 1.0})
    bench.begin("good")
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: subprocess.CompletedProcess(args, 1, ""))
    with pytest.raises(Failed, match="kept no figures"):
        bench.kept("why", "loadtest.scheduler.why")

    def run(*args: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        (tmp_path / "new.json").write_text(json.dumps({"named": 2}))
        return subprocess.CompletedProcess(args, 1, "")  # the status of one that found something wrong

    monkeypatch.setattr(subprocess, "run", run)
    assert bench.kept("new", "loadtest.scheduler.why") == {"named": 2}


def test_what_is_left_follows_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    bench = Bench(None, 1, {"broken": 10.0, "good": 20.0, "trace": 5.0})
    bench.begin("broken")
    assert bench.left_min() == pytest.approx(35)
    now_s = 20 * 60.0  # twice as long as it takes
    bench.end()
    bench.begin("good")
    assert bench.left_min() == pytest.approx(50)
    now_s += 30 * 60.0
    assert bench.left_min() == pytest.approx(20)
    bench.begin("trace")  # without an end of the one before it, which failed: it says nothing of the others' pace
    assert bench.left_min() == pytest.approx(10)
