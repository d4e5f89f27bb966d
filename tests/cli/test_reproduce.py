"""What can be reproduced and what cannot; and the comparison itself over a real bus and a real store."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from contracts.base import Fact, run_id_for
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointRefused, CheckpointStaged
from contracts.events.run import (
    CheckpointRef,
    Member,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunPlaced,
    RunPrepared,
    RunStarted,
)
from contracts.events.train import TrainRequested
from contracts.spec.run import RunSpec
from services.checkpoint.core.digests import state_digest
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.checkpoint.facts import placed, support
from tests.client_address import serve_clients
from trainbus.client.client import AsyncClient
from trainbus.client.errors import TrainbusError
from trainbus.client.reproduction import (
    NotReproducibleError,
    RecordedRun,
    RunComparison,
    first_different_tensor,
    plan_reproduction,
)
from trainbus.commands.reproduce import reproduce_run

SHA = "ab" * 32
SOURCE = {"source": "s3://lake/digits", "format": "images"}
BODY: dict[str, Any] = {
    "name": "digits",
    "task": "m:T",
    "code": {"uri": "s3://code/c.tar.gz", "sha256": SHA},
    "slots": {"min": 1, "max": 4},
    "data": SOURCE,
    "training": {"epochs": 2, "logical_ranks": 4, "seed": 7},
    "model": "digits",
    "evaluation": {"metric": "accuracy", "mode": "max"},
}


def reference(run_id: str, step: int, generation: int = 1) -> CheckpointRef:
    uri = f"s3://models/e/{run_id}/checkpoints/epoch_1/step_{step:08d}.g{generation}.json"
    return CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step * 8)


def committed(run_id: str, step: int, digest: str | None, exact: bool = True, generation: int = 1) -> Fact:
    return CheckpointCommitted(
        run_id=run_id,
        generation=generation,
        checkpoint=reference(run_id, step, generation),
        size_bytes=1,
        exactness="exact" if exact else "samples-exact",
        state_digest=digest,
    )


def started(run_id: str, generation: int = 1, exact: bool = True, cpu: str = "AVX512") -> Fact:
    return RunStarted(
        run_id=run_id,
        generation=generation,
        node_id="n1",
        exactness="exact" if exact else "samples-exact",
        environment={"cpu": cpu},
        environment_digest=hashlib.sha256(cpu.encode()).hexdigest(),
    )


def accepted(run_id: str, body: dict[str, Any]) -> Fact:
    spec = RunSpec.model_validate(body)
    return RunAccepted(run_id=run_id, spec=spec, request_id="q", request_source="test")


def prepared(run_id: str) -> Fact:
    return RunPrepared(run_id=run_id, dataset_id=SHA, manifest_uri="s3://datasets/m.json", train_samples=80)


def recorded(*facts: Fact, **changes: Any) -> RecordedRun:
    found = RecordedRun("r1")
    for fact in (accepted("r1", {**BODY, **changes}), prepared("r1"), *facts):
        found.apply(fact)
    return found


COMMITS = [committed("r1", step, f"{step:064x}") for step in (5, 10, 20)]
END = RunCompleted(run_id="r1", generation=1, checkpoint=reference("r1", 20))
GONE = CheckpointDeleted(run_id="r1", uri=reference("r1", 5).uri, step=5, reason="old")


def test_the_request_is_the_recorded_one_and_competes_for_nothing() -> None:
    planned = plan_reproduction(recorded(started("r1"), *COMMITS, GONE, END), None, None)
    request = planned.request
    assert (request.name, request.model, request.evaluation) == ("reproduce digits", None, None)
    assert request.data is not None
    assert request.data.model_dump()["dataset_id"] == SHA  # not ingested again: the source may have changed
    assert request.training is not None
    assert (request.training.seed, request.training.checkpoint_at_steps) == (7, (5, 10, 20))
    assert (request.resume_from, request.slots.max, planned.to_the_end) == (None, 4, True)
    assert request.tags == {"reproduces": "r1"}
    later = plan_reproduction(recorded(started("r1"), *COMMITS, GONE), 10, 2)
    assert later.request.resume_from == reference("r1", 10).uri
    assert (later.request.slots.min, later.request.slots.max, list(later.wanted)) == (2, 2, [20])
    assert later.to_the_end is False


def test_a_run_that_began_with_weights_does_so_again_unless_it_starts_from_its_own_checkpoint() -> None:
    weights = {"init_from": "s3://models/base.json", "init_exclude": ["head.*"]}
    found = recorded(started("r1"), *COMMITS, END, **weights)
    whole = plan_reproduction(found, None, None).request
    assert (whole.resume_from, whole.init_from, whole.init_exclude) == (None, "s3://models/base.json", ("head.*",))
    later = plan_reproduction(found, 10, None).request
    assert (later.resume_from, later.init_from, later.init_exclude) == (reference("r1", 10).uri, None, ())


@pytest.mark.parametrize(
    ("found", "options", "words"),
    [
        (recorded(*COMMITS, training={"epochs": 1}), (None, None), "fast mode"),
        (recorded(*COMMITS, task=None, training=None, command=["true"]), (None, None), "no training of a Task"),
        (recorded(started("r1"), committed("r1", 5, None)), (None, None), "has a state digest"),
        (recorded(started("r1")), (None, None), "committed no checkpoint yet"),
        (
            recorded(started("r1", exact=False), committed("r1", 5, "a" * 64, exact=False)),
            (None, None),
            "is not exact, since generation 1",
        ),
        (recorded(started("r1"), *COMMITS, GONE), (5, None), "step 5 of run r1 is deleted; it can start from steps 10"),
        (recorded(started("r1"), *COMMITS), (7, None), "is not there, or not exact"),
        (recorded(started("r1"), *COMMITS), (20, None), "nothing beyond step 20"),
        (recorded(started("r1"), *COMMITS), (None, 5), "give 1 to 4"),
        (RecordedRun("r1"), (None, None), "never accepted"),
    ],
)
def test_what_cannot_be_reproduced_is_said(found: RecordedRun, options: tuple[Any, Any], words: str) -> None:
    with pytest.raises(NotReproducibleError, match=words):
        plan_reproduction(found, *options)


def test_a_run_that_stopped_being_exact_is_compared_as_far_as_it_was() -> None:
    lost = [started("r1", 2, exact=False, cpu="AVX2"), committed("r1", 30, "c" * 64, exact=False, generation=2)]
    planned = plan_reproduction(recorded(started("r1"), *COMMITS, *lost), None, None)
    assert list(planned.wanted) == [5, 10, 20]
    assert "up to step 20" in planned.note
    assert "AVX2 instead of AVX512" in planned.note


def staged(step: int, generation: int = 1) -> Fact:
    part = {
        "node_id": "n",
        "ranks": (0,),
        "world_size": 1,
        "step": step,
        "epoch": 0,
        "samples_consumed": 0,
        "files": (),
    }
    return CheckpointStaged.model_validate({"run_id": "r2", "generation": generation, **part})


@pytest.mark.parametrize("differing", [(), (30,), (10, 20, 30)])
def test_what_is_committed_the_newest_first_is_compared_as_a_whole(differing: tuple[int, ...]) -> None:
    wanted = recorded(*(committed("r1", step, f"{step:064x}") for step in (10, 20, 30))).states
    comparison = RunComparison(wanted, kept=frozenset(wanted))
    for step in (10, 20, 30):
        comparison.apply(staged(step))
    for step in (30, 20, 10):
        assert not comparison.is_decided
        comparison.apply(committed("r2", step, "f" * 64 if step in differing else f"{step:064x}"))
    comparison.apply(staged(10))  # once more: it is settled
    assert comparison.is_decided
    assert sorted(comparison.compared) == [10, 20, 30]
    first = comparison.difference
    assert (first.recorded.step if first else None) == min(differing, default=None)


def test_what_is_refused_or_of_an_earlier_generation_is_not_waited_for() -> None:
    comparison = RunComparison(recorded(committed("r1", 30, "a" * 64)).states)
    refused = CheckpointRefused(run_id="r2", generation=1, step=10, reason="gone")
    again = placed(2, run="r2")
    for fact in (staged(10), refused, staged(20), *support(again), again, staged(10, 2), staged(30, 2), staged(25)):
        comparison.apply(fact)
    comparison.apply(committed("r2", 30, "a" * 64, generation=2))
    # Anybody can publish a placement: what waits is waited for all the same.
    comparison.apply(placed(9, run="r2"))
    assert not comparison.is_decided
    comparison.apply(committed("r2", 10, "b" * 64, generation=2))
    assert comparison.is_decided


def test_the_tensor_to_look_at_first() -> None:
    assert first_different_tensor(["state", "optimizer/a/exp_avg", "model/z", "ema/a", "model/b"]) == "model/b"
    assert first_different_tensor([]) is None


@dataclass
class Platform:
    """Plays the platform: answers the request of a reproduction with the facts of a training."""

    bus: Bus
    objects: ObjectStore
    #: Step -> what the second training has there, by tensor.
    states: dict[int, dict[str, str]]
    end: Any = None
    requests: list[TrainRequested] = field(default_factory=list)

    async def commit(self, run_id: str, step: int, tensors: dict[str, str], parts: int) -> Fact:
        """Store the lists of hashes as ``parts`` ranks would, and a manifest; the fact that says so."""
        files = []
        for part in range(parts):
            mine = {name: digest for number, (name, digest) in enumerate(tensors.items()) if number % parts == part}
            content = json.dumps(mine).encode()
            sha256 = hashlib.sha256(content).hexdigest()
            uri = f"s3://models/blobs/sha256/{sha256[:2]}/{sha256}"
            await self.objects.put(uri, content)
            piece = {"sha256": sha256, "size_bytes": len(content), "uri": uri}
            files.append({**piece, "path": f"digests-{part}.json", "chunks": [piece]})
        await self.objects.put(reference(run_id, step).uri, json.dumps({"files": files}).encode())
        return committed(run_id, step, state_digest(tensors))

    async def train(self) -> None:
        async for batch in self.bus.follow("REQUESTS", ("train.requested",)):
            for message in batch:
                self.requests.append(message.event)
                run_id = run_id_for(message.envelope.source, message.envelope.id)
                await self._life(run_id, message.event.run_spec)
                return

    async def _life(self, run_id: str, spec: RunSpec) -> None:
        member = Member(node_id="n1", slots=(0,), ranks=(0,))
        now = self.bus.clock.now()
        facts: list[Fact] = [
            RunAccepted(run_id=run_id, spec=spec, request_id="q", request_source="cli"),
            RunPlaced(
                run_id=run_id, generation=1, members=(member,), world_size=1, spec=spec, decided_at_sequence=0,
                decided_at=now,
            ),
            started(run_id, cpu="AVX2"),
        ]  # fmt: skip
        facts += [await self.commit(run_id, step, tensors, 2) for step, tensors in self.states.items()]
        for fact in facts:
            await self.bus.publish(fact)
        if self.end is not None:
            await self.bus.publish(self.end(run_id))


def tensors(step: int, **changes: str) -> dict[str, str]:
    names = ("model/w", "model/b", "optimizer/w/exp_avg", "state")
    return {name: hashlib.sha256(f"{step} {name} {changes.get(name, '')}".encode()).hexdigest() for name in names}


@pytest.mark.parametrize("case", ["same", "differs", "deleted", "fails"])
async def test_the_states_of_two_trainings_are_compared(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    await objects.ensure_bucket("models")
    ours = {5: tensors(5), 10: tensors(10), 20: tensors(20)}
    platform = Platform(bus, objects, dict(ours))
    for fact in (accepted("r1", BODY), prepared("r1"), started("r1")):
        await bus.publish(fact)
    for step, state in ours.items():
        await bus.publish(await platform.commit("r1", step, state, 3))
    await bus.publish(END)
    if case == "deleted":
        platform.states = {step: tensors(step, **{"model/b": "!"}) for step in ours}
        gone = {"step": 5, "uri": reference("r1", 5).uri}
        await bus.publish(CheckpointDeleted(run_id="r1", reason="old", **gone))
    if case == "differs":
        platform.states[10] = tensors(10, **{"model/b": "!", "optimizer/w/exp_avg": "!"})
    if case == "fails":
        platform.states = {5: tensors(5)}
        platform.end = lambda run_id: RunFailed(run_id=run_id, reason="the code is gone")
    training = asyncio.create_task(platform.train())
    try:
        async with (
            asyncio.timeout(60),
            serve_clients(s3_settings) as address,
            AsyncClient(address=address) as client,
        ):
            if case == "fails":
                with pytest.raises(TrainbusError, match=r"the code is gone.*1 of 3 states were compared") as failed:
                    await reproduce_run(client, "r1", start_step=None, slots=None, as_json=False)
                assert failed.value.exit_code == 2
                return
            code = await reproduce_run(client, "r1", start_step=None, slots=2, as_json=case != "same")
    finally:
        training.cancel()
    text = capsys.readouterr().out
    cancels = [message.event for message in await bus.read_history(stream="REQUESTS") if message.event.verb == "cancel"]
    if case == "same":
        assert code == 0
        assert f"identical at 3 checkpoints, final digest {state_digest(ours[20])} at step 20" in text
        assert cancels == []  # it ends by itself
        return
    said = json.loads(text)
    if case == "deleted":
        assert (code, said["step"], said["tensor_step"], said["tensor"]) == (1, 5, 10, "model/b")
        return
    assert (code, said["same"], said["step"], said["same_up_to"]) == (1, False, 10, 5)
    assert (said["tensor"], said["differing"]) == ("model/b", ["model/b", "optimizer/w/exp_avg"])
    assert said["environment"] == ["cpu: AVX2 instead of AVX512"]
    assert [cancel.run_id for cancel in cancels] == [said["reproduction"]]


def test_cancelled_is_no_end_to_build_on() -> None:
    """Of a run that was cancelled all its exact states are compared; the reproduction is then cancelled, too."""
    planned = plan_reproduction(recorded(started("r1"), *COMMITS, RunCancelled(run_id="r1", reason="x")), None, None)
    assert (list(planned.wanted), planned.to_the_end) == ([5, 10, 20], False)
