"""The runner of the suite: what fails is named last, what is flaky is written down, and three times is red."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.suite import __main__ as suite
from tests.suite import flaky, longest
from tests.suite.outcomes import Outcome, read_outcomes
from tests.suite.pauses import pause_children

ROOT = Path(__file__).parents[1]
MODULE = """
import hypothesis, pytest
from hypothesis import strategies as st

def test_passes(): pass
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="no reason")
def test_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_expected(): assert False
@pytest.fixture
def broken():
    yield
    raise RuntimeError("in the teardown")
def test_torn_down(broken): pass
@hypothesis.given(st.integers())
def test_drawn(number): assert number < 100
"""


def run_module(folder: Path, text: str, *arguments: str) -> list[Outcome]:
    """Run a module of tests apart from this project's; return how they ended."""
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    file = folder / "outcomes.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.suite.outcomes", f"--outcomes={file}", *arguments]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, capture_output=True)
    return read_outcomes(file)


@pytest.mark.shell
@pytest.mark.parametrize("spread", [("-p", "no:xdist"), ("-n", "2")])
def test_how_each_test_ended_is_written_down(tmp_path: Path, spread: tuple[str, ...]) -> None:
    outcomes = {outcome.test.partition("::")[2]: outcome for outcome in run_module(tmp_path, MODULE, *spread)}
    assert {name: outcome.result for name, outcome in outcomes.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skipped": "skipped",
        "test_expected": "passed",
        "test_torn_down": "failed",
        "test_drawn": "failed",
    }
    assert outcomes["test_fails"].error.splitlines()[0] == "AssertionError: one is not two"
    assert outcomes["test_torn_down"].error == "RuntimeError: in the teardown"
    assert [name for name, outcome in outcomes.items() if outcome.is_hypothesis] == ["test_drawn"]


@pytest.mark.shell
def test_a_module_that_does_not_import_and_a_process_that_dies_are_failures(tmp_path: Path) -> None:
    [broken] = run_module(tmp_path, "import nothing_of_that_name")
    assert (broken.test, broken.result) == ("test_it.py", "broken")
    assert "nothing_of_that_name" in broken.error
    [crashed] = run_module(tmp_path, "import os\ndef test_dies(): os._exit(1)", "-n", "1")
    assert (crashed.test, crashed.result) == ("test_it.py::test_dies", "failed")


def test_the_last_lines_name_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        Outcome("a.py::passes"),
        Outcome("a.py::skips", "skipped", error="no GPU"),
        Outcome("b.py::fails", "failed", error="ValueError: no\nmore", lines=("above", "ValueError: no")),
    ]
    suite.print_summary(outcomes, [Outcome("c.py::shaky", error="TimeoutError: late")], [])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "SKIPPED a.py::skips: no GPU",
        "FLAKY c.py::shaky: TimeoutError: late",
        "FAILED b.py::fails",
        "    ValueError: no",
        "    | above",
        "    | ValueError: no",
        "1 passed, 1 failed, 1 skipped",
    ]


@pytest.mark.parametrize(
    ("failed", "tries", "found"),
    [
        pytest.param([Outcome("a", "failed", "servers")], [0, 0], ["a"], id="passes twice"),
        pytest.param([Outcome("a", "failed", "servers")], [0, 1], [], id="fails again the second time"),
        pytest.param([Outcome("a", "failed", "stacks")], [1], [], id="fails again"),
        pytest.param([Outcome("a", "failed", "servers", is_hypothesis=True)], [], [], id="draws its examples"),
        pytest.param([Outcome("a", "broken")], [], [], id="is not collected"),
        pytest.param([Outcome(name, "failed", "stacks") for name in "abc"], [], [], id="more than a run may have"),
        pytest.param([Outcome("a", "failed", "cores")], [], [], id="of a core"),
    ],
)
def test_what_failed_may_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: list[Outcome], tries: list[int], found: list[str]
) -> None:
    codes = iter(tries)
    monkeypatch.setattr(suite, "run_pytest", lambda *_: (next(codes), []))
    assert [outcome.test for outcome in suite.retry_failed(failed, [], tmp_path)] == found
    assert list(codes) == [], "every try was made"
    assert [outcome.test for outcome in failed if outcome.result == "passed"] == found


def test_a_test_that_is_listed_three_times_is_red(tmp_path: Path) -> None:
    file = tmp_path / "flaky.tsv"
    file.write_text("test\ttime\tload\tfailure\n")
    shaky = Outcome("a.py::shaky", error="TimeoutError:\tlate\nmore")
    assert flaky.record([shaky], 2, file) == flaky.record([shaky], 2, file) == []
    [problem] = flaky.record([shaky], 2, file)
    assert problem.startswith("a.py::shaky was flaky 3 times")
    assert flaky.record([], 2, file) == [problem], "until it is mended"
    assert [line.split("\t")[::3] for line in file.read_text().splitlines()[1:]] == [
        ["a.py::shaky", "TimeoutError: late"]
    ] * 3
    [_, problem] = flaky.record([Outcome(name) for name in "bcd"], 2, file)
    assert problem == "3 tests were flaky in one run, 2 may be"


def test_the_files_that_take_longest_exist() -> None:
    assert [name for name in longest.read() if not (ROOT / name).exists()] == []


def test_the_files_that_take_longest_are_noted(tmp_path: Path) -> None:
    outcomes = [
        Outcome("a.py::one", lane="servers", seconds=4),
        Outcome("a.py::two", lane="servers", seconds=4),
        Outcome("b.py::one", lane="stacks", seconds=9),
        Outcome("c.py::short", lane="servers", seconds=1),
        Outcome("d.py::runs_before_them", lane="cores", seconds=60),
    ]
    longest.note(outcomes, tmp_path / "longest.txt")
    assert longest.read(tmp_path / "longest.txt") == ["b.py", "a.py"]


@pytest.mark.shell
def test_processes_are_paused_and_go_on() -> None:
    """A process that the test has stopped itself stays as it is."""
    own = [psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    try:
        own[1].suspend()
        with pause_children(longest_s=60):
            while own[0].status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
        while own[0].status() == psutil.STATUS_STOPPED:
            time.sleep(0.001)
        assert own[1].status() == psutil.STATUS_STOPPED
    finally:
        for process in own:
            process.kill()
            process.wait()
