"""The output folders of several nodes: kept in one checkpoint, whichever node stops, fails or is lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from contracts import topology
from contracts.events.checkpoint import CheckpointFile, CheckpointStaged
from contracts.events.node import NodeLost
from contracts.events.run import Member, RunExited, RunReleased, RunStopping
from contracts.node_outputs import NodeOutputs, NodeOutputsRef
from services.kit.kept_files import unpack_files
from tests.kit.support import until as eventually
from tests.worker.conftest import World, ranks_of, until
from tests.worker.test_output_folder import commits as commits
from tests.worker.test_output_folder import last_checkpoint, lines
from tests.worker.test_output_folder import worker_settings as worker_settings

pytestmark = pytest.mark.shell

#: Does what the test says for its rank, then waits for a file of the test or to be stopped. Steps: ``write NAME TEXT``,
#: ``delete NAME``, ``keep NAME STEP``, ``wait NAME``, ``exit CODE``.
SCRIPT = """
import json, os, pathlib, sys, time
import trainbus
out, test, rank = trainbus.output_dir(), pathlib.Path(sys.argv[1]), os.environ["RANK"]
print("finds", sorted(path.name for path in out.iterdir()), flush=True)
for step in json.loads(sys.argv[2])[rank]:
    verb, name, *rest = step.split()
    if verb == "write":
        (out / name).write_text(rest[0])
    elif verb == "delete":
        (out / name).unlink()
    elif verb == "keep":
        trainbus.checkpoint(out / name, step=int(rest[0]))
    elif verb == "exit":
        sys.exit(int(name))
    while verb == "wait" and not (test / name).exists():
        time.sleep(0.02)
