"""The output folder of a script: what lies in it is kept, and lies in it again on the next node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.events.checkpoint import CheckpointCommitted, CheckpointStaged
from contracts.events.run import CheckpointRef, RunExited, RunLog, RunReleased, RunStarted, RunStopping
from contracts.predictions import Predictions
from services.kit.kept_files import unpack_files
from services.worker.generation.rank_group import RankGroup
from tests.worker.conftest import World, package

pytestmark = pytest.mark.shell

#: Saves the epoch in place, goes on from the saved one, holds at ``hold`` until it is stopped or killed. Before that
#: epoch it saves nothing: what is kept of it is one state.
EPOCHS = """
import json, os, pathlib, sys, time
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
last, hold = int(sys.argv[1]), int(sys.argv[2])
state = out / "state.json"
epoch = json.loads(state.read_text())["epoch"] if state.exists() else 0
print("begins at", epoch, "resumes", os.environ.get("TRAINBUS_RESUME_STEP"), flush=True)
while epoch < last:
    epoch += 1
    if epoch < hold:
        continue
    with open(os.environ["TRAINBUS_JOURNAL"], "a") as journal:
        values = {"validation/loss": 1 / epoch}
        print(json.dumps({"kind": "metrics", "step": 10 * epoch, "epoch": epoch, "values": values}), file=journal)
    state.write_text(json.dumps({"epoch": epoch}))
    while epoch == hold:
        time.sleep(0.02)
"""


@pytest.fixture
def worker_settings(worker_settings: Any) -> Any:
    return worker_settings.model_copy(update={"output_interval_s": 0.05, "output_settle_s": 0.2})


@pytest_asyncio.fixture
async def commits(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.commit_all())
    yield
    task.cancel()


async def place(world: World, script: str, *arguments: str, **fields: Any) -> None:
    await world.place(command=["python", "-c", script, *arguments], **fields)


async def lines(world: World, rank: int = 0) -> list[str]:
    facts = [each.event for each in await world.bus.read_history(f"log.r1.{rank}", stream="LOGS")]
    return [line for fact in facts if isinstance(fact, RunLog) for line in fact.lines]


async def last_checkpoint(world: World) -> CheckpointRef:
    """The commit of what was staged last; it may come after the report of the run's end."""
    staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)]
    committed = await world.wait_for(CheckpointCommitted, count=len(staged))
    assert isinstance(committed, CheckpointCommitted)
    return committed.checkpoint


async def fetch(world: World, agent: Any, folder: Path) -> dict[str, str]:
    """The last kept files, as a node reads them."""
    content = json.loads(await world.objects.get((await last_checkpoint(world)).uri))
    for file in content["files"]:
        target = folder / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join([await world.objects.get(chunk["uri"]) for chunk in file["chunks"]]))
    unpack_files(folder)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def test_a_script_keeps_what_it_leaves(world: World, agent: Any, commits: None, tmp_path: Path) -> None:
    await agent()
    await place(world, EPOCHS, "3", "0")
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.notice) == ("succeeded", "")
    staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)][-1]
    assert (staged.step, staged.epoch, staged.is_whole) == (30, 3, True)
    assert staged.metrics == {"validation/loss": pytest.approx(1 / 3)}
    assert await fetch(world, agent, tmp_path / "f") == {"state.json": '{"epoch": 3}'}


async def test_what_has_settled_is_kept_while_the_script_runs(world: World, agent: Any, commits: None) -> None:
    await agent()
    await place(world, EPOCHS, "3", "2")
    staged = await world.wait_for(CheckpointStaged)
    assert staged.step == 20
    # Nothing changes: nothing is kept again.
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60))
    released = await world.wait_for(RunReleased)
    assert released.clean
    assert (await last_checkpoint(world)).step == 20


