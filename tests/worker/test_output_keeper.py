"""What is kept of a script's folder at the moments between its writes, its reports and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from contracts.events.run import Member, RunPlaced
from contracts.ranks import ArtifactLine, MetricsLine, json_line
from contracts.spec.run import RunSpec
from services.kit.kept_files import unpack_files
from services.worker.checkpoints import output_folder
from services.worker.checkpoints.output_folder import OutputKeeper
from services.worker.core.journal import JournalSource
from services.worker.generation import rank_group
from services.worker.generation.rank_group import RankGroup
from services.worker.generation.requests import GenerationRequests
from services.worker.launch.executor import WRAPPER, ProcessExecutor
from services.worker.launch.processes import RankProcess
from services.worker.ranks.journal_follower import JournalFollower
from services.worker.ranks.open_files import ScriptEndedError, find_written_files
from services.worker.settings import WorkerSettings
from tests.worker.conftest import until

pytestmark = pytest.mark.shell

#: Writes a line once it holds its file open, and waits.
HOLDS_FILE = "import sys, time; file = open(sys.argv[1], 'w'); print('open', flush=True); time.sleep(600)"
WAITS = "print('ready', flush=True); import time; time.sleep(600)"


class Script:
    """A script below its wrapper."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "TRAINBUS_EXIT": str(folder / "rank_0.exit")}
        self._wrapper = subprocess.Popen(
            ["/bin/sh", "-c", WRAPPER, "sh", "", sys.executable, "-c", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._wrapper.stdout is not None
        self._wrapper.stdout.readline()
        self.pid = self._wrapper.pid
        (self.process,) = psutil.Process(self.pid).children()

    def kill_before_its_wrapper_knows(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        while psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        self.process.kill()
        while self.process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)

    def close(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._wrapper.communicate()


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Any]:
    started: list[Script] = []

    def start(*arguments: str) -> Script:
        started.append(Script(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def follower(tmp_path: Path) -> JournalFollower:
    async def publish(fact: Any) -> None:
        raise AssertionError("nothing is to be published")

    return JournalFollower(JournalSource("r1", 1, "n1"), (0,), tmp_path, publish, time.time, interval_s=1.0)


def keeper(tmp_path: Path, follower: JournalFollower, *pids: int, peers: Any = None, **changes: Any) -> OutputKeeper:
    member = Member(node_id="n1", slots=(0,), ranks=(0,))
    spec = RunSpec.model_validate({"name": "script", "command": ["python", "train.py"]})
    placed = RunPlaced(
        run_id="r1",
        generation=1,
        members=(member,),
        world_size=1,
        spec=spec,
        decided_at_sequence=0,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    settings = WorkerSettings(node_id="n1", **{"output_interval_s": 0.01, "output_settle_s": 60.0, **changes})
    outputs = tmp_path / "outputs"
    outputs.mkdir(exist_ok=True)
    return OutputKeeper(settings, placed, member, tmp_path, outputs, follower, lambda: list(pids), peers)


def write_report(folder: Path) -> None:
    with (folder / "rank_0.jsonl").open("ab") as journal:
        journal.write(json_line(MetricsLine(step=20, epoch=2, samples_consumed=64, values={"loss": 0.5})))
        journal.write(json_line(ArtifactLine(path="state")))


async def end(keeper: OutputKeeper, **arguments: Any) -> None:
    at_end = {"ended_at": time.time(), "is_complete": True, "stopped_at": None, "written_at_stop": None}
    await keeper.finish(**{**at_end, **arguments})


@pytest.mark.parametrize("moment", ["end", "poll"])
async def test_a_copy_has_the_step_that_was_reported_before_the_file(
    tmp_path: Path, follower: JournalFollower, scripts: Any, moment: str
) -> None:
    """The follower has not read the journal since the lines were written."""
    kept = keeper(tmp_path, follower, scripts(WAITS).pid)
    write_report(tmp_path)
    (tmp_path / "outputs/state").write_text("2")
    os.utime(tmp_path / "outputs/state", (1.0, 1.0))
    if moment == "end":
        await end(kept)
    else:
        await kept._poll()
    (line,) = follower.state.snapshots.values()
    assert (line.step, line.epoch, line.samples_consumed, line.metrics) == (20, 2, 64, {"loss": 0.5})
    layout = unpack_files(Path(line.folder))
    assert layout is not None
    assert layout.artifacts == ("state",)
    assert follower.state.ranks[0].step is None


async def test_without_a_report_there_is_no_step(tmp_path: Path, follower: JournalFollower) -> None:
    kept = keeper(tmp_path, follower)
    (tmp_path / "outputs/state").write_text("2")
    await end(kept)
    (line,) = follower.state.snapshots.values()
    assert (line.step, line.step_is_count, line.epoch) == (1, True, 0)


async def test_a_second_copy_at_one_step_has_a_version(tmp_path: Path, follower: JournalFollower) -> None:
    kept = keeper(tmp_path, follower)
    write_report(tmp_path)
    for content in ("2", "changed"):
        (tmp_path / "outputs/state").write_text(content)
        await end(kept)
    assert [(line.step, line.step_is_count) for line in follower.state.snapshots.values()] == [(20, False), (21, True)]


def test_the_files_of_a_script_and_its_children_are_found(tmp_path: Path, scripts: Any) -> None:
    script = scripts(HOLDS_FILE, str(tmp_path / "state"))
    assert str(tmp_path / "state") in (find_written_files([script.pid]) or ())


async def test_a_file_of_a_killed_script_is_not_whole(tmp_path: Path, follower: JournalFollower, scripts: Any) -> None:
    """Nothing has the file open, and the wrapper is still alive."""
    (tmp_path / "outputs").mkdir()
    script = scripts(HOLDS_FILE, str(tmp_path / "outputs/state"))
    kept = keeper(tmp_path, follower, script.pid)
    script.kill_before_its_wrapper_knows()
    with pytest.raises(ScriptEndedError):
        find_written_files([script.pid])
    await kept._poll()
    assert follower.state.snapshots == {}
    await end(kept, is_complete=False)
    assert follower.state.snapshots == {}


async def test_a_file_is_not_whole_without_processes(tmp_path: Path, follower: JournalFollower) -> None:
    kept = keeper(tmp_path, follower)
    (tmp_path / "outputs/state").touch()
    await kept._poll()
    assert follower.state.snapshots == {}


async def test_a_file_that_is_written_twice_in_a_tick_is_not_whole(
    tmp_path: Path, follower: JournalFollower, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keeper(tmp_path, follower, scripts(WAITS).pid)
    monkeypatch.setattr(output_folder, "stamps_every_write", lambda folder: False)
    state = tmp_path / "outputs/state"
    state.touch()
    clock = output_folder.scan(tmp_path / "outputs", 9).clock_ns
    os.utime(state, ns=(clock + 10**12, clock + 10**12))
    await kept._poll()
    assert follower.state.snapshots == {}
    os.utime(state, ns=(clock - 1, clock - 1))
    await kept._poll()
    assert len(follower.state.snapshots) == 1


async def test_a_script_is_held_while_its_files_are_listed(
    tmp_path: Path, scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could begin to write a file after the listing and before the signal that ends it."""
    script = scripts(HOLDS_FILE, str(tmp_path / "state"))
    requests = GenerationRequests(tmp_path)
    group = RankGroup(ProcessExecutor(), tmp_path, requests, None, time.time, kill_after_s=1.0)  # type: ignore[arg-type]
    wrapper = psutil.Process(script.pid)
    group._processes = [RankProcess(0, script.pid, wrapper.create_time(), psutil.boot_time())]
    listings = []

    def find(pids: list[int]) -> set[str] | None:
        listings.append({wrapper.status(), script.process.status()})
        return find_written_files(pids)

    monkeypatch.setattr(rank_group, "find_written_files", find)
    await group._terminate_scripts()
    assert listings == [{psutil.STATUS_STOPPED}]
    assert str(tmp_path / "state") in (group.written_files or ())
    psutil.wait_procs([script.process], timeout=60)
    assert not script.process.is_running() or script.process.status() == psutil.STATUS_ZOMBIE


async def test_copies_become_rarer_the_longer_a_script_runs(
    tmp_path: Path, follower: JournalFollower, scripts: Any
) -> None:
    kept = keeper(tmp_path, follower, scripts(WAITS).pid, output_max_interval_s=50.0)
    kept._began_at -= 600
    copying = asyncio.create_task(kept.run())
    (tmp_path / "outputs/state").write_text("1")
    await until(lambda: kept._next_at - time.monotonic() > 1, 60)
    copying.cancel()
    assert 25 < kept._next_at - time.monotonic() < 40
    (tmp_path / "outputs/state").write_text("22")
    await kept._poll()
    assert list(follower.state.snapshots) == [1]
    # What is not copied yet is kept at the end, however it ends.
    follower.state.snapshots.clear()
    await end(kept, is_complete=False, stopped_at=time.time(), written_at_stop=set())
    assert list(follower.state.snapshots) == [2]
