"""One node from a placement to its report, with real processes on a real bus and store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts.events.checkpoint import CheckpointStaged
from contracts.events.node import NodeJoined, NodeLeft, NodeLost
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunCompleted,
    RunExited,
    RunHeldUp,
    RunReleased,
    RunStarted,
    RunStopping,
)
from contracts.texts import describe
from services.worker.agent import agent as agent_module
from services.worker.generation import preparation, runner
from tests.kit.support import until
from tests.worker.conftest import World, package, ranks_of
from tests.worker.cuttable_proxy import CuttableProxy


async def measured(world: World) -> list[Any]:
    return [e for e in await world.facts(stream="PROGRESS", subject="progress.{}") if e.kind == "system"]


async def test_generation_runs_from_placed_to_exited(world: World, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("TRAINBUS_NATS_PASSWORD", "hunter2")
    await agent()
    committing = asyncio.create_task(world.commit_all())
    await world.place(slots=(0, 1), params={"steps": 40, "every": 15, "hold_at": 20}, env={"COLOUR": "red"})
    folder = world.settings.data_dir.resolve() / "runs" / "r1" / "g1"
    await until(lambda: measured(world), "a measurement of the node")
    (folder / "go").touch()
    exited = await world.wait_for(RunExited)
    committing.cancel()

    assert (exited.outcome, exited.step, exited.samples_consumed) == ("succeeded", 40, 320), exited
    assert exited.metrics == {"accuracy": 0.9}
    assert [artifact.name for artifact in exited.artifacts] == ["report.txt"]
    assert await world.objects.get(exited.artifacts[0].uri) == b"done\n"
    # Every step of both ranks once, every line of output once.
    assert sorted(await world.steps()) == sorted([*range(1, 41)] * 2)
    logs = [line for log in await world.facts(stream="LOGS", subject="log.{}.0") for line in log.lines]
    assert logs == ["rank 0 starts at 0", *(f"step {n}" for n in range(1, 41))]
    facts = await world.facts()
    assert [f.step for f in facts if isinstance(f, CheckpointStaged)] == [15, 30, 40]
    staged = next(fact for fact in facts if isinstance(fact, CheckpointStaged))
    assert staged.ranks == (0, 1)
    assert [file.path for file in staged.files] == ["state_0.json", "state_1.json"]
    assert len([f for f in facts if isinstance(f, RunStarted)]) == 1
    system = await measured(world)
    assert "system/ranks_memory_usage_megabytes" in system[0].points[0].values

    environment = json.loads((folder / "env_1.json").read_text())
    assert environment["COLOUR"] == "red"
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("1", "1", "2")
    assert "hunter2" not in json.dumps(environment)
    secret = world.settings.s3_secret_key
    assert secret is not None
    assert secret.get_secret_value() not in json.dumps(environment)


async def test_preempted_run_releases_once_committed_and_resumes(world: World, agent: Any) -> None:
    await agent()
    await world.place(params={"steps": 100_000})
    await world.wait_steps(5)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60))
    staged = await world.wait_for(CheckpointStaged)
    await asyncio.sleep(0.3)
    assert await world.ends() == []  # not before it is committed
    ref = await world.commit(staged)
    released = await world.wait_for(RunReleased)
    assert (released.clean, released.step) == (True, staged.step)

    await world.place(generation=2, resume=ref, params={"steps": ref.step + 10})
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.generation, exited.step) == ("succeeded", 2, ref.step + 10), exited
    assert await world.steps() == [*range(1, ref.step + 11)]

    # Another manifest in its place is as good a manifest, but not the one that was committed.
    manifest = await world.objects.get(ref.uri)
    await world.objects.put(ref.uri, manifest.replace(b'"epoch": ', b'"epoch": 1'))
    await world.place("other", resume=ref, params={"steps": ref.step + 10})
    refused = await world.wait_for(RunExited, "other")
    assert (refused.outcome, refused.infrastructure_failure) == ("failed", False)
    assert "is not the one that was committed" in refused.reason
    assert "start from another one" in refused.reason


async def test_run_starts_from_weights_until_it_has_a_checkpoint(world: World, agent: Any) -> None:
    bodies = {"model-0.safetensors": b"weights", "state.json": b"{}", "optimizer-0.safetensors": b"moments"}
    files = []
    for path, body in bodies.items():
        sha256 = hashlib.sha256(body).hexdigest()
        uri = f"s3://{world.settings.bucket_models}/blobs/sha256/{sha256[:2]}/{sha256}"
        size = {"sha256": sha256, "size_bytes": len(body)}
        files.append({"path": path, **size, "chunks": [{**size, "uri": uri}]})
        if not path.startswith("optimizer"):  # a reader of it finds nothing
            await world.objects.put(uri, body)
    manifest = json.dumps({"step": 9, "epoch": 1, "samples_consumed": 72, "files": files}).encode()
    base = CheckpointRef(
        uri=f"s3://{world.settings.bucket_models}/default/rbase/checkpoints/epoch_1/step_00000009.g1.json",
        step=9,
        epoch=1,
        samples_consumed=72,
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
    )
    await world.objects.put(base.uri, manifest)

    await agent()
    fields: dict[str, Any] = {"init_from": base.uri, "params": {"steps": 100_000}}
    await world.place(init=base, **fields)
    await world.wait_steps(3)
    folder = world.settings.data_dir.resolve() / "runs" / "r1"
    launch = json.loads((folder / "g1" / "launch.json").read_text())
    assert (launch["resume"], launch["resume_folder"]) == (None, None)
    assert {path.name: path.read_bytes() for path in Path(launch["init_folder"]).iterdir()} == {
        "model-0.safetensors": b"weights",
        "state.json": b"{}",
    }

    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60))
    ref = await world.commit(await world.wait_for(CheckpointStaged))
    assert (await world.wait_for(RunReleased)).clean
    await world.objects.delete(base.uri)
    await world.place(generation=2, resume=ref, **fields)
    await world.wait_for(RunStarted, count=2)
    launch = json.loads((folder / "g2" / "launch.json").read_text())
    assert (launch["init_folder"], launch["resume"]["step"]) == (None, ref.step)

    # Another manifest in its place.
    await world.objects.put(base.uri, manifest.replace(b'"epoch": 1', b'"epoch": 2'))
    await world.place("other", init=base, **fields)
    refused = await world.wait_for(RunExited, "other")
    assert "is not the one that was committed" in refused.reason


async def test_unresponsive_ranks_are_killed_after_the_grace(world: World, agent: Any) -> None:
    await agent()
    await world.place(params={"steps": 100_000, "ignores_stop": True})
    await world.wait_for(RunStarted)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=0.3))
    released = await world.wait_for(RunReleased)
    assert not released.clean
    assert not ranks_of(world.settings.data_dir.resolve())


async def test_first_crashed_rank_is_reported_and_the_others_end(world: World, agent: Any) -> None:
    await agent()
    await world.place(slots=(0, 1), params={"steps": 100_000, "crash_at": 8, "crash_rank": 1})
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.rank, exited.exit_code, exited.infrastructure_failure) == ("failed", 1, 3, False)
    assert "the loss exploded" in exited.reason
    assert exited.log_tail[-1] == "step 8"
    assert not ranks_of(world.settings.data_dir.resolve())
    assert len(await world.ends()) == 1


async def test_what_diverges_leaves_its_checkpoint_although_memory_has_later_steps(world: World, agent: Any) -> None:
    await agent()
    await world.place(params={"steps": 100, "step_s": 0, "every": 10, "crash_at": 11, "diverges": True})
    exited = await world.wait_for(RunExited)
    assert "the loss exploded" in exited.reason
    facts = await world.facts()
    assert [fact.step for fact in facts if isinstance(fact, CheckpointStaged)] == [10]
    assert facts.index(exited) == len(facts) - 1


UNUSABLE = [
    ("wrong hash", {"code": "wrong hash"}, "code.sha256"),
    ("missing", {"code": "missing"}, "trainbus submit"),
    ("unsafe", {"code": "unsafe"}, "leads out of the package"),
    ("pattern", {"command": ["true"], "metric_patterns": {"loss": "("}}, "metric_patterns.loss"),
    ("slots", {"slots": (0, 7)}, "which has 2"),
    ("resume", {"resume_from": "s3://nowhere-at-all/x.json"}, "choose another one"),
    ("init", {"init_from": "s3://nowhere-at-all/x.json"}, "choose another one"),
]


async def test_generation_that_cannot_start_reports_what_to_change(world: World, agent: Any) -> None:
    await agent()
    unsafe = World(world.bus, world.objects, world.settings)
    await unsafe.upload_code(package({"../evil.py": b""}))
    codes = {
        "wrong hash": {**world.code, "sha256": "0" * 64},
        "missing": {"uri": f"s3://{world.settings.bucket_code}/none", "sha256": "1" * 64},
        "unsafe": unsafe.code,
    }
    for name, fields, _ in UNUSABLE:
        changed = dict(fields)
        if "code" in changed:
            changed["code"] = codes[name]
        await world.place(run_id=name.replace(" ", "-"), **{"params": {"steps": 1}, **changed})
    for name, _, expected in UNUSABLE:
        exited = await world.wait_for(RunExited, name.replace(" ", "-"))
        assert (exited.outcome, exited.infrastructure_failure) == ("failed", False), name
        assert expected in exited.reason, (name, exited.reason)
        assert exited.permanent is (name == "pattern"), name  # the others' store may have it by the next attempt


async def test_command_is_matched_logged_and_stopped(world: World, agent: Any) -> None:
    await agent()
    script = "import time\nfor n in range(10**6):\n print(f'epoch {n} loss={1/(n+1)}'); time.sleep(0.02)"
    await world.place(
        command=["python", "-c", script], metric_patterns={"loss": r"epoch (?P<step>\d+) loss=([0-9.e-]+)"}
    )
    await world.wait_for(RunStarted)
    await world.wait_steps(5)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=3))
    released = await world.wait_for(RunReleased)
    assert not released.clean
    steps = await world.steps()
    assert steps == [*range(len(steps))]


async def test_newer_generation_ends_the_older_one(world: World, agent: Any) -> None:
    await agent()
    first = await world.place(params={"steps": 100_000})
    await world.wait_steps(3)
    await world.place(generation=2, params={"steps": 20})
    exited = await world.wait_for(RunExited)
    assert (exited.generation, exited.outcome) == (2, "succeeded")
    assert not ranks_of(world.settings.data_dir.resolve())
    await world.bus.publish(RunCompleted(run_id="r1", generation=2))
    # The same old fact again, stored again because the server forgot its id.
    await world.bus.js.publish(first.subject, first.model_dump_json().encode(), headers={"Nats-Msg-Id": "again"})
    await world.place(run_id="r2", params={"steps": 3})
    await world.wait_for(RunExited, "r2")
    assert len(await world.ends()) == 1
    assert not ranks_of(world.settings.data_dir.resolve())


async def test_lost_node_kills_its_ranks_and_rejoins(world: World, agent: Any) -> None:
    await agent()
    await world.place(params={"steps": 100_000})
    await world.wait_steps(3)
    joined = [r.event for r in await world.bus.read_history("node.n1.joined")]
    await world.bus.publish(NodeLost(node_id="n1", incarnation=joined[0].incarnation))

    async def has_rejoined() -> bool:
        joined[:] = [r.event for r in await world.bus.read_history("node.n1.joined")]
        return len(joined) == 2 and not ranks_of(world.settings.data_dir.resolve())

    await until(has_rejoined, "the node to join again")
    assert isinstance(joined[1], NodeJoined)
    assert joined[1].running == ()
    assert joined[1].incarnation != joined[0].incarnation
    assert await world.ends() == []
    await world.place(run_id="r2", params={"steps": 3})
    assert (await world.wait_for(RunExited, "r2")).outcome == "succeeded"


async def test_two_nodes_meet_at_the_address_of_rank_0(world: World, agent: Any) -> None:
    await agent()
    await agent(node_id="n2", data_dir=world.settings.data_dir / "n2")
    members = (Member(node_id="n2", slots=(0,), ranks=(0,)), Member(node_id="n1", slots=(1,), ranks=(1,)))
    await world.place(members=members, params={"steps": 5})
    await world.wait_for(RunExited, count=2)
    runs = [world.settings.data_dir / "runs", world.settings.data_dir / "n2" / "runs"]
    environments = [json.loads((runs[n] / "r1" / "g1" / f"env_{1 - n}.json").read_text()) for n in (0, 1)]
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]
    assert [each["RANK"] for each in environments] == ["1", "0"]


async def test_preemption_during_preparation_starts_no_rank(world: World, agent: Any) -> None:
    await agent()
    elsewhere = (Member(node_id="nobody", slots=(0,), ranks=(0,)), Member(node_id="n1", slots=(0,), ranks=(1,)))
    resume = CheckpointRef(uri="s3://x-y/z", step=7, epoch=1, samples_consumed=56)
    await world.place(members=elsewhere, params={"steps": 5}, resume=None)
    await world.bus.publish(RunStopping(run_id="r1", generation=1, reason="preempted", message="room", grace_s=60))
    released = await world.wait_for(RunReleased)
    assert released.clean
    assert resume.step == 7


async def test_a_bus_that_hangs_at_the_end_does_not_keep_the_node(
    world: World, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await agent()
    publish, hung = service.bus.publish, asyncio.Event()

    async def publish_unless_left(fact: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fact, NodeLeft):
            hung.set()
            await asyncio.Event().wait()
        return await publish(fact, *args, **kwargs)

    monkeypatch.setattr(agent_module, "LEFT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(service.bus, "publish", publish_unless_left)
    term = world.settings.data_dir.resolve() / "agent" / "lease.json"
    assert term.exists()
    service.stopping.set()
    await hung.wait()
    await until(lambda: not term.exists(), "the term to be closed all the same")


async def test_stopped_agent_releases_its_runs_and_leaves(world: World, agent: Any) -> None:
    service = await agent()
    committing = asyncio.create_task(world.commit_all())
    placed = await world.place(params={"steps": 100_000}, grace_s=60)
    await world.wait_steps(3)
    service.stopping.set()
    released = await world.wait_for(RunReleased)
    committing.cancel()
    assert released.clean
    left: list[Any] = []

    async def gone() -> bool:
        left[:] = await world.bus.read_history("node.n1.left")
        return bool(left)

    await until(gone, "the node to leave")
    assert isinstance(left[0].event, NodeLeft)
    (noticed,) = await world.bus.read_history("node.n1.notice")
    assert (noticed.event.source, noticed.event.kind) == ("signal", "terminate")
    # Published before the ranks are asked to stop; the grace is long enough for each run.
    staged = await world.bus.read_history("run.r1.checkpoint_staged")
    assert noticed.sequence < staged[-1].sequence < left[0].sequence
    assert noticed.event.grace_s > placed.spec.grace_s


async def test_a_node_says_that_the_node_of_rank_0_does_not_come(
    world: World, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "SAID_AFTER_S", 0.2)
    await agent()
    node_id = world.settings.node_id
    members = (Member(node_id="elsewhere", slots=(0,), ranks=(0,)), Member(node_id=node_id, slots=(0,), ranks=(1,)))
    await world.place(members=members, params={"steps": 5})
    held_up = await world.wait_for(RunHeldUp)
    assert (held_up.node_id, held_up.missing_nodes, held_up.address) == (node_id, ("elsewhere",), "")
    # It waits for the rendezvous, not for the end of the test.
    await world.bus.publish(
        RunStopping(run_id="r1", generation=1, reason="preempted", message="the test is over", grace_s=0)
    )
    await world.wait_for(RunReleased)


async def test_ranks_that_wait_for_others_are_told_with_the_nodes_of_those(world: World, agent: Any) -> None:
    await agent()
    await world.place(slots=(0, 1), params={"steps": 5, "missing": [1]})
    held_up = await world.wait_for(RunHeldUp)
    assert (held_up.address, held_up.missing_ranks) == ("127.0.0.1:1", (1,))
    assert held_up.missing_nodes == (world.settings.node_id,)
    assert f"rank 1 on {world.settings.node_id} has not come to" in describe(held_up)


@pytest.mark.parametrize("argument", ["x" * 131_072, "a\0b"], ids=["too long", "NUL"])
async def test_what_no_machine_can_start_fails_the_run_at_once(world: World, agent: Any, argument: str) -> None:
    await agent()
    # A log of an earlier version has it: today's contract refuses the request.
    await world.place(command=["true", argument])
    exited = await world.wait_for(RunExited)
    assert (exited.outcome, exited.permanent, exited.infrastructure_failure) == ("failed", True, False)
    assert "cannot be started on any machine" in exited.reason


async def test_a_script_that_diverges_ends_with_what_it_diverged_to(world: World, agent: Any) -> None:
    await agent()
    losses = "((1, 0.5), (2, float('inf')), (3, float('nan')))"
    script = f"import trainbus\nfor step, loss in {losses}: trainbus.report(step=step, loss=loss, lr=0.1)"
    await world.place(command=[sys.executable, "-c", script])
    exited = await world.wait_for(RunExited)
    assert exited.outcome == "succeeded", exited
    assert str(exited.metrics) == "{'loss': nan, 'lr': 0.1}"
    points = [p for e in await world.facts("r1", "PROGRESS", "progress.{}") if e.kind == "training" for p in e.points]
    assert [(point.step, str(point.values["loss"])) for point in points] == [(1, "0.5"), (2, "inf"), (3, "nan")]
    # Other languages read it too: JSON has no number for it.
    stored = await world.bus.js.get_last_msg("FACTS", "run.r1.exited")
    assert json.loads(stored.data, parse_constant=pytest.fail)["metrics"]["loss"] == "NaN"


async def test_ranks_that_finish_while_the_bus_is_away_lose_nothing(world: World, agent: Any) -> None:
    """It is away for longer than the lease. What they have left is uploaded after it, and the run has succeeded."""
    folder = world.settings.data_dir.resolve() / "runs" / "r1" / "g1"
    committing = asyncio.create_task(world.commit_all())
    async with CuttableProxy(int(world.settings.nats_url.rpartition(":")[2])) as proxy:
        service = await agent(nats_url=proxy.url, lease_ttl_s=2.0)
        await world.place(params={"steps": 60, "hold_at": 50})
        await world.wait_steps(50)
        proxy.cut()
        (folder / "go").touch()
        await until(lambda: not ranks_of(folder), "the ranks to finish")
        await until((folder / "stop.json").exists, "the lease to be over")
        proxy.heal()
        exited = await world.wait_for(RunExited)
        assert (exited.outcome, exited.step) == ("succeeded", 60)
        staged = [fact for fact in await world.facts() if isinstance(fact, CheckpointStaged)]
        assert [(fact.step, fact.final) for fact in staged] == [(60, True)]
        await until(lambda: has_published(world, "joined", 2), "the agent to join again")
        service.stopping.set()
        await until(lambda: has_published(world, "left", 1), "the agent to leave")
    committing.cancel()


@pytest.mark.parametrize("left", ["checkpoint", "artifact"])
async def test_what_cannot_be_stored_within_the_grace_of_a_stop_is_no_result(
    world: World, agent: Any, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have finished, and the store is away. A run that has succeeded would be completed without its state."""
    monkeypatch.setattr(runner, "FINISHED_UPLOAD_S", 0.5)
    assert world.settings.s3_endpoint is not None
    folder = world.settings.data_dir.resolve() / "runs" / "r1" / "g1"
    async with CuttableProxy(int(world.settings.s3_endpoint.rpartition(":")[2])) as proxy:
        await agent(s3_endpoint=proxy.url.replace("nats:", "http:"))
        await world.place(params={"steps": 60, "hold_at": 50})
        await world.wait_steps(50)
        if left == "checkpoint":
            proxy.cut()
        (folder / "go").touch()
        if left == "artifact":
            staged = await world.wait_for(CheckpointStaged)
            proxy.cut()
            await world.commit(staged)
        await until(lambda: not ranks_of(folder), "the ranks to finish")
        await world.bus.publish(
            RunStopping(run_id="r1", generation=1, reason="preempted", message="it grows", grace_s=0.5)
        )
        released = await world.wait_for(RunReleased)
        assert (released.clean, released.step) == (False, 60)
        assert "could not be stored" in released.detail
        proxy.heal()


async def has_published(world: World, fact: str, count: int) -> bool:
    return len(await world.bus.read_history(f"node.n1.{fact}")) >= count
