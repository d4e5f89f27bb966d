"""The demo's code package: the example's project, and two tasks of the demo's own beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from trainbus.client.package import CodePackage, pack_project

#: The example's folder in a checkout.
EXAMPLE = Path(__file__).parents[1] / "digits"

#: Waits at steps that the demo names, so that what is shown of a run depends on no machine's speed.
HELD_TASK = "held_task:HeldDigits"
#: By the path of a hold, the share of the steps at which the run waits for it.
HOLDS_VARIABLE = "DEMO_HOLDS"
HELD_SOURCE = f'''"""Digits whose training waits at some of its steps for the demo."""

import json
import os

from task import Digits

from trainbus.ranks.step_hold import wait_at


class HeldDigits(Digits):
    def schedule(self, optimizer, total_steps):
        self.steps, self.total_steps = super().schedule(optimizer, total_steps), total_steps
        return self.steps

    def loss(self, model, batch):
        if model.training:
            holds = json.loads(os.environ.get("{HOLDS_VARIABLE}", "{{}}"))
            wait_at(self.steps.last_epoch / self.total_steps, holds)
        return super().loss(model, batch)
'''

#: Works where it is trained, and nowhere else.
BROKEN_TASK = "broken_task:Broken"
BROKEN_SOURCE = '''"""Digits whose predictions need a file that only training has."""

import os
from pathlib import Path

from task import Digits


class Broken(Digits):
    def predict(self, model, batch):
        Path(os.environ.get("TRAINBUS_LAUNCH", "launch.json")).read_bytes()
        return super().predict(model, batch)
'''


def pack_demo_project() -> CodePackage:
    """Pack the example with the demo's tasks beside its own."""
    with tempfile.TemporaryDirectory() as folder:
        for path in EXAMPLE.glob("*.py"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        for task, source in ((HELD_TASK, HELD_SOURCE), (BROKEN_TASK, BROKEN_SOURCE)):
            (Path(folder) / f"{task.partition(':')[0]}.py").write_text(source)
        return pack_project(Path(folder))


def describe_holds(holds: dict[Path, float]) -> dict[str, str]:
    """Return the environment of a run that waits for ``holds``, each at a share of its steps."""
    return {HOLDS_VARIABLE: json.dumps({str(path): share for path, share in holds.items()})}
