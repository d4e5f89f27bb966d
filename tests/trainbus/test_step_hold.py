"""A hold keeps a run at a step until it is released, its holder is gone, or the run must stop."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from contracts.ranks import STOP_FILE_VARIABLE
from trainbus.ranks.step_hold import StepHold, is_held, wait_while_held


def wait_in_thread(path: Path) -> threading.Thread:
    thread = threading.Thread(target=wait_while_held, args=(path,))
    thread.start()
    return thread


def test_a_run_waits_until_the_hold_is_released(tmp_path: Path) -> None:
    with StepHold(tmp_path / "hold") as hold:
        waiting = wait_in_thread(hold.path)
        assert is_held(hold.path)
        assert waiting.is_alive()
        hold.release()
        waiting.join(60)
        assert not waiting.is_alive()
    assert not is_held(tmp_path / "hold")


def test_a_run_that_is_asked_to_stop_waits_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(tmp_path / "stop.json"))
    with StepHold(tmp_path / "hold") as hold:
        waiting = wait_in_thread(hold.path)
        (tmp_path / "stop.json").write_text("{}")
        waiting.join(60)
        assert not waiting.is_alive()
        assert is_held(hold.path), "the next generation waits again"


def test_without_a_holder_nothing_waits(tmp_path: Path) -> None:
    wait_while_held(tmp_path / "of another machine")


@pytest.mark.shell
def test_a_holder_that_is_killed_holds_up_no_run(tmp_path: Path) -> None:
    script = "import sys, time, pathlib; from trainbus.ranks.step_hold import StepHold\n"
    script += "hold = StepHold(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    path = tmp_path / "hold"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_held(path)
        holder.kill()
        holder.wait()
        wait_while_held(path)
    assert path.exists()
