"""A pytest plugin that writes how each test ended, a JSON line each: ``-p tests.suite.outcomes --outcomes FILE``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import pytest

from tests.suite.lanes import find_lane

Result = Literal["passed", "failed", "skipped", "broken"]


@dataclass(slots=True)
class Outcome:
    """How one test ended. ``broken``: it could not even be collected."""

    test: str
    result: Result = "passed"
    #: The name of its lane; none, if it could not be collected.
    lane: str = ""
    seconds: float = 0.0
    #: What it raised, and the last lines above that.
    error: str = ""
    lines: tuple[str, ...] = ()
    #: It draws its examples (hypothesis): a second try would only hide what it found.
    is_hypothesis: bool = False

    @property
    def is_red(self) -> bool:
        return self.result in ("failed", "broken")

    @property
    def first_line(self) -> str:
        return self.error.splitlines()[0] if self.error else "no message"


class OutcomeWriter:
    """Writes an outcome when its test is over. With xdist it runs in the process that the workers report to."""

    def __init__(self, file: TextIO, terminal: pytest.TerminalReporter) -> None:
        self._file, self._terminal = file, terminal
        self._running: dict[str, Outcome] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._running.setdefault(report.nodeid, Outcome(report.nodeid))
        outcome.seconds += report.duration
        outcome.lane = find_lane(report.keywords).name
        outcome.is_hypothesis = outcome.is_hypothesis or "hypothesis" in report.keywords
        if report.failed:
            self._note_failure(outcome, report, "failed")
        elif report.skipped and outcome.result == "passed":
            outcome.result = "passed" if hasattr(report, "wasxfail") else "skipped"
            outcome.error = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        # A worker that crashed sends one report, of no phase.
        if report.when not in ("setup", "call"):
            self._write(self._running.pop(report.nodeid))

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            outcome = Outcome(report.nodeid)
            self._note_failure(outcome, report, "broken")
            self._write(outcome)

    def _note_failure(self, outcome: Outcome, report: Any, result: Result) -> None:
        if outcome.is_red:
            return  # the first failure counts, not that of the teardown after it
        lines = str(report.longrepr).rstrip().splitlines()
        crash = getattr(report.longrepr, "reprcrash", None)
        outcome.result = result
        outcome.error = crash.message if crash is not None else next((line for line in reversed(lines) if line), "")
        outcome.lines = tuple(lines[-5:])

    def _write(self, outcome: Outcome) -> None:
        if outcome.is_red:  # at once: who watches need not wait for the last test
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{outcome.result} {outcome.test}: {outcome.first_line}")
        self._file.write(json.dumps(asdict(outcome)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write what is left: tests whose process ended before they were torn down."""
        for outcome in self._running.values():
            self._write(outcome)
        self._file.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write how each test ended to this file")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        terminal: pytest.TerminalReporter = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.register(OutcomeWriter(path.open("w"), terminal), "outcome-writer")


def pytest_unconfigure(config: pytest.Config) -> None:
    writer = config.pluginmanager.get_plugin("outcome-writer")
    if writer is not None:
        writer.close()


def read_outcomes(path: Path) -> list[Outcome]:
    """Return the outcomes in a file; none if pytest did not get as far as to write it."""
    if not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
