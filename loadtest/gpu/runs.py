"""Real ranks on the device: undisturbed, killed, preempted and re-sliced runs must end with one state."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from contracts.ranks import EXIT_STOPPED, CheckpointLine, Launch, MetricsLine, StartedLine
from contracts.spec.run import RunSpec
from loadtest.gpu.common import FROM_TWO, KILLED, PREEMPTED, TO_TWO, Row, Sizes
from tests.trainbus import exact_tasks
from tests.trainbus.support import Gang, Warm, exact_dataset, journal, request, whole_checkpoint, write_launch
from trainbus.ranks.step_hold import StepHold

CODE = Path(exact_tasks.__file__).parent
POLL_S = 0.005
#: Where a disturbed run waits for what disturbs it, as a part of its steps.
HELD_AT = 0.5
#: The ranks of the two generations, and the signal that ends the first.
DISTURBED_BY = {
    KILLED: ((1, 1), signal.SIGKILL),
    PREEMPTED: ((1, 1), signal.SIGTERM),
    FROM_TWO: ((2, 1), signal.SIGTERM),
    TO_TWO: ((1, 2), signal.SIGTERM),
}


class Runs:
    """Starts generations of runs on one device: all ranks see the same one."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder, self._sizes = folder, sizes
        self._warm = Warm(folder)
        self._dataset = exact_dataset(folder / "data")
        self._count = 0

    def close(self) -> None:
        self._warm.process.terminate()
        self._warm.process.wait()

    def measure(self) -> list[Row]:
        rows = []
        for task, precisions in self._sizes.precisions.items():
            for precision in precisions:
                rows += self._measure(task, precision)
        return rows

    def _measure(self, task: str, precision: str) -> list[Row]:
        name, spec = f"{task}, {precision}", self._spec(task, precision)
        whole = self._finish(self._start(spec, 1, 1))
        expected = _digests(whole)
        rows = [Row(name, _exactness(whole), "exact", _exactness(whole) == "exact")]
        for how in self._sizes.disturbances[task]:
            worlds, number = DISTURBED_BY[how]
            again, lost_s = self._disturb(spec, worlds, number)
            found = _digests(again)
            equal = sum(found.get(key) == expected[key] for key in expected)
            measured = f"{equal} of {len(expected)} digests equal"
            rows.append(Row(f"{name}, {how}", measured, "all", found == expected))
            if number == signal.SIGKILL:
                rows.append(Row(f"{name}, SIGKILL to next step", f"{lost_s:.2f} s", "0.5 s and loading"))
        return rows

    def _disturb(self, spec: RunSpec, worlds: tuple[int, int], number: int) -> tuple[Path, float]:
        """End the first generation by a signal in the middle; return the second one's folder, and how long it took."""
        hold = self._folder / f"hold_{self._count}"
        memory = self._folder / f"memory_{self._count}"
        with StepHold(hold):
            gang = self._start(spec, worlds[0], 1, memory=memory, HELD_BY=str(hold))
            while not _has_checkpoint(gang.folder):
                time.sleep(POLL_S)
            for pid in gang.pids:
                os.kill(pid, number)
            killed_at = time.time()
        codes = gang.wait()
        assert 0 not in codes, gang.logs()
        assert number != signal.SIGTERM or codes == [EXIT_STOPPED] * worlds[0], gang.logs()
        resume = whole_checkpoint(gang.folder)
        folder = self._finish(self._start(spec, worlds[1], 2, memory=memory, resume=resume))
        started = next(line for line in journal(folder) if isinstance(line, StartedLine))
        stepped = next(line for line in journal(folder) if isinstance(line, MetricsLine) and line.step > started.step)
        return folder, stepped.time - killed_at

    def _spec(self, task: str, precision: str) -> RunSpec:
        return request(
            task=f"exact_tasks:Held{task}",
            params={"held_at": int(HELD_AT * self._sizes.steps)},
            training={
                "max_steps": self._sizes.steps,
                "epochs": None,
                "global_batch": 24,
                "logical_ranks": 4,
                "precision": precision,
                "checkpoint_at_steps": [self._sizes.steps // 4],
                "checkpoint_every_steps": 10**6,
                "validate_every_steps": 10**6,
                "log_every_steps": 1,
                "seed": 3,
            },
        )

    def _start(
        self, spec: RunSpec, world_size: int, generation: int, *, memory: Path | None = None,
        resume: Path | None = None, **env: str,
    ) -> Gang:  # fmt: skip
        self._count += 1
        folder = self._folder / f"run_{self._count}"
        path = write_launch(
            folder, spec, self._dataset, CODE, world_size=world_size, generation=generation, resume_folder=resume
        )
        if memory is not None:
            memory.mkdir(exist_ok=True)
            launch = Launch.model_validate_json(path.read_bytes())
            path.write_text(launch.model_copy(update={"memory_folder": memory}).model_dump_json())
        env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], **env}
        return Gang(self._warm, folder, path, world_size, **env)

    @staticmethod
    def _finish(gang: Gang) -> Path:
        codes = gang.wait()
        assert codes == [0] * len(codes), gang.logs()
        return gang.folder


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "rank_0.jsonl").exists() and any(isinstance(line, CheckpointLine) for line in journal(folder))


def _digests(folder: Path) -> dict[str, str]:
    parts: list[dict[str, Any]] = [json.loads(part.read_text()) for part in whole_checkpoint(folder).glob("digests-*")]
    return {name: digest for part in parts for name, digest in part.items()}


def _exactness(folder: Path) -> str:
    return next(line.exactness for line in journal(folder) if isinstance(line, StartedLine))
