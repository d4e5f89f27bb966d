"""A run's folder for scripts that a test runs in its own process: stop it, and start it again from what it kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from contracts.ranks import JOURNAL_LINE, JournalLine, KeepLine, MetricsLine
from trainbus import script


@dataclass
class ScriptRun:
    """The generations of a run, each a start of the script, as a node's agent would make them."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    generations: list[Path] = field(default_factory=list)

    def start(self) -> None:
        """Begin a generation: from the last kept checkpoint, if there is one."""
        keeps = self.keeps()
        generation = self.folder / f"g{len(self.generations) + 1}"
        (generation / "outputs").mkdir(parents=True)
        self.generations.append(generation)
        self.monkeypatch.setattr(script, "_state", script._Process())
        self.monkeypatch.setenv("TRAINBUS_LAUNCH", str(generation / "launch.json"))
        self.monkeypatch.setenv("TRAINBUS_OUTPUT_DIR", str(generation / "outputs"))
        if keeps:
            self.monkeypatch.setenv("TRAINBUS_RESUME_DIR", keeps[-1].path)
            self.monkeypatch.setenv("TRAINBUS_RESUME_STEP", str(keeps[-1].step))

    def ask_to_stop(self) -> None:
        """Ask the script to stop, as the agent does."""
        (self.generations[-1] / "stop.json").write_text("{}")

    def lines(self) -> list[JournalLine]:
        """Return the journal of all generations."""
        journals = [generation / "rank_0.jsonl" for generation in self.generations]
        return [
            JOURNAL_LINE.validate_json(line)
            for journal in journals
            if journal.exists()
            for line in journal.read_bytes().splitlines()
        ]

    def keeps(self) -> list[KeepLine]:
        """Return the checkpoints that were kept."""
        return [line for line in self.lines() if isinstance(line, KeepLine)]

    def reports(self) -> list[MetricsLine]:
        """Return the metrics that were reported."""
        return [line for line in self.lines() if isinstance(line, MetricsLine)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptRun]:
    for name in ("LAUNCH", "OUTPUT_DIR", "RESUME_DIR", "RESUME_STEP", "PARAMS"):
        monkeypatch.delenv(f"TRAINBUS_{name}", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield ScriptRun(tmp_path / "run", monkeypatch)
    signal.signal(signal.SIGTERM, handler)
