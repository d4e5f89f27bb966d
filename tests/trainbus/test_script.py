"""The calls of scripts: what they write into the journal, and that they are harmless outside a run."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainbus
from contracts.ranks import JOURNAL_LINE, STOP_SEEN_NAME, ArtifactLine, JournalLine, KeepLine, MetricsLine
from trainbus import script

VARIABLES = ("LAUNCH", "OUTPUT_DIR", "RESUME_DIR", "RESUME_STEP", "PARAMS")


@pytest.fixture(autouse=True)
def _fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "_state", script._Process())
    for name in VARIABLES:
        monkeypatch.delenv(f"TRAINBUS_{name}", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "g1"
    (folder / "outputs").mkdir(parents=True)
    monkeypatch.setenv("TRAINBUS_LAUNCH", str(folder / "launch.json"))
    monkeypatch.setenv("TRAINBUS_OUTPUT_DIR", str(folder / "outputs"))
    return folder


def read_lines(folder: Path, rank: int = 0) -> list[JournalLine]:
    return [JOURNAL_LINE.validate_json(line) for line in (folder / f"rank_{rank}.jsonl").read_bytes().splitlines()]


def test_report_appends_to_the_journal_of_its_rank(generation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    trainbus.report({"validation/loss": 0.5}, step=2, epoch=1, total_steps=9, lr=0.1, bad=float("nan"))
    (line,) = read_lines(generation, 3)
    assert isinstance(line, MetricsLine)
    assert (line.step, line.epoch, line.total_steps) == (2, 1, 9)
    assert line.values == pytest.approx({"validation/loss": 0.5, "lr": 0.1, "bad": float("nan")}, nan_ok=True)


def test_report_without_a_step_counts_on_from_the_resumed_one(
    generation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINBUS_RESUME_STEP", "7")
    trainbus.report(loss=1.0)
    trainbus.report(loss=0.9)
    trainbus.report(loss=0.8, epoch=20)
    assert [line.step for line in read_lines(generation) if isinstance(line, MetricsLine)] == [8, 9, 20]


def test_what_a_run_begins_with_is_no_state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainbus.init_dir() is None
    monkeypatch.setenv("TRAINBUS_INIT_DIR", str(tmp_path))
    assert (trainbus.init_dir(), trainbus.resume(), trainbus.resume_step()) == (tmp_path, None, 0)


def test_checkpoint_copies_before_it_returns(generation: Path, tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").write_text("first")
    trainbus.checkpoint("ckpt.pt", 3, {"accuracy": 0.5, "bad": float("inf")})
    (tmp_path / "ckpt.pt").write_text("second, torn")
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "below/weights").write_text("w")
    trainbus.checkpoint(folder)
    first, second = read_lines(generation)
    assert isinstance(first, KeepLine)
    assert isinstance(second, KeepLine)
    assert (first.step, first.metrics) == (3, {"accuracy": 0.5, "bad": float("inf")})
    assert (second.step, second.metrics) == (None, None)
    assert (Path(first.path) / "ckpt.pt").read_text() == "first"
    assert (Path(second.path) / "below/weights").read_text() == "w"
    assert Path(first.path).parent == generation / "kept"


def test_a_failed_copy_keeps_nothing(generation: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no 'nothing' to keep"):
        trainbus.checkpoint("nothing")
    assert not (generation / "rank_0.jsonl").exists()


@pytest.mark.parametrize(("local_rank", "keeps"), [("0", True), ("1", False)])
def test_one_rank_of_each_node_keeps(
    generation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: str, keeps: bool
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    trainbus.checkpoint("only-on-the-node-of-rank-0.pt")
    assert not (generation / "kept").exists()
    (tmp_path / "ckpt.pt").write_text("x")
    trainbus.checkpoint("ckpt.pt", step=3)
    assert (generation / "kept").exists() == keeps
    if keeps:
        (line,) = read_lines(generation, 5)
        assert isinstance(line, KeepLine)
        assert line.step == 3


def test_artifact_lies_in_the_output_folder(generation: Path, tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_text("plot")
    trainbus.artifact("plot.png", "plots/loss.png")
    (line,) = read_lines(generation)
    assert isinstance(line, ArtifactLine)
    assert line.path == "plots/loss.png"
    assert (generation / "outputs/plots/loss.png").read_text() == "plot"
    with pytest.raises(ValueError, match="without"):
        trainbus.artifact("plot.png", "../outside")


def test_what_there_is_to_resume(generation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (trainbus.resume(), trainbus.resume_step()) == (None, 0)
    monkeypatch.setenv("TRAINBUS_RESUME_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINBUS_RESUME_STEP", "12")
    assert (trainbus.resume(), trainbus.resume_step()) == (tmp_path, 12)


def test_params_come_from_the_environment_or_the_launch(generation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (generation / "launch.json").write_text(json.dumps({"spec": {"params": {"lr": 0.1}}}))
    assert trainbus.params() == {"lr": 0.1}
    monkeypatch.setenv("TRAINBUS_PARAMS", '{"lr": 0.2}')
    assert trainbus.params() == {"lr": 0.2}


def test_should_stop_sees_the_stop_file(generation: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert not trainbus.should_stop()
        (generation / "stop.json").write_text("{}")
        assert trainbus.should_stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_should_stop_leaves_a_mark_in_its_own_generation_once_the_answer_is_yes(
    generation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    mark = generation / STOP_SEEN_NAME
    try:
        assert not trainbus.should_stop()
        (generation / "stop.json").write_text("{}")
        assert not mark.exists()
        assert trainbus.should_stop()
        assert mark.exists()
        (tmp_path / "g2").mkdir()
        monkeypatch.setenv("TRAINBUS_LAUNCH", str(tmp_path / "g2/launch.json"))
        monkeypatch.setattr(script, "_state", script._Process())
        assert not trainbus.should_stop()
        assert not (tmp_path / "g2" / STOP_SEEN_NAME).exists()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_should_stop_answers_although_its_mark_cannot_be_written(generation: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        (generation / "stop.json").write_text("{}")
        (generation / STOP_SEEN_NAME).mkdir()
        assert trainbus.should_stop()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_should_stop_turns_sigterm_into_a_request(tmp_path: Path) -> None:
    code = (
        "import os, signal, trainbus; trainbus.should_stop(); os.kill(os.getpid(), 15); print(trainbus.should_stop())"
    )
    root = Path(trainbus.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert found.stdout.strip() == "True"


def test_the_module_of_report_does_not_replace_the_function() -> None:
    importlib.import_module("trainbus.report")
    assert callable(trainbus.report)


def test_every_call_is_harmless_outside_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ckpt.pt").write_text("x")
    trainbus.report(step=1, loss=0.25)
    trainbus.checkpoint("ckpt.pt", step=1)
    trainbus.artifact("ckpt.pt")
    assert (trainbus.resume(), trainbus.resume_step(), trainbus.params()) == (None, 0, {})
    assert trainbus.output_dir() == Path("outputs")
    out, err = capfd.readouterr()
    assert out == "step 1: loss=0.25\n"
    assert err.splitlines() == ["trainbus: ckpt.pt is not kept: this script was not started by trainbus"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt.pt", "outputs"]
    assert os.listdir(tmp_path / "outputs") == []
