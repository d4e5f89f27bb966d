"""How long the first day takes: from an empty folder to a model of one's own as files, with two scripts.

    python -m loadtest.first_day

Makes a new environment, installs trainbus there from this checkout, starts a stack in a temporary folder, and submits
two scripts that know nothing of trainbus: a PyTorch loop and a scikit-learn one. Each command is timed and counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.common import report

ROOT = Path(__file__).parents[1]
COMMAND_LIMIT_S = 1800
TORCH_SCRIPT = """
import pathlib
import torch

torch.manual_seed(0)
x = torch.linspace(-3, 3, 512)[:, None]
net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
pathlib.Path("out").mkdir(exist_ok=True)
for epoch in range(1, 201):
    loss = ((net(x) - x.sin()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 50 == 0:
        print(f"epoch {epoch} loss {loss.item():.5f}", flush=True)
        torch.save(net.state_dict(), "out/sine.pt")
"""
SKLEARN_SCRIPT = """
import pathlib
import pickle
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

x_train, x_test, y_train, y_test = train_test_split(*load_breast_cancer(return_X_y=True), random_state=1)
forest = RandomForestClassifier(50, random_state=1).fit(x_train, y_train)
print(f"accuracy {forest.score(x_test, y_test):.4f}")
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/forest.pkl").write_bytes(pickle.dumps(forest))
"""
LOAD_SINE = "import torch; print(sorted(torch.load('got-sine/sine.pt')))"
LOAD_FOREST = "import pickle; print(pickle.load(open('got-forest/forest.pkl', 'rb')))"


@dataclass(frozen=True, slots=True)
class Step:
    """A command that a new user types, and how long it took."""

    command: str
    seconds: float


class NewUser:
    """Somebody with a shell in a folder, and an environment with trainbus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[Step] = []

    def type(self, *command: str, shown: str = "") -> None:
        """Run a command, and keep its time.

        Raises:
            RuntimeError: it failed; with its output.
        """
        bins = self.folder / ".venv" / "bin"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINBUS_", "VIRTUAL_ENV"))}
        env = {**kept, "PATH": f"{bins}:{kept['PATH']}", "XDG_STATE_HOME": str(self.folder / "state")}
        start = time.perf_counter()
        # An absolute path, because the parent's PATH decides which program a bare name is.
        program = str(bins / command[0]) if (bins / command[0]).exists() else command[0]
        done = subprocess.run(
            [program, *command[1:]], cwd=self.folder, env=env, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )
        took = time.perf_counter() - start
        line = shown or " ".join(f"'{part}'" if " " in part else part for part in command)
        if done.returncode:
            raise RuntimeError(f"{line} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        self.steps.append(Step(line, round(took, 2)))
        print(f"{took:7.1f} s  {line}", flush=True)


def live_the_first_day(folder: Path) -> list[Step]:
    """Return the commands from an empty folder to two models in it."""
    user = NewUser(folder)
    for name, script in (("sine", TORCH_SCRIPT), ("forest", SKLEARN_SCRIPT)):
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(script)
    user.type(sys.executable, "-m", "venv", ".venv", shown="python -m venv .venv")
    user.type("python", "-m", "pip", "install", "-q", f"{ROOT}[all]", shown="pip install 'trainbus[all]'")
    user.type("trainbus", "up", "-d")
    try:
        for name, load in (("sine", LOAD_SINE), ("forest", LOAD_FOREST)):
            keep = ("--command", "python train.py", "--env", "TRAINBUS_OUTPUT_DIR=out")
            user.type("trainbus", "submit", name, *keep, "--follow")
            user.type("trainbus", "fetch", name, f"got-{name}")
            user.type("python", "-c", load)
    finally:
        user.type("trainbus", "down")
    return user.steps


def summarize(steps: list[Step]) -> dict[str, float]:
    """Return the figures: to the first model (the commands up to the first that loads one), and for the second."""
    first = next(place for place, step in enumerate(steps) if step.command.startswith("python -c")) + 1
    second = steps[first:-1]
    return {
        "commands_to_first_model": first,
        "seconds_to_first_model": round(sum(step.seconds for step in steps[:first]), 1),
        "seconds_without_install": round(sum(step.seconds for step in steps[2:first]), 1),
        "commands_for_second_model": len(second),
        "seconds_for_second_model": round(sum(step.seconds for step in second), 1),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="first-day-") as folder:
        steps = live_the_first_day(Path(folder))
    figures = summarize(steps)
    rows = [(name.replace("_", " "), f"{value:g}", "") for name, value in figures.items()]
    look_ups = [
        "how to name the folder of which files are kept: TRAINBUS_OUTPUT_DIR (quickstart, or the notice of a run)"
    ]
    report("first-day", rows, {"figures": figures, "look_ups": look_ups, "commands": [asdict(step) for step in steps]})


if __name__ == "__main__":
    main()