@pytest.mark.parametrize("how", ["killed", "preempted"])
async def test_the_next_attempt_finds_the_last_kept_state_on_another_node(
    world: World, agent: Any, commits: None, how: str
) -> None:
    await agent()
    await place(world, EPOCHS, "4", "2")
    await world.wait_for(CheckpointStaged)
    if how == "killed":
        processes = json.loads((world.settings.data_dir / "runs/r1/g1/processes.json").read_text())
        os.killpg(processes[0]["pid"], signal.SIGKILL)
        exited = await world.wait_for(RunExited)
        assert "SIGKILL" in exited.reason
    else:
        await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
        assert (await world.wait_for(RunReleased)).clean
    await agent(node_id="n2", data_dir=world.settings.data_dir / "n2")
    world.settings = world.settings.model_copy(update={"node_id": "n2"})
    await place(world, EPOCHS, "4", "0", generation=2, resume=await last_checkpoint(world))
    ended = await world.wait_for(RunExited, count=2 if how == "killed" else 1)
    assert (ended.outcome, ended.node_id) == ("succeeded", "n2")
    assert "begins at 2 resumes 20" in await lines(world)
    started = [fact for fact in await world.facts() if isinstance(fact, RunStarted)]
    assert [fact.step for fact in started] == [0, 20]
    assert (await last_checkpoint(world)).step >= 40


HANDLES_STOP = """
import os, pathlib, sys, time, trainbus
out = trainbus.output_dir()
trainbus.report(step=7, loss=1.0)
trainbus.should_stop()
(out / "running").write_text("")
while not trainbus.should_stop():
    time.sleep(0.02)
(out / "saved").write_text("on stop")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", ["0", "143"])
async def test_a_stop_reaches_the_script_and_loses_nothing(
    world: World, agent: Any, commits: None, tmp_path: Path, code: str
) -> None:
    await agent()
    await place(world, HANDLES_STOP, code)
    await world.wait_for(CheckpointStaged)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
    released = await world.wait_for(RunReleased)
    assert (released.clean, released.step) == (True, 7)
    assert (await fetch(world, agent, tmp_path / "f"))["saved"] == "on stop"


@pytest.fixture
def unsignalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts end on the stop file before the agent signals them."""

    async def signal_nothing(*_: Any) -> None: ...

    monkeypatch.setattr(RankGroup, "_enforce_stop", signal_nothing)


@pytest.mark.parametrize("code", ["0", "143"])
async def test_a_script_that_stops_before_it_is_signalled_has_not_finished(
    world: World, agent: Any, commits: None, unsignalled: None, tmp_path: Path, code: str
) -> None:
    await agent()
    await place(world, HANDLES_STOP, code)
    await world.wait_for(CheckpointStaged)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
    [released] = await wait_for_ends(world)
    assert isinstance(released, RunReleased)
    assert (released.clean, released.step) == (True, 7)
    assert (await fetch(world, agent, tmp_path / "f"))["saved"] == "on stop"
    # What one attempt has seen does not turn the end of the next one into a stop.
    await place(world, "import trainbus; trainbus.should_stop()", generation=2, resume=await last_checkpoint(world))
    assert (await world.wait_for(RunExited)).outcome == "succeeded"


async def wait_for_ends(world: World) -> list[RunExited | RunReleased]:
    """Wait until the run is reported as released, or as finished."""
    deadline = time.monotonic() + 90
    while not (ends := await world.ends()):
        assert time.monotonic() < deadline, "the run does not end"
        await asyncio.sleep(0.03)
    return ends


#: Its first rank asks, the others only wait for the stop file: they might be in a collective with it.
FIRST_RANK_ASKS = """
import os, pathlib, time, trainbus
asks = os.environ["RANK"] == "0"
pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"], "running").write_text("")
while not (trainbus.should_stop() if asks else os.path.exists(os.environ["TRAINBUS_STOP_FILE"])):
    time.sleep(0.02)
"""


async def test_a_group_of_which_one_rank_has_seen_the_stop_has_not_finished(
    world: World, agent: Any, commits: None, unsignalled: None
) -> None:
    await agent()
    await place(world, FIRST_RANK_ASKS, slots=(0, 1))
    await world.wait_for(CheckpointStaged)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
    assert [type(each) for each in await wait_for_ends(world)] == [RunReleased]


