"""A script that knows nothing of trainbus: trained for longer, the start of another run, and on two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import DONE_S, Done, Stack

pytestmark = [pytest.mark.e2e]

#: It knows nothing of trainbus but the folder.
SCRIPT = """
import argparse, json, os, pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
epochs = parser.parse_args().epochs
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
state = out / "state.json"
history = json.loads(state.read_text()) if state.exists() else []
print("begins after", len(history), flush=True)
for epoch in range(len(history) + 1, epochs + 1):
    history.append([epoch, os.environ.get("LR", "none")])
    temporary = out / "state.json.new"
    temporary.write_text(json.dumps(history))
    temporary.replace(state)
"""


async def complete(stack: Stack, done: Done) -> str:
    """Wait for the end of the run that a command has requested; return its id."""
    assert done.code == 0, done.text
    run_id = done.out.split()[0]
    await stack.wait_for(run_id, "completed", DONE_S)
    return run_id


async def fetch_history(stack: Stack, run_id: str, folder: Path) -> Any:
    done = await stack.cli("fetch", run_id, str(folder))
    assert done.code == 0, done.text
    [state] = folder.rglob("state.json")
    return json.loads(state.read_text())


async def submit(stack: Stack, folder: Path, *options: str) -> str:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = ("--command", "python train.py --epochs 2")
    return await complete(stack, await stack.cli("submit", str(folder), *command, "--name", "arguments", *options))


async def test_a_script_with_arguments_trains_for_longer(stack: Stack, tmp_path: Path) -> None:
    parent = await submit(stack, tmp_path / "project", "--env", "LR=0.1")

    refused = await stack.cli("resume", parent, "--epochs", "4")
    assert refused.code != 0
    assert "--command 'python train.py --epochs 4'" in refused.err

    command = ("--command", "python train.py --epochs 4", "--env", "LR=0.01")
    done = await stack.cli("resume", parent, *command)
    assert "python train.py --epochs 4 instead of python train.py --epochs 2" in done.out
    assert "LR=0.01 instead of 0.1" in done.out
    assert not done.err
    longer = await complete(stack, done)
    history = await fetch_history(stack, longer, tmp_path / "longer")
    assert history == [[1, "0.1"], [2, "0.1"], [3, "0.01"], [4, "0.01"]]


async def test_a_script_that_had_nothing_to_do_is_explained(stack: Stack, tmp_path: Path) -> None:
    parent = await submit(stack, tmp_path / "project")
    known = await stack.cli("checkpoints", "ls", parent, "--json")
    step = json.loads(known.out)[-1]["step"]

    done = await stack.cli("resume", parent, "--param", "epochs=4")
    assert "sees epochs=4 only if it reads" in done.err
    assert "--command" in done.err
    idle = await complete(stack, done)
    fetched = await stack.cli("fetch", idle, str(tmp_path / "idle"))
    shown = await stack.cli("show", idle)
    assert fetched.code != 0
    for text in (fetched.err, shown.out.replace("\n", " ")):
        assert "TRAINBUS_OUTPUT_DIR" not in text
        assert f"{parent}@{step}" in text
        assert "wrote nothing new" in text
        assert "python train.py --epochs 2" in text
        assert "--command" in text

    unchanged = await stack.cli("resume", parent)
    assert "nothing that the script can see differs" in unchanged.err
    await complete(stack, unchanged)


#: It fails twice: before it has written anything, and once the test says so, when its first file is kept.
TUNES = """
import os, pathlib, sys, time, trainbus

out, init, test = trainbus.output_dir(), trainbus.init_dir(), pathlib.Path(sys.argv[1])
print("begins with", sorted(os.listdir(out)), os.listdir(init), trainbus.resume(), trainbus.resume_step(), flush=True)
if not (test / "first").exists():
    (test / "first").write_text("")
    sys.exit("nothing is written")
tuned = out / "tuned.txt"
if tuned.exists():
    sys.exit(0)
tuned.write_text((init / "state.json").read_text())
while not (test / "second").exists():
    time.sleep(0.05)