"""
ON_N1 = (Member(node_id="n1", slots=(0,), ranks=(0,)), Member(node_id="n2", slots=(0,), ranks=(1,)))
ON_N2 = (Member(node_id="n2", slots=(0,), ranks=(0,)), Member(node_id="n1", slots=(0,), ranks=(1,)))


async def place(world: World, test: Path, *steps: str, members: tuple[Member, ...] = ON_N1, **fields: Any) -> None:
    """Place a script whose rank n does the steps that are the n-th text, divided by commas."""
    by_rank = {str(rank): text.split(", ") for rank, text in enumerate(steps)}
    command = ["python", "-c", SCRIPT, str(test), json.dumps(by_rank)]
    await world.place(command=command, members=members, **fields)


async def start_both(world: World, agent: Any, **update: Any) -> None:
    await agent(**update)
    await agent(node_id="n2", data_dir=world.settings.data_dir / "n2", **update)


async def restore(world: World, folder: Path) -> dict[str, str]:
    """The files of the last checkpoint, as a node reads them."""
    content = json.loads(await world.objects.get((await last_checkpoint(world)).uri))
    for file in map(CheckpointFile.model_validate, content["files"]):
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join([await world.objects.get(chunk.uri) for chunk in file.chunks]))
    unpack_files(folder)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def staged_files(world: World, path: str, step: int = 0) -> CheckpointStaged:
    """Wait for a checkpoint with a file, from a step on."""
    found: list[CheckpointStaged] = []

    async def is_staged() -> bool:
        staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged) and fact.step >= step]
        found[:] = [fact for fact in staged if any(file.path == path for file in fact.files)]
        return bool(found)

    await eventually(is_staged, f"{path} to be staged", 90)
    return found[0]


async def wait_until_joined(world: World, node_id: str, count: int = 1) -> None:
    async def has_joined() -> bool:
        return len(await world.bus.read_history(f"node.{node_id}.joined")) >= count

    await eventually(has_joined, f"{node_id} to join", 90)


async def stop(world: World, generation: int = 1, grace_s: float = 60, reason: str = "preempted") -> None:
    await world.bus.publish(
        RunStopping(run_id="r1", generation=generation, reason=reason, message="room", grace_s=grace_s)
    )


async def listed(world: World, generation: int, node_id: str) -> NodeOutputs:
    bucket = await world.bus.open_bucket(topology.OUTPUTS)
    ref = NodeOutputsRef.model_validate_json((await bucket.get(f"r1.{generation}.{node_id}")).value or b"")
    assert ref.listing is not None
    return NodeOutputs.model_validate_json(await world.objects.get(ref.listing.uri))


def has_listed(known: Path, name: str) -> bool:
    """Whether the agent of rank 0 knows that another node has written a file."""
    return known.exists() and f'"outputs/{name}"' in known.read_text()


async def test_what_both_nodes_wrote_comes_back_and_goes_on(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    """In the second attempt the other node has rank 0: the copies that it was given give way to what is written."""
    await start_both(world, agent)
    await place(
        world,
        tmp_path,
        "write zero one, write stays one, wait never",
        "write log one, write junk one, write ü one, wait never",
    )
    await staged_files(world, "junk")
    await stop(world)
    released = [await world.wait_for(RunReleased, count=count) for count in (1, 2)]
    assert [each.clean for each in released] == [True, True]
    first = await restore(world, tmp_path / "first")
    assert first == {"zero": "one", "stays": "one", "log": "one", "junk": "one", "ü": "one"}

    await place(
        world,
        tmp_path,
        "write zero two",
        "write log two, delete junk, write ü two, write new two",
        members=ON_N2,
        generation=2,
        resume=await last_checkpoint(world),
    )
    exited = [await world.wait_for(RunExited, count=count) for count in (1, 2)]
    assert [(each.outcome, each.notice) for each in exited] == [("succeeded", "")] * 2
    assert str(sorted(first)) in "".join(await lines(world, 1))
    second = await restore(world, tmp_path / "second")
    assert second == {"zero": "two", "stays": "one", "log": "two", "ü": "two", "new": "two"}
    # What the node was given is not stored again.
    again = await listed(world, 2, "n1")
    assert {file.path for file in again.files} == {"outputs/log", "outputs/new", "trainbus-files.1.tar"}
    assert (set(again.packed), again.deleted) == ({"outputs/ü"}, ("junk",))


@pytest.mark.parametrize("grace_s", [0, 600])
async def test_what_a_lost_node_had_listed_is_kept(
    world: World, agent: Any, agent_process: Any, commits: None, tmp_path: Path, grace_s: float
) -> None:
    # No checkpoint is made between the node's last list and its loss.
    await agent(output_interval_s=600)
    process = agent_process(node_id="n2", data_dir=world.settings.data_dir / "n2")
    await wait_until_joined(world, "n2")
    await place(world, tmp_path, "write zero x, wait never", "write one x, write two x, wait never")
    generation = world.settings.data_dir / "runs/r1/g1"
    await until(lambda: (generation / "outputs/zero").exists() and has_listed(generation / "peers/n2.json", "two"), 90)
    process.kill()
    process.wait()
    for pid in ranks_of(world.settings.data_dir.resolve() / "n2"):
        os.kill(pid, signal.SIGKILL)
    await world.bus.publish(NodeLost(node_id="n2", incarnation="gone", reason="killed"))
    await stop(world, grace_s=grace_s, reason="node_lost")
    # The last files of a lost node are not waited for.
    assert (await world.wait_for(RunReleased, timeout_s=60)).node_id == "n1"
    assert set(await restore(world, tmp_path / "f")) == {"zero", "one", "two"}
    await place(
        world,
        tmp_path,
        "write zero y",
        members=(Member(node_id="n1", slots=(0,), ranks=(0,)),),
        generation=2,
        resume=await last_checkpoint(world),
    )
    await world.wait_for(RunExited)
    assert await restore(world, tmp_path / "g") == {"zero": "y", "one": "x", "two": "x"}


async def test_the_agent_of_rank_0_is_killed_and_forgets_no_other_node(
    world: World, agent: Any, agent_process: Any, commits: None, tmp_path: Path
) -> None:
    process = agent_process()
    await wait_until_joined(world, "n1")
    await agent(node_id="n2", data_dir=world.settings.data_dir / "n2")
    await place(world, tmp_path, "write zero x, wait more, write zero y, wait end", "write one x, wait end")
    await staged_files(world, "one")
    bucket = await world.bus.open_bucket(topology.OUTPUTS)
    await bucket.purge("r1.1.n2")  # as if it had expired
    process.kill()
    process.wait()
    agent_process()
    await wait_until_joined(world, "n1", 2)
    (tmp_path / "more").touch()
    (tmp_path / "end").touch()
    await world.wait_for(RunExited, count=2)
    assert await restore(world, tmp_path / "f") == {"zero": "y", "one": "x"}


async def test_the_last_files_of_a_node_that_runs_on_are_waited_for(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await start_both(world, agent)
    await place(world, tmp_path, "write zero x", "write one x, wait end, write last x")
    await until(lambda: (world.settings.data_dir / "runs/r1/g1/rank_0.exit").exists(), 90)
    (tmp_path / "end").touch()
    exited = [await world.wait_for(RunExited, count=count) for count in (1, 2)]
    assert {each.outcome for each in exited} == {"succeeded"}
    # One checkpoint at the end, not one of each node.
    assert set(await restore(world, tmp_path / "f")) == {"zero", "one", "last"}


async def test_a_failure_on_the_node_of_rank_0_waits_for_no_other(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await start_both(world, agent)
    await place(world, tmp_path, "write zero x, wait more, exit 3", "write one x, wait never")
    await staged_files(world, "one")
    (tmp_path / "more").touch()
    assert (await world.wait_for(RunExited)).outcome == "failed"
    assert set(await restore(world, tmp_path / "f")) == {"zero", "one"}
    await stop(world)
    await world.wait_for(RunReleased)


async def test_what_a_node_wrote_before_it_failed_is_kept(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await agent()
    # It lists nothing before the end.
    await agent(node_id="n2", data_dir=world.settings.data_dir / "n2", output_interval_s=600)
    await place(world, tmp_path, "write zero x, wait never", "write last x, wait more, exit 3")
    await staged_files(world, "zero")
    last = world.settings.data_dir / "n2/runs/r1/g1/outputs/last"
    # What is written as a script fails may be torn.
    await until(lambda: last.exists() and time.time() - last.stat().st_mtime > 2 * world.settings.output_settle_s, 90)
    (tmp_path / "more").touch()
    assert (await world.wait_for(RunExited)).outcome == "failed"
    await stop(world, grace_s=0, reason="crashed")
    await world.wait_for(RunReleased)
    assert set(await restore(world, tmp_path / "f")) == {"zero", "last"}


async def test_a_checkpoint_has_what_all_nodes_asked_to_keep_at_one_moment(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await start_both(world, agent)
    shards = ["write shard_{0} one, keep shard_{0} 5, wait more, write shard_{0} two, keep shard_{0} 9, wait end"] * 2
    await place(world, tmp_path, *(text.format(rank) for rank, text in enumerate(shards)))
    first = await staged_files(world, "shard_1")
    assert first.step == 5
    (tmp_path / "more").touch()
    await staged_files(world, "shard_1", step=9)
    kept = await restore(world, tmp_path / "f")
    assert {name: kept[name] for name in ("shard_0", "shard_1")} == {"shard_0": "two", "shard_1": "two"}
    (tmp_path / "end").touch()
    for count in (1, 2):
        assert (await world.wait_for(RunExited, count=count)).notice == ""


async def test_a_file_of_two_nodes_is_told_of_once(world: World, agent: Any, commits: None, tmp_path: Path) -> None:
    await start_both(world, agent)
    await place(
        world, tmp_path, "write log zero, wait more, write a x, wait end", "write log one, write same x, wait end"
    )
    await staged_files(world, "same")
    (tmp_path / "more").touch()
    await staged_files(world, "a")
    (tmp_path / "end").touch()
    await world.wait_for(RunExited, count=2)
    exited = [fact for fact in await world.facts() if isinstance(fact, RunExited)]
    notices = {each.node_id: each.notice for each in exited}
    assert notices["n1"].startswith("1 file of other nodes will not be kept (log of node n2): ")
    assert notices["n2"] == ""
    assert sum("log of node n2" in line for line in await lines(world)) == 1
    assert (await restore(world, tmp_path / "f"))["log"] == "zero"


async def test_a_node_whose_last_files_do_not_come_is_named(
    world: World, agent: Any, commits: None, tmp_path: Path
) -> None:
    await agent()
    await place(world, tmp_path, "write zero x, wait never", "wait never")
    await staged_files(world, "zero")
    await stop(world, grace_s=2)
    await world.wait_for(RunReleased)
    assert any(line.startswith("trainbus: what the script wrote last on n2 did not") for line in await lines(world))
    assert set(await restore(world, tmp_path / "f")) == {"zero"}


async def test_a_list_that_lies_is_left_out(world: World, agent: Any, commits: None, tmp_path: Path) -> None:
    await agent()
    await place(world, tmp_path, "write zero x, wait more, write more x, wait never", "wait never")
    await staged_files(world, "zero")
    await world.objects.put("s3://models/elsewhere", b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    listing = {"uri": "s3://models/elsewhere", "sha256": digest, "size_bytes": 2, "files_bytes": 0}
    ref = {"run_id": "r1", "generation": 1, "node_id": "n2", "listing": listing}
    for value in (b"not JSON", b"{}", json.dumps({**ref, "node_id": "n9"}).encode(), json.dumps(ref).encode()):
        await world.bus.put_in_bucket(topology.OUTPUTS, "r1.1.n2", value)
    (tmp_path / "more").touch()
    await staged_files(world, "more")
    await stop(world, grace_s=2)
    await world.wait_for(RunReleased)
    assert set(await restore(world, tmp_path / "f")) == {"zero", "more"}
