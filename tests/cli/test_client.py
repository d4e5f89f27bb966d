"""The client on a real nats-server, whose facts a test publishes in place of the services."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import trainbus
from contracts import subjects
from contracts.events.checkpoint import CheckpointCommitted
from contracts.events.model import ModelConfigured, ModelPromoted, ModelStaged
from contracts.events.node import NodeJoined
from contracts.events.run import (
    CheckpointRef,
    ProgressPoint,
    RunAccepted,
    RunCompleted,
    RunFailed,
    RunLog,
    RunProgress,
    RunQueued,
)
from contracts.spec.run import RunSpec
from contracts.spec.training import Retention
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from tests.client_address import serve_clients
from tests.lives import supported
from trainbus import AsyncClient, Client, TrainbusError
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import find_checkpoint, pin_checkpoint
from trainbus.client.errors import NotFoundError, RunFailedError, StackUnreachableError, UsageError
from trainbus.client.models import find_model, list_models
from trainbus.client.submission import locate_task
from trainbus.task import Task

RUN = "r1"
SPEC = RunSpec(name="digits", command=["true"], slots={"min": 1, "max": 4})


class Local(Task):
    """A task in this file."""


@pytest_asyncio.fixture
async def address(settings: Settings, bus: Bus) -> AsyncIterator[StackAddress]:
    async with serve_clients(settings) as served:
        yield served


@pytest_asyncio.fixture
async def client(address: StackAddress, bus: Bus) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(address=address) as connected:
        yield connected


async def accept(bus: Bus, run_id: str = RUN, name: str = "digits") -> None:
    spec = SPEC.model_copy(update={"name": name})
    await bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))


def progress(
    offset: int, points: dict[int, dict[str, float]], *, generation: int = 1, kind: Any = "training"
) -> RunProgress:
    made = tuple(ProgressPoint(step=step, time=float(step), values=values) for step, values in points.items())
    return RunProgress(run_id=RUN, generation=generation, node_id="a", rank=0, offset=offset, points=made, kind=kind)


async def test_wait_returns_the_end_of_a_run(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    waiting = asyncio.create_task(client.wait("digits", timeout_s=30))
    for fact in supported(RunCompleted(run_id=RUN, generation=1, metrics={"loss": 0.5})):
        await bus.publish(fact)
    ended = await waiting
    assert (ended.run_id, ended.state, ended.metrics) == (RUN, "completed", {"loss": 0.5})


async def test_wait_raises_where_the_run_failed_or_time_is_over(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    with pytest.raises(TimeoutError):
        await client.wait(RUN, timeout_s=0.3)
    await bus.publish(RunFailed(run_id=RUN, reason="no memory"))
    with pytest.raises(RunFailedError, match="run r1 failed: no memory") as failed:
        await client.wait(RUN)
    assert (failed.value.run_id, failed.value.state, failed.value.exit_code) == (RUN, "failed", 1)
    assert (await client.wait(RUN, check=False)).state == "failed"


async def test_metrics_have_the_newest_value_of_a_step(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    await bus.publish(progress(1, {10: {"loss": 3.0, "accuracy": 0.1}, 20: {"loss": 2.0}}))
    await bus.publish(progress(1, {20: {"loss": 1.9}, 30: {"loss": 1.0}}, generation=2))
    await bus.publish(progress(2, {30: {"cpu": 0.5}}, generation=2, kind="system"))
    await bus.publish(progress(2, {20: {"loss": 7.0}}))  # late, of the first placement
    found = await client.metrics(RUN)
    assert list(found) == ["accuracy", "loss"]
    assert [(point.step, point.value) for point in found["loss"]] == [(10, 3.0), (20, 1.9), (30, 1.0)]


async def test_events_and_logs_come_in_order(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    await bus.publish(RunQueued(run_id=RUN, next_generation=1))
    await bus.publish(RunLog(run_id=RUN, generation=1, rank=1, offset=0, lines=("one", "two")))
    assert [fact.event.fact async for fact in client.events(RUN)] == ["accepted", "queued"]
    assert [fact.text async for fact in client.events(tail=1)] == ["queued"]
    assert [line async for line in client.logs(RUN)] == [(1, "one"), (1, "two")]
    following = client.events(RUN, follow=True)
    assert [(await anext(following)).sequence for _ in range(2)] == [1, 2]
    await bus.publish(RunCompleted(run_id=RUN, generation=1))
    assert (await anext(following)).event.fact == "completed"
    await following.aclose()


async def test_a_version_of_a_model_is_found_by_its_number_and_by_an_alias(
    client: AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainbus.client.connection.PAGE_ITEMS", 2)  # the versions come in two pages
    for version in (1, 2, 3):
        promoted = ModelPromoted(model="m", version=version, run_id=f"r{version}", checkpoint_uri="s3://models/m.json")
        await bus.publish(promoted)
    await bus.publish(ModelStaged(model="m", alias="staging", version=2, run_id="r2", request_id="q"))
    record = await find_model(client.connection, "m")
    assert record.champion is not None
    found = {name: record.find(name).run_id for name in ("", "champion", "staging", "1", "v2")}
    assert found == {"": "r3", "champion": "r3", "staging": "r2", "1": "r1", "v2": "r2"}
    plain = record.to_plain()
    assert (plain["champion"], plain["aliases"], len(plain["versions"])) == (3, {"staging": 2}, 3)
    with pytest.raises(NotFoundError, match="no version 'old'; there is: 1, 2, 3, staging"):
        record.find("old")
    with pytest.raises(NotFoundError, match="there is no model 'n'; there are m"):
        await find_model(client.connection, "n")
    with pytest.raises(UsageError, match="'a/b' is no name of a model"):
        await find_model(client.connection, "a/b")


async def test_gates_that_break_a_rule_of_today_are_shown(client: AsyncClient, bus: Bus) -> None:
    gates = {"confidence": 7.0, "bounds": {"": {"max": 0.3}}, "slices": {"class": {}}}
    fact = ModelConfigured.model_validate({"model": "m", "version": 1, "gates": gates})
    await bus.publish(fact)
    for record in (await find_model(client.connection, "m"), *await list_models(client.connection)):
        assert record.gates == fact.gates
        assert record.to_plain()["gates"]["confidence"] == 7.0


async def test_a_client_of_a_url(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    assert client.address.gateway_url is not None
    async with AsyncClient(client.address.gateway_url) as other:
        assert (await other.run(RUN)).name == (await client.run(RUN)).name


async def test_runs_nodes_and_models(client: AsyncClient, bus: Bus) -> None:
    for number in range(3):
        await accept(bus, f"r{number}", f"run-{number}")
    await bus.publish(RunCompleted(run_id="r0", generation=1))
    await bus.publish(NodeJoined(node_id="n1", incarnation="i", address="a", slots=2, lease_ttl_s=3))
    await bus.publish(ModelPromoted(model="digits", version=3, run_id="r0", checkpoint_uri="s3://models/m.json"))
    assert [view.name for view in await client.runs()] == ["run-0", "run-1", "run-2"]
    assert [(node.node_id, node.slots) for node in await client.nodes()] == [("n1", 2)]
    assert [(model.model, model.version) for model in await client.models()] == [("digits", 3)]
    with pytest.raises(NotFoundError, match=r"did you mean .*run-1"):
        await client.run("run-l")
    with pytest.raises(NotFoundError, match="start of 3 runs"):
        await client.run("r")
    for change in (client.drain, client.undrain):
        with pytest.raises(NotFoundError, match="there are n1"):
            await change("n2")


async def test_a_run_that_ended_with_a_number_that_json_lacks_has_ended(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    await bus.publish(progress(0, {1: {"loss": float("nan")}}))
    reached = CheckpointRef(uri="s3://models/m", step=1, epoch=1, samples_consumed=8)
    completed = RunCompleted(run_id=RUN, generation=1, checkpoint=reached, metrics={"margin": float("-inf")})
    for fact in supported(completed):
        await bus.publish(fact)
    found = await client.run(RUN)
    assert (found.state, found.metrics["margin"]) == ("completed", float("-inf"))
    ((value,),) = [[point.value for point in points] for points in (await client.metrics(RUN)).values()]
    assert value != value


async def test_why_without_a_scheduler_answers_from_the_log(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    found = await client.why(RUN)
    assert (found.answered_by, found.unanswered, found.state) == ("log", True, "accepted")
    await bus.publish(RunFailed(run_id=RUN, reason="no memory"))
    assert (await client.why(RUN)).reason == "no memory"
    with pytest.raises(UsageError, match=r"has ended already: failed: no memory"):
        await client.cancel(RUN)


async def test_a_command_is_submitted_by_its_request(client: AsyncClient, bus: Bus) -> None:
    submitted = await client.submit(request={"command": ["true"]}, name="hello", slots="1..2", event_id="e1")
    again = await client.submit(request={"command": ["true"]}, name="hello", slots="1..2", event_id="e1")
    assert (submitted.run_id, submitted.name) == (again.run_id, "hello")
    [sent] = await bus.read_history("train.requested", stream="REQUESTS")
    assert (sent.event.command, sent.event.slots.max) == (["true"], 2)
    with pytest.raises(UsageError, match="not of the form module:Class"):
        await client.submit(".", "task.Digits")
    with pytest.raises(UsageError, match="give a project folder"):
        await client.submit()


def test_a_task_class_is_located_in_its_folder() -> None:
    assert locate_task(Local) == (Path(__file__).parents[2], f"{__name__}:Local")

    class Inner(Task):
        pass

    with pytest.raises(UsageError, match="move it to the top level"):
        locate_task(Inner)


async def test_the_sync_client_works_where_a_loop_runs(address: StackAddress, bus: Bus) -> None:
    await accept(bus)

    async def use() -> None:
        with Client(address=address) as client:
            assert [fact.event.fact for fact in client.events(RUN)] == ["accepted"]
            for fact in client.events(RUN, follow=True):
                assert fact.sequence == 1
                break
            assert client.run("digits").state == "accepted"
            with pytest.raises(NotFoundError):
                client.run("nothing")
        client.close()

    # The gateway is served by the loop of this thread.
    await asyncio.to_thread(asyncio.run, use())


def test_a_client_without_a_stack_names_the_command_to_start(tmp_path: Path) -> None:
    with pytest.raises(StackUnreachableError, match="start one with `trainbus up --data-dir"):
        Client(tmp_path)
    nowhere = StackAddress(gateway_url=f"http://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(TrainbusError, match="does not answer"):
        Client(address=nowhere)


def test_importing_trainbus_loads_neither_bus_nor_torch() -> None:
    code = "import sys, trainbus; print([name for name in ('httpx', 'torch', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        trainbus.Nothing  # noqa: B018


async def commit(bus: Bus, *steps: tuple[int, int, float]) -> None:
    """Publish committed checkpoints, each as (step, epoch, loss)."""
    for step, epoch, loss in steps:
        uri = f"s3://models/default/{RUN}/checkpoints/epoch_{epoch}/step_{step:08d}.g1.json"
        ref = CheckpointRef(uri=uri, step=step, epoch=epoch, samples_consumed=step)
        metrics = {"validation/loss": loss}
        fact = CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref, size_bytes=1, metrics=metrics)
        await bus.publish(fact)


@pytest.mark.parametrize("words", [["ps"], ["nodes"], ["show", "digits"], ["why", "digits"]], ids=" ".join)
async def test_a_question_to_a_gateway_imports_neither_events_nor_an_embedded_stack(
    address: StackAddress, bus: Bus, words: list[str]
) -> None:
    """They take longer to import than the gateway to answer."""
    await accept(bus)
    await commit(bus, (10, 1, 0.4))
    for fact in supported(RunCompleted(run_id=RUN, generation=1)):
        await bus.publish(fact)
    await bus.publish(NodeJoined(node_id="a", incarnation="i", address="h", slots=1, lease_ttl_s=3))
    script = "import sys; from trainbus.commands.main import app; app(sys.argv[1:], standalone_mode=False)"
    unwanted = ("contracts.events", "trainbus.embedded")
    listing = f"print([name for name in sys.modules if name.startswith({unwanted})])"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", f"{script}; {listing}", *words],
        env={**os.environ, "TRAINBUS_GATEWAY_URL": str(address.gateway_url)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


async def test_best_and_last_name_a_checkpoint(client: AsyncClient, bus: Bus) -> None:
    await accept(bus)
    with pytest.raises(NotFoundError, match=r"it has steps \(none\)"):
        await find_checkpoint(client.connection, "digits@best")
    await commit(bus, (10, 1, 0.4), (20, 2, 0.2), (30, 3, 0.3))
    for name, step in {"digits": 30, "digits@last": 30, "digits@best": 20, f"{RUN}@10": 10}.items():
        assert (await find_checkpoint(client.connection, name)).step == step
    with pytest.raises(UsageError, match="give RUN@STEP, RUN@best or RUN@last"):
        await find_checkpoint(client.connection, "digits@worst")
    for give in (lambda: client.restore("digits"), lambda: client.restore("digits@best", epoch=1)):
        with pytest.raises(UsageError, match="RUN@best"):
            await give()
    with pytest.raises(UsageError, match="RUN@best"):
        await pin_checkpoint(client.connection, "digits", pinned=True, reason="")


async def test_without_the_metric_of_the_request_there_is_no_best(client: AsyncClient, bus: Bus) -> None:
    spec = SPEC.model_copy(update={"retention": Retention(metric="accuracy", mode="max")})
    await bus.publish(RunAccepted(run_id=RUN, spec=spec, request_id=RUN, request_source="test"))
    await commit(bus, (10, 1, 0.4))
    with pytest.raises(NotFoundError, match="none was measured by accuracy; they have validation/loss"):
        await find_checkpoint(client.connection, f"{RUN}@best")


async def test_restore_takes_the_step_of_the_best(client: AsyncClient, bus: Bus, monkeypatch: Any) -> None:
    monkeypatch.setattr("trainbus.client.client.ANSWER_TIMEOUT_S", 0.01)
    await accept(bus)
    await commit(bus, (10, 1, 0.2), (20, 2, 0.4))
    await client.restore("digits@best")
    await client.restore("digits", epoch=2)
    stored = await bus.read_history(subjects.request("restore"), stream="REQUESTS")
    assert [each.event.step for each in stored] == [10, 20]
    with pytest.raises(NotFoundError, match=r"it has steps 10 \(epoch 1\), 20 \(epoch 2\)"):
        await client.restore("digits", epoch=3)