#: Ends with this exit code once there is a stop file, which it looks for without trainbus.
READS_STOP_FILE = """
import os, pathlib, sys, time
pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"], "running").write_text("")
while not os.path.exists(os.environ["TRAINBUS_STOP_FILE"]):
    time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "kind"), [("0", RunExited), ("75", RunReleased)])
async def test_a_script_that_does_not_ask_shows_by_its_exit_code_whether_it_has_finished(
    world: World, agent: Any, commits: None, unsignalled: None, code: str, kind: type[Any]
) -> None:
    await agent()
    await place(world, READS_STOP_FILE, code)
    await world.wait_for(CheckpointStaged)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
    assert [type(each) for each in await wait_for_ends(world)] == [kind]


SIGNALLED_BY_OTHERS = """
import os, signal, trainbus
trainbus.should_stop()
os.kill(os.getpid(), signal.SIGTERM)
assert trainbus.should_stop()
"""


async def test_a_script_that_others_ask_to_stop_has_not_finished(world: World, agent: Any, commits: None) -> None:
    """A service manager that ends the node signals ranks and agent at once."""
    await agent()
    await place(world, SIGNALLED_BY_OTHERS)
    assert [type(each) for each in await wait_for_ends(world)] == [RunReleased]


ASKS = """
import pathlib, trainbus
resumed = trainbus.resume()
print("resumed", resumed and sorted(path.name for path in resumed.iterdir()), trainbus.resume_step(), flush=True)
(trainbus.output_dir() / "log.txt").write_text("log")
for step in (5, 6):
    pathlib.Path("ckpt.pt").write_text(f"weights {step}")
    trainbus.checkpoint("ckpt.pt", step=step, metrics={"accuracy": step / 10})
pathlib.Path("plot.png").write_text("plot")
trainbus.artifact("plot.png")
print("params", trainbus.params(), flush=True)
"""


async def test_a_script_that_asks_keeps_its_checkpoints(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await agent()
    await place(world, ASKS, params={"lr": 0.5})
    exited = await world.wait_for(RunExited)
    assert [artifact.name for artifact in exited.artifacts] == ["plot.png"]
    staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)]
    asked = [(fact.step, fact.metrics) for fact in staged if fact.metrics]
    assert asked[:2] == [(5, {"accuracy": 0.5}), (6, {"accuracy": 0.6})]
    assert await fetch(world, agent, tmp_path / "f") == {
        "ckpt.pt": "weights 6",
        "outputs/log.txt": "log",
        "outputs/plot.png": "plot",
    }
    assert "params {'lr': 0.5}" in await lines(world)
    await place(world, ASKS, generation=2, resume=await last_checkpoint(world))
    again = await world.wait_for(RunExited, count=2)
    assert again.outcome == "succeeded"
    assert any(line.startswith("resumed ['ckpt.pt', 'outputs']") for line in await lines(world))


async def test_a_run_that_keeps_nothing_is_told_what_to_do(world: World, agent: Any) -> None:
    await world.upload_code(package({"train.py": b"open('ckpt.pt', 'w').write('weights')"}))
    await agent()
    await world.place(command=["python", "train.py"], code=world.code)
    exited = await world.wait_for(RunExited)
    assert exited.outcome == "succeeded"
    assert "the run kept no file; in its working folder, which is removed, it wrote ckpt.pt (7 bytes)" in exited.notice
    assert "TRAINBUS_OUTPUT_DIR" in exited.notice
    assert f"trainbus: {exited.notice}" in await lines(world)


MANY = """
import os, pathlib
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
for number in range(3000):
    target = out / f"d{number % 10}" / f"file {number}"
    target.parent.mkdir(exist_ok=True)
    target.write_text(str(number))