sys.exit("one file is written")
"""


async def test_a_script_begins_with_the_files_of_another_run(stack: Stack, tmp_path: Path) -> None:
    parent = await submit(stack, tmp_path / "project")
    project = tmp_path / "tunes"
    project.mkdir()
    (project / "tune.py").write_text(TUNES)
    command = shlex.join(["python", "tune.py", str(tmp_path)])
    options = ("--command", command, "--init-from", parent)
    refused = await stack.cli("submit", str(project), *options, "--init-exclude", "head.*")
    assert refused.code != 0
    assert "a command finds all files of the checkpoint" in refused.err

    done = await stack.cli("submit", str(project), *options)
    assert done.code == 0, done.text
    run_id = done.out.split()[0]
    # What it began with is nothing new: the first file that it writes makes its first checkpoint.
    first = await stack.wait_for(run_id, "checkpoint_committed", DONE_S)
    assert (first.generation, first.checkpoint.step) == (2, 1)
    (tmp_path / "second").write_text("")
    completed = await stack.wait_for(run_id, "completed", DONE_S)
    assert completed.generation == 3

    output = await stack.cli("logs", run_id, "--grep", "begins with")
    begin = "begins with ['state.json'] ['state.json'] None 0"
    assert output.out.splitlines()[:2] == [begin, begin]
    last = output.out.splitlines()[2]
    assert last.startswith("begins with ['state.json', 'tuned.txt'] ['state.json'] /")
    assert last.endswith("/resume 1")
    history = await fetch_history(stack, run_id, tmp_path / "fetched")
    assert json.loads((tmp_path / "fetched" / "tuned.txt").read_text()) == history
    shown = await stack.cli("show", run_id)
    assert "files from" in shown.out


#: Each rank counts its starts in a file of its own; the last start ends once the test says so.
RANKS = """
import os, pathlib, sys, time

rank, test = os.environ["RANK"], pathlib.Path(sys.argv[1])
out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
print("finds", sorted(path.name for path in out.iterdir()), flush=True)
mine = out / f"rank {rank}.txt"
mine.write_text((mine.read_text() if mine.exists() else "") + "started ")
(out / "shared.txt").write_text(os.environ["NODE_RANK"])
while not (test / "end").exists():
    time.sleep(0.05)
mine.write_text(mine.read_text() + "ended")
"""


async def wait_until_found(stack: Stack, run_id: str, generation: int, names: set[str]) -> None:
    """Wait until each rank of a generation says that it has found these files."""
    for rank in range(4):
        async with asyncio.timeout(DONE_S):
            async for batch in stack.bus.follow("LOGS", (f"log.{run_id}.{rank}",)):
                lines = [line for each in batch if each.event.generation == generation for line in each.event.lines]
                if any(str(sorted(names)) in line for line in lines):
                    break


async def test_the_files_of_all_nodes_are_kept(stack: Stack, tmp_path: Path) -> None:
    project = tmp_path / "ranks"
    project.mkdir()
    (project / "ranks.py").write_text(RANKS)
    command = shlex.join(["python", "ranks.py", str(tmp_path)])
    done = await stack.cli("submit", str(project), "--command", command, "--slots", "4")
    assert done.code == 0, done.text
    run_id = done.out.split()[0]
    placed = await stack.wait_for(run_id, "placed")
    [other] = [member for member in placed.members if 0 not in member.ranks]
    files = {f"rank {rank}.txt" for rank in range(4)}
    await stack.wait_for(run_id, "checkpoint_committed", DONE_S)

    # Stopped in order: both nodes list what they have until then.
    done = await stack.cli("drain", other.node_id)
    assert done.code == 0, done.text
    await stack.wait_for(run_id, "released", DONE_S)
    done = await stack.cli("undrain", other.node_id)
    assert done.code == 0, done.text
    await wait_until_found(stack, run_id, 2, {*files, "shared.txt"})

    # The processes of the node without rank 0 are killed; what it had listed is kept.
    placed = await stack.wait_for(run_id, "placed", condition=lambda fact: fact.generation == 2)
    [killed] = [member.node_id for member in placed.members if 0 not in member.ranks]
    stack.kill(killed)
    for note in stack.data_dir.glob(f"node-*/runs/{run_id}/g2/processes.json"):
        if json.loads(note.with_name("launch.json").read_text())["node_id"] == killed:
            for process in json.loads(note.read_text()):
                with contextlib.suppress(ProcessLookupError):  # its guard was faster
                    os.killpg(process["pid"], signal.SIGKILL)
    await wait_until_found(stack, run_id, 3, {*files, "shared.txt"})
    (tmp_path / "end").write_text("")
    completed = await stack.wait_for(run_id, "completed", DONE_S)
    assert "1 file of other nodes will not be kept (shared.txt of node " in completed.notice
    kept = tmp_path / "kept"
    done = await stack.cli("fetch", run_id, str(kept))
    assert done.code == 0, done.text
    contents = {path.name: path.read_text() for path in kept.iterdir()}
    assert contents.keys() == {*files, "shared.txt"}
    assert contents["shared.txt"] == "0"
    # Of the killed attempt only the last moments may be lost.
    assert all(contents[name] in (f"{'started ' * starts}ended" for starts in (2, 3)) for name in files), contents
