"""The example scripts go on from what they kept, and run without trainbus."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integrations.conftest import ScriptRun

pytestmark = pytest.mark.shell
EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(script: str, folder: Path, **variables: str) -> str:
    """Run an example in a folder, to its end; return its output."""
    path = EXAMPLES / script
    command = [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINBUS_") or name in variables}
    done = subprocess.run(command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_folder_alone_continues_scikit_learn(tmp_path: Path) -> None:
    outputs = {"TRAINBUS_OUTPUT_DIR": str(tmp_path / "kept")}
    first = run_script("scikit-learn/train.py", tmp_path, EPOCHS="2", **outputs)
    assert "goes on" not in first
    second = run_script("scikit-learn/train.py", tmp_path, EPOCHS="3", **outputs)
    assert [line.split(":")[0] for line in second.splitlines()] == ["goes on after epoch 2", "epoch 3"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["model.joblib"]


def test_pytorch_stops_and_continues(run: ScriptRun, tmp_path: Path) -> None:
    for last in (1, 3):
        run.start()
        if last == 1:
            run.ask_to_stop()
        names = ("LAUNCH", "OUTPUT_DIR", "RESUME_DIR", "RESUME_STEP")
        variables = {f"TRAINBUS_{name}": os.environ.get(f"TRAINBUS_{name}", "") for name in names}
        run_script("pytorch/train.py", tmp_path, TRAINBUS_PARAMS='{"epochs": 3}', **variables)
        assert run.keeps()[-1].epoch == last
    assert [line.epoch for line in run.reports()] == [1, 2, 3]


def test_the_shell_script_stops_and_continues(tmp_path: Path) -> None:
    variables = {"TRAINBUS_OUTPUT_DIR": str(tmp_path / "kept"), "TRAINBUS_JOURNAL": str(tmp_path / "journal")}
    process = subprocess.Popen(
        [str(EXAMPLES / "shell" / "train.sh")],
        env={**os.environ, **variables, "STEPS": "1000000", "STEP_S": "0.01"},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "kept" / "state").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].startswith("step ")
    assert process.returncode == 0
    step = int((tmp_path / "kept" / "state").read_text().split()[0])
    output = run_script("shell/train.sh", tmp_path, STEPS=str(step + 2), **variables)
    assert output.startswith(f"step {step + 2}: ")
    assert len((tmp_path / "journal").read_text().splitlines()) == step + 2


@pytest.mark.parametrize("script", ["pytorch/train.py", "shell/train.sh"])
def test_without_trainbus_it_is_a_script_like_any_other(script: str, tmp_path: Path) -> None:
    assert "step 20" in run_script(script, tmp_path)