(out / "inside").symlink_to(out / "d0" / "file 0")
(out / "outside").symlink_to("/etc/hostname")
os.mkfifo(out / "pipe")
"""


async def test_a_tree_of_many_small_files_and_links(world: World, agent: Any, commits: None, tmp_path: Path) -> None:
    await agent()
    await place(world, MANY)
    assert (await world.wait_for(RunExited)).outcome == "succeeded"
    files = await fetch(world, agent, tmp_path / "f")
    assert len(files) == 3001
    assert (files["d7/file 2997"], files["inside"]) == ("2997", "0")
    assert "outside" not in files
    assert any("outside" in line and "is not kept" in line for line in await lines(world))


async def test_a_folder_beyond_the_limit_does_not_break_the_run(world: World, agent: Any) -> None:
    await agent(output_max_bytes=10)
    script = "import os; open(os.environ['TRAINBUS_OUTPUT_DIR'] + '/big', 'w').write('x' * 100)"
    await place(world, script)
    exited = await world.wait_for(RunExited)
    assert exited.outcome == "succeeded"
    assert exited.notice.startswith("files are not kept: they take 100 bytes, more than the limit of 10")
    assert "Write into the folder" not in exited.notice
    assert any("more than the limit of 10" in line for line in await lines(world))


async def test_each_rank_has_its_own_output(world: World, agent: Any) -> None:
    await agent()
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    await place(world, script, slots=(0, 1))
    await world.wait_for(RunExited)
    assert (await lines(world, 0))[0] == "rank 0 of 2"
    assert await lines(world, 1) == ["rank 1 of 2"]


async def test_the_run_chooses_its_output_folder(world: World, agent: Any, commits: None, tmp_path: Path) -> None:
    await world.upload_code(package({"train.py": b"open('runs/ckpt.pt', 'w').write('weights')"}))
    await agent()
    await world.place(command=["python", "train.py"], code=world.code, env={"TRAINBUS_OUTPUT_DIR": "runs"})
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.notice) == ("succeeded", "")
    assert await fetch(world, agent, tmp_path / "f") == {"ckpt.pt": "weights"}


BUSY = """
import os, pathlib, time
state = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"]) / "state"
for epoch in range(10**6):
    state.write_text(str(epoch))
    time.sleep(0.01)
"""


@pytest.mark.parametrize("end", ["killed", "stopped"])
async def test_a_file_that_is_written_all_the_time_is_kept(
    world: World, agent: Any, commits: None, tmp_path: Path, end: str
) -> None:
    await agent(output_settle_s=60.0)
    await place(world, BUSY)
    await world.wait_for(CheckpointStaged, count=2)
    if end == "killed":
        processes = json.loads((world.settings.data_dir / "runs/r1/g1/processes.json").read_text())
        os.killpg(processes[0]["pid"], signal.SIGKILL)
        await world.wait_for(RunExited)
    else:
        await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="drained", message="drain", grace_s=60))
        assert (await world.wait_for(RunReleased)).clean
    kept = (await fetch(world, agent, tmp_path / "f"))["state"]
    assert kept.isdigit()


#: Measures the checkpoint that lies in the folder to resume from.
EVALUATE = """
import json, os, pathlib
state = json.loads((pathlib.Path(os.environ["TRAINBUS_RESUME_DIR"]) / "state.json").read_text())
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
(out / "metrics.json").write_text(json.dumps({"loss": 1 / state["epoch"]}))
(out / "predictions.jsonl").write_text(json.dumps({"id": "a", "target": 1.5, "prediction": 2.0}))
"""


async def test_an_evaluation_of_a_script_has_a_result_and_keeps_no_checkpoint(
    world: World, agent: Any, commits: None
) -> None:
    await agent()
    await place(world, EPOCHS, "3", "0")
    await world.wait_for(RunExited)
    checkpoint = await last_checkpoint(world)
    command = [sys.executable, "-m", "trainbus.script_evaluation", sys.executable, "-c", EVALUATE]
    target = {"run_id": "r1", "checkpoint_uri": checkpoint.uri}
    await world.place("r2", command=command, kind="evaluate", evaluate=target, resume=checkpoint)
    exited = await world.wait_for(RunExited, "r2")
    assert exited.outcome == "succeeded", exited
    assert exited.metrics == {"test/loss": pytest.approx(1 / 3)}
    assert (exited.notice, [each.name for each in exited.artifacts]) == ("", ["predictions.parquet"])
    predictions = Predictions(await world.objects.get(exited.artifacts[0].uri))
    assert predictions.table()["score"].to_pylist() == [-0.25]
    assert not [fact for fact in await world.facts("r2") if isinstance(fact, CheckpointStaged)]
