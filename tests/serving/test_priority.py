"""A process that loads a version has a low priority until it answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from services.serving import priority
from services.serving.process import ModelProcess
from services.serving.version import ModelHost
from tests.serving.conftest import House, wait_until

pytestmark = [
    pytest.mark.shell,
    pytest.mark.skipif(not priority.can_raise(), reason="this user may not raise the priority of a process"),
]


def niceness_of(pid: int) -> set[int]:
    """Return the niceness of each thread of a process, and none of one that has ended."""
    return {os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in Path(f"/proc/{pid}/task").iterdir()}


async def test_a_version_is_loaded_at_a_low_priority(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[int, set[int]]] = []
    take_up = ModelHost.take_up

    def note(host: ModelHost) -> None:
        assert host.process is not None
        loaded.append((host.process.pid, niceness_of(host.process.pid)))
        take_up(host)

    monkeypatch.setattr(ModelHost, "take_up", note)
    await house.deploy("r1")
    ((pid, while_loading),) = loaded
    assert while_loading == {priority.LOADING_NICENESS}
    assert niceness_of(pid) == {priority.ANSWERING_NICENESS}


async def test_one_that_takes_the_place_of_a_crashed_one_is_not_held_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ModelProcess] = []
    start = ModelProcess.start

    async def note(*arguments: Any) -> ModelProcess:
        started.append(process := await start(*arguments))
        return process

    monkeypatch.setattr(ModelProcess, "start", note)
    await house.deploy("r1")
    started[0].kill("the test ended it")
    await wait_until(lambda: len(started) == 2, "another process")
    assert niceness_of(started[1].pid) == {priority.ANSWERING_NICENESS}
