"""A peer is lost under NCCL, whose collectives wait for it: the agent's word ends them, and the state survives."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from contracts.ranks import CheckpointLine, EndedLine, Launch, PeerLostLine, StartedLine
from tests.trainbus.support import FakeAgent, Warm, exact_dataset, journal, write_exact_code, write_launch
from tests.trainbus.test_checkpoint_memory import HELD_TASK, digests, spec_of, start
from tests.trainbus.test_devices import fork_ranks
from trainbus.data.dataset import Dataset
from trainbus.ranks.step_hold import StepHold

pytestmark = pytest.mark.shell


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return exact_dataset(tmp_path_factory.mktemp("peers") / "data")


def test_a_survivor_of_nccl_keeps_its_state(warm: Warm, tmp_path: Path, dataset: Dataset) -> None:
    whole = start(warm, tmp_path / "whole", dataset, 2, 1, tmp_path / "none")
    memory = tmp_path / "memory"
    code = write_exact_code(tmp_path / "code", held_task=HELD_TASK)
    spec = spec_of().model_copy(update={"task": "held_task:HeldTask"})

    def launch(generation: int) -> Path:
        path = write_launch(tmp_path / f"g{generation}", spec, dataset, code, world_size=2, generation=generation)
        launch = Launch.model_validate_json(path.read_bytes())
        path.write_text(launch.model_copy(update={"memory_folder": memory}).model_dump_json())
        return path

    first = launch(1)
    agent = FakeAgent(Launch.model_validate_json(first.read_bytes()).socket)
    try:
        with StepHold(tmp_path / "hold") as hold:
            ranks = fork_ranks(first.parent, first, 2, 2, HELD_BY=str(hold.path))
            agent.wait_for_hellos(2)
            path = first.parent / "rank_0.jsonl"
            while not any(isinstance(line, CheckpointLine) for line in journal(path.parent)):
                time.sleep(0.01)
            assert ranks[1].pid is not None
            os.kill(ranks[1].pid, signal.SIGKILL)
            ranks[1].join()
        agent.send(PeerLostLine().model_dump())
        ranks[0].join()
    finally:
        agent.close()
    assert ranks[0].exitcode == 1
    touches = json.loads((first.parent / "touches_0.json").read_text())
    assert sum(count for what, *_, count in touches if what == "abort") == 1
    ended = list(journal(first.parent))[-1]
    assert isinstance(ended, EndedLine)
    assert "a peer is gone" in ended.error
    (left,) = (path.name for path in (memory / "g1").iterdir() if not path.name.startswith("."))

    second = launch(2)
    for process in fork_ranks(second.parent, second, 2, 2):
        process.join()
    started = next(line for line in journal(second.parent) if isinstance(line, StartedLine))
    assert (started.resumed_from, started.exactness, started.step) == ("memory", "exact", int(left[5:13]))
    assert whole.wait() == [0, 0], whole.logs()
    assert digests(second.parent) == digests(tmp_path / "whole")
