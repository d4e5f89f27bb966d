"""The agent as the first process of a container: it has the orphans of its ranks to collect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from services.kit.ports import free_ports
from tests.kit.support import until

pytestmark = pytest.mark.shell

CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--")


@pytest.fixture
def container() -> None:
    if sys.platform != "linux" or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs namespaces of processes")


class FirstAgent:
    """An agent that waits for its bus, as process 1 of a namespace of its own."""

    def __init__(self, folder: Path) -> None:
        self.port, nowhere = free_ports(2)
        environment = {
            **os.environ,
            "TRAINBUS_NATS_URL": f"nats://127.0.0.1:{nowhere}",
            "TRAINBUS_DATA_DIR": str(folder / "data"),
            "TRAINBUS_HTTP_PORT": str(self.port),
        }
        self.log = folder / "agent.log"
        with self.log.open("wb") as log:
            command = [*CONTAINER, sys.executable, "-m", "services.worker"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    @property
    def first(self) -> psutil.Process:
        """Process 1, by its number outside."""
        (first,) = psutil.Process(self.process.pid).children()
        return first

    async def wait_until_it_runs(self) -> None:
        await until(self._answers, "the agent to start", 90)

    def _answers(self) -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
            return True
        return False

    async def leave_orphan(self) -> psutil.Process:
        """Return a process whose parent in the container has ended."""
        self._start_orphan()
        await until(lambda: bool(self._find_orphans()), "the orphan to have its new parent")
        return self._find_orphans()[0]

    def _start_orphan(self) -> None:
        inside = ["nsenter", f"--target={self.first.pid}", "--pid", "--mount", "--"]
        # It is the reader of a pipe, and ends with it.
        self._pipe, writer = os.pipe()
        subprocess.run([*inside, "sh", "-c", "exec 3<&0; cat <&3 >/dev/null &"], stdin=self._pipe, check=True)
        os.close(self._pipe)
        self.release = lambda: os.close(writer)

    def _find_orphans(self) -> list[psutil.Process]:
        return [each for each in self.first.children() if each.name() == "cat"]


@pytest.fixture
def agent(container: None, tmp_path: Path) -> Iterator[FirstAgent]:
    agent = FirstAgent(tmp_path)
    yield agent
    if agent.process.poll() is None:
        agent.first.kill()
        agent.process.wait(60)


async def test_orphans_are_collected_and_signals_arrive(agent: FirstAgent) -> None:
    await agent.wait_until_it_runs()
    orphan = await agent.leave_orphan()
    agent.release()
    await until(lambda: not psutil.pid_exists(orphan.pid), "the orphan to be collected")
    agent.first.send_signal(signal.SIGTERM)
    assert agent.process.wait(60) == 0


async def test_the_container_ends_with_the_agent_and_has_its_code(agent: FirstAgent) -> None:
    await agent.wait_until_it_runs()
    (itself,) = [each for each in agent.first.children() if "services.worker" in each.cmdline()]
    orphan = await agent.leave_orphan()
    itself.kill()
    assert agent.process.wait(60) in (128 + signal.SIGKILL, -signal.SIGKILL)
    await until(lambda: not psutil.pid_exists(orphan.pid), "what was left to be killed")
    agent.release()
