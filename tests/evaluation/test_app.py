"""The evaluation service on a real nats-server and a real S3; the test plays scheduler and workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.base import Fact, Request, run_id_for
from contracts.envelope import Envelope
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointFile, Chunk
from contracts.events.model import ModelPromoted
from contracts.events.run import (
    Artifact,
    CheckpointRef,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunFailed,
    RunPrepared,
    RunRejected,
)
from contracts.events.train import (
    ApproveRequested,
    ConfigureRequested,
    PromoteRequested,
    RollbackRequested,
    StageRequested,
    TrainRequested,
)
from contracts.predictions import PREDICTIONS_FILE, PredictionsInfo, PredictionsWriter
from contracts.spec.gates import ModelGates
from contracts.spec.run import RunSpec
from contracts.spec.training import Evaluation
from services.evaluation.app import Evaluator, build
from services.kit.bus import Bus, Message, OutgoingMessage, PoisonMessage, PublishAck
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import split_uri
from tests.lives import supported

SOURCE = "trainbus/evaluation"
D1, D2 = "1" * 64, "2" * 64


class Killed(BaseException):
    """Stands for kill -9: nothing in the service catches it."""


def evaluation_id(run_id: str) -> str:
    return run_id_for(SOURCE, f"evaluate/{run_id}")


class Rig:
    """An evaluator on real servers, and what scheduler, sharding and workers would publish."""

    def __init__(self, bus: Bus, others: Bus, objects: ObjectStore, settings: Settings) -> None:
        self.bus, self.objects, self.settings = bus, objects, settings
        #: What the other services publish on: each may publish its own events only.
        self.others = others
        self.evaluator = self.restarted()

    def restarted(self) -> Evaluator:
        self.evaluator = Evaluator(self.bus, self.objects, self.settings)
        return self.evaluator

    def checkpoint(self, run_id: str) -> CheckpointRef:
        uri = f"s3://{self.settings.bucket_models}/digits/{run_id}/checkpoints/epoch_1/step_00000100.g1.json"
        return CheckpointRef(uri=uri, step=100, epoch=1, samples_consumed=6400)

    async def publish(self, fact: Fact) -> Message[Any]:
        for each in supported(fact) if isinstance(fact, RunCompleted) else [fact]:
            await self.others.publish(each)
        return await self.last(fact.subject)

    async def last(self, subject: str) -> Message[Any]:
        found = await self.bus.get_last_message(subject)
        assert found is not None
        return found

    async def trained(self, run_id: str, dataset_id: str = D1, **fields: Any) -> Message[Any]:
        """A training from accepted to completed; its checkpoint is in the store."""
        gate = fields.pop("evaluation", Evaluation(metric="accuracy", mode="max"))
        spec = RunSpec(
            name="digits", experiment="digits", priority=5, command=["x"], evaluation=gate, model="m", **fields
        )
        await self.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
        await self.publish(
            RunPrepared(run_id=run_id, dataset_id=dataset_id, manifest_uri="s3://datasets/x", train_samples=1)
        )
        checkpoint = self.checkpoint(run_id)
        await self.objects.put(checkpoint.uri, b"{}")
        return await self.publish(RunCompleted(run_id=run_id, generation=1, checkpoint=checkpoint))

    async def requests(self) -> dict[str, TrainRequested]:
        """The evaluations asked for, by run id: like the scheduler, which knows a repeated request."""
        found = await self.bus.read_history("train.requested", stream="REQUESTS")
        return {run_id_for(each.envelope.source, each.envelope.id): each.event for each in found}

    async def accept(self, run_id: str) -> None:
        spec = (await self.requests())[run_id].run_spec
        await self.publish(RunAccepted(run_id=run_id, spec=spec, request_id="x", request_source=SOURCE))

    async def measured(self, run_id: str, accuracy: float, **fields: Any) -> Message[Any]:
        """Complete the evaluation ``run_id`` with ``accuracy``."""
        await self.accept(run_id)
        metrics = {"accuracy": accuracy, "loss": 1 - accuracy}
        return await self.publish(RunCompleted(run_id=run_id, generation=1, metrics=metrics, **fields))

    async def predictions(self, run_id: str, wrong: Iterable[int], samples: int = 400) -> Artifact:
        """Store predictions of one class that are wrong for these samples."""
        mistakes = set(wrong)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / PREDICTIONS_FILE
            with PredictionsWriter(path, PredictionsInfo(classes=("a", "b"), score_of="accuracy")) as writer:
                ids = [f"k{number}" for number in range(samples)]
                answers = [int(number in mistakes) for number in range(samples)]
                writer.write({"id": ids, "target": [0] * samples, "prediction": answers})
            content = path.read_bytes()
        uri = f"s3://{self.settings.bucket_models}/digits/{run_id}/{PREDICTIONS_FILE}"
        await self.objects.put(uri, content)
        sha256 = hashlib.sha256(content).hexdigest()
        return Artifact(name=PREDICTIONS_FILE, uri=uri, sha256=sha256, size_bytes=len(content))

    async def through(self, run_id: str, accuracy: float, **fields: Any) -> None:
        """The whole way of one training: completed, measured, decided."""
        await self.evaluator.on_run_ended(await self.trained(run_id, **fields))
        await self.evaluator.on_run_ended(await self.measured(evaluation_id(run_id), accuracy))

    async def facts(self, subject: str) -> list[Any]:
        return [received.event for received in await self.bus.read_history(subject)]

    async def champions(self) -> list[tuple[int, str]]:
        return [(fact.version, fact.run_id) for fact in await self.facts("model.m.promoted")]

    def ask(self, request: Request, request_id: str) -> Message[Any]:
        """An operator's request, as it is delivered."""
        envelope = Envelope(request_id, "test", request.type, self.bus.clock.now())
        return Message(request, envelope, request.subject)


@pytest_asyncio.fixture
async def rig(make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings) -> Rig:
    return Rig(await make_bus("evaluation"), await make_bus(), objects, s3_settings)


async def test_the_running_service_measures_reports_and_promotes(rig: Rig, s3_settings: Settings) -> None:
    service = build(s3_settings)
    task = asyncio.create_task(service.run())

    async def until(subject: str) -> Message[Any]:
        async with asyncio.timeout(90):
            async for batch in rig.bus.follow("FACTS" if subject != "train.requested" else "REQUESTS", (subject,)):
                if batch:
                    return batch[0]
        raise AssertionError

    try:
        completed = await rig.trained("ra")
        request = await until("train.requested")
        assert request.envelope.id == "evaluate/ra"
        assert (request.envelope.causation_id, request.envelope.correlation_id) == (
            completed.envelope.id,
            completed.envelope.correlation_id or completed.envelope.id,
        )
        spec = request.event
        assert (spec.kind, spec.slots.max, spec.priority, spec.name) == ("evaluate", 1, 15, "evaluate digits")
        assert (spec.evaluate.run_id, spec.evaluate.split) == ("ra", "test")
        assert spec.evaluate.checkpoint_uri == spec.resume_from == rig.checkpoint("ra").uri
        assert spec.data.dataset_id == D1
        predictions = json.dumps({"labels": [0, 1], "predictions": [0, 1], "classes": ["a", "b"]}).encode()
        uri = f"s3://{s3_settings.bucket_models}/predictions"
        await rig.objects.put(uri, predictions)
        artifact = Artifact(
            name="predictions.json", uri=uri, sha256=hashlib.sha256(predictions).hexdigest(), size_bytes=1
        )
        await rig.measured(evaluation_id("ra"), 0.9, artifacts=(artifact,))
        promotion = await until("run.ra.promoted")
        assert promotion.envelope.correlation_id == request.envelope.correlation_id
    finally:
        service.stopping.set()
        await task
    assert await rig.champions() == [(1, "ra")]
    [evaluated] = await rig.facts("run.ra.evaluated")
    assert evaluated.metrics["accuracy"] == 0.9
    assert [each.name for each in evaluated.report] == ["report.md", "report.html", "report.json", "comparison.png"]
    for each in evaluated.report:
        assert await rig.objects.hash(each.uri) == each.sha256
        assert each.uri.startswith(f"s3://{s3_settings.bucket_models}/digits/ra/evaluation/")


async def test_a_better_one_replaces_the_champion_and_a_worse_one_does_not(rig: Rig) -> None:
    await rig.through("ra", 0.90)
    await rig.through("rb", 0.95)
    await rig.through("rc", 0.93)
    assert await rig.champions() == [(1, "ra"), (2, "rb")]
    [refused] = await rig.facts("run.rc.not_promoted")
    assert refused.reason == "accuracy 0.93 against the champion's 0.95 (rb): not better"
    [evaluated] = await rig.facts("run.rc.evaluated")
    assert (evaluated.champion_run_id, evaluated.champion_metrics["accuracy"]) == ("rb", 0.95)
    assert (await rig.facts("model.m.promoted"))[1].previous_run_id == "ra"


async def test_a_kill_before_and_after_each_publish_and_every_event_twice(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.through("ra", 0.9)
    send = rig.bus.send
    kills: list[tuple[str, str]] = []

    async def dying(message: OutgoingMessage) -> PublishAck:
        if (message.id, "before") not in kills:
            kills.append((message.id, "before"))
            raise Killed
        ack = await send(message)
        if (message.id, "after") not in kills:
            kills.append((message.id, "after"))
            raise Killed
        return ack

    async def deliver(message: Message[Any]) -> None:
        monkeypatch.setattr(rig.bus, "send", dying)
        for _ in range(20):
            try:
                await rig.restarted().on_run_ended(message)
                break
            except Killed:
                continue
        monkeypatch.setattr(rig.bus, "send", send)
        await rig.evaluator.on_run_ended(message)

    for run_id, accuracy in (("rb", 0.95), ("rc", 0.91)):
        await deliver(await rig.trained(run_id))
        await deliver(await rig.measured(evaluation_id(run_id), accuracy))
    steps = ["evaluate/rb", "run/rb/evaluated", "model/m/promoted/2", "run/rb/promoted"]
    steps += ["evaluate/rc", "run/rc/evaluated", "run/rc/not_promoted"]
    assert kills == [(step, when) for step in steps for when in ("before", "after")]
    assert set(await rig.requests()) == {evaluation_id(run_id) for run_id in ("ra", "rb", "rc")}
    assert await rig.champions() == [(1, "ra"), (2, "rb")]
    published = [received.envelope.id for received in await rig.bus.read_history("run.rb.*", "run.rc.*")]
    settled = ["run/rb/evaluated", "run/rb/promoted", "run/rc/evaluated", "run/rc/not_promoted"]
    assert [event_id for event_id in published if event_id.split("/")[2].endswith(("evaluated", "promoted"))] == settled


async def test_two_promotions_at_once_are_decided_one_after_the_other(
    rig: Rig, make_bus: Callable[..., Any], objects: ObjectStore
) -> None:
    other = Rig(await make_bus("evaluation"), await make_bus(), objects, rig.settings)
    for run_id in ("ra", "rb"):
        await rig.evaluator.on_run_ended(await rig.trained(run_id))
    ended = [await rig.measured(evaluation_id("ra"), 0.8), await rig.measured(evaluation_id("rb"), 0.9)]
    await asyncio.gather(rig.evaluator.on_run_ended(ended[0]), other.evaluator.on_run_ended(ended[1]))
    champions = await rig.champions()
    assert champions[-1][1] == "rb"
    assert [version for version, _ in champions] == list(range(1, len(champions) + 1))
    assert len({run_id for _, run_id in champions}) == len(champions)
    for run_id in ("ra", "rb"):
        settled = await rig.facts(f"run.{run_id}.promoted") + await rig.facts(f"run.{run_id}.not_promoted")
        assert len(settled) == 1


async def test_the_champion_changes_between_decision_and_promotion(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.evaluator.on_run_ended(await rig.trained("ra"))
    ended = await rig.measured(evaluation_id("ra"), 0.8)
    send = rig.bus.send

    async def rival_first(message: OutgoingMessage) -> PublishAck:
        if message.type == ModelPromoted.type:
            monkeypatch.setattr(rig.bus, "send", send)
            rival = ModelPromoted(
                model="m", version=1, run_id="rx", checkpoint_uri=rig.checkpoint("rx").uri, dataset_id=D1,
                metrics={"accuracy": 0.99},
            )  # fmt: skip
            await rig.bus.publish(rival, Envelope("rival", "test", "x", rig.bus.clock.now()))
            # Its id is that of the version we are about to publish: the server must not store ours as a repetition.
        return await send(message)

    monkeypatch.setattr(rig.bus, "send", rival_first)
    await rig.evaluator.on_run_ended(ended)
    assert await rig.champions() == [(1, "rx")]
    [refused] = await rig.facts("run.ra.not_promoted")
    assert "against the champion's 0.99 (rx)" in refused.reason


async def test_a_champion_of_another_dataset_is_measured_on_this_one(rig: Rig) -> None:
    await rig.through("ra", 0.99)
    await rig.evaluator.on_run_ended(await rig.trained("rb", dataset_id=D2))
    champion_id = run_id_for(SOURCE, f"evaluate/ra/{D2}")
    request = (await rig.requests())[champion_id]
    assert request.evaluate is not None
    assert (request.evaluate.run_id, request.evaluate.checkpoint_uri) == ("ra", rig.checkpoint("ra").uri)
    assert request.data is not None
    await rig.evaluator.on_run_ended(await rig.measured(evaluation_id("rb"), 0.8))
    assert await rig.facts("run.rb.evaluated") == [], "it waits for the champion's numbers"
    await rig.evaluator.on_run_ended(await rig.measured(champion_id, 0.7))
    assert await rig.champions() == [(1, "ra"), (2, "rb")]
    [evaluated] = await rig.facts("run.rb.evaluated")
    assert evaluated.champion_metrics["accuracy"] == 0.7


@pytest.mark.parametrize("end", [RunFailed, RunCancelled, RunRejected])
async def test_an_evaluation_that_gives_nothing_promotes_nothing(rig: Rig, end: type[Fact]) -> None:
    await rig.evaluator.on_run_ended(await rig.trained("ra"))
    run_id = evaluation_id("ra")
    if end is not RunRejected:
        await rig.accept(run_id)
    await rig.evaluator.on_run_ended(await rig.publish(end(run_id=run_id, reason="out of memory")))  # type: ignore[call-arg]
    [refused] = await rig.facts("run.ra.not_promoted")
    assert "out of memory" in refused.reason
    assert run_id in refused.reason
    assert await rig.champions() == []


#: A request's rules may have become stricter since the run was accepted: its recorded spec breaks one.
REFUSED_ENV = {"not-an-identifier": "1"}


async def test_a_candidate_whose_recorded_spec_is_refused_is_not_promoted(rig: Rig) -> None:
    await rig.evaluator.on_run_ended(await rig.trained("ra", env=REFUSED_ENV))
    assert await rig.requests() == {}
    [refused] = await rig.facts("run.ra.not_promoted")
    assert "the evaluation of run ra cannot be requested" in refused.reason
    assert "env name 'not-an-identifier' is not an identifier" in refused.reason
    await rig.restarted().settle_all()
    assert len(await rig.facts("run.ra.not_promoted")) == 1


async def test_a_candidate_is_not_promoted_when_the_champions_recorded_spec_is_refused(rig: Rig) -> None:
    await rig.evaluator.on_run_ended(await rig.trained("ra", env=REFUSED_ENV))
    await rig.evaluator.on_promote_requested(rig.ask(PromoteRequested(model="m", run_id="ra"), "p1"))
    await rig.evaluator.on_run_ended(await rig.trained("rb"))
    [refused] = await rig.facts("run.rb.not_promoted")
    assert "the evaluation of run ra cannot be requested" in refused.reason
    assert "publish promote.requested" in refused.reason
    assert await rig.champions() == [(1, "ra")]


async def test_what_does_not_compete_is_left_alone(rig: Rig) -> None:
    spec = RunSpec(name="x", command=["x"])
    await rig.publish(RunAccepted(run_id="rplain", spec=spec, request_id="1", request_source="t"))
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="rplain", generation=1)))
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="runknown", generation=1)))
    await rig.evaluator.on_run_ended(await rig.publish(RunFailed(run_id="rbad", reason="x")))
    assert await rig.requests() == {}
    competing = RunSpec(name="x", command=["x"], model="m", evaluation=Evaluation(metric="a", mode="max"))
    await rig.publish(RunAccepted(run_id="rnone", spec=competing, request_id="1", request_source="t"))
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="rnone", generation=1)))
    [refused] = await rig.facts("run.rnone.not_promoted")
    assert "without a committed checkpoint" in refused.reason


async def test_an_operator_promotes_and_rolls_back_once_for_each_request(rig: Rig) -> None:
    await rig.through("ra", 0.9)
    await rig.through("rb", 0.8)
    promote = rig.ask(PromoteRequested(model="m", run_id="rb", reason="it is smaller"), "p1")
    back = rig.ask(RollbackRequested(model="m", reason="it was worse"), "b1")
    await rig.evaluator.on_promote_requested(promote)
    await rig.evaluator.on_rollback_requested(back)
    # Delivered again, late and to another instance.
    await rig.restarted().on_promote_requested(promote)
    await rig.restarted().on_rollback_requested(back)
    assert await rig.champions() == [(1, "ra"), (2, "rb"), (3, "ra")]
    last = (await rig.facts("model.m.promoted"))[-1]
    assert (last.rollback, last.reason, last.previous_run_id) == (True, "it was worse", "rb")
    assert last.metrics["accuracy"] == 0.9
    assert [fact.reason for fact in await rig.facts("run.rb.promoted")] == ["it is smaller"]
    # Who comes next is compared with the one that was brought back.
    await rig.through("rc", 0.85)
    assert (await rig.champions())[-1] == (3, "ra")


async def test_a_manifest_that_is_not_the_committed_one_is_never_promoted(rig: Rig) -> None:
    for run_id in ("rwhole", "rbent"):
        checkpoint = rig.checkpoint(run_id)
        sha256 = hashlib.sha256(b"{}").hexdigest()
        await rig.publish(
            CheckpointCommitted(
                run_id=run_id, generation=1, checkpoint=checkpoint, size_bytes=2, manifest_sha256=sha256
            )
        )
    await rig.through("rwhole", 0.8)
    await rig.evaluator.on_run_ended(await rig.trained("rbent"))
    await rig.objects.put(rig.checkpoint("rbent").uri, b'{"files": []}')
    await rig.evaluator.on_run_ended(await rig.measured(evaluation_id("rbent"), 0.99))
    assert await rig.champions() == [(1, "rwhole")]
    [refused] = await rig.facts("run.rbent.not_promoted")
    assert "is not the one that was committed" in refused.reason
    with pytest.raises(PoisonMessage, match="is not the one that was committed"):
        await rig.evaluator.on_promote_requested(rig.ask(PromoteRequested(model="m", run_id="rbent"), "p"))


async def commit(rig: Rig, run_id: str, step: int, loss: float | None) -> CheckpointRef:
    """Commit a checkpoint of a run; its manifest is in the store."""
    uri = f"s3://{rig.settings.bucket_models}/digits/{run_id}/checkpoints/epoch_1/step_{step:08d}.g1.json"
    checkpoint = CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step)
    await rig.objects.put(uri, b"{}")
    metrics = {} if loss is None else {"validation/loss": loss}
    await rig.publish(
        CheckpointCommitted(run_id=run_id, generation=1, checkpoint=checkpoint, size_bytes=2, metrics=metrics)
    )
    return checkpoint


async def accepted(rig: Rig, run_id: str, **fields: Any) -> None:
    spec = RunSpec(name="digits", experiment="digits", command=["x"], model="m", **fields)
    await rig.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
    await rig.publish(RunPrepared(run_id=run_id, dataset_id=D1, manifest_uri="s3://datasets/x", train_samples=1))


#: ``evaluation.checkpoint`` -> the step that is measured and promoted of a run that overfits after step 20.
@pytest.mark.parametrize(("choice", "step"), [(None, 20), ("best", 20), ("final", 40)])
async def test_the_checkpoint_that_was_asked_for_is_measured_and_promoted(rig: Rig, choice: Any, step: int) -> None:
    await accepted(rig, "ra", evaluation=Evaluation(metric="accuracy", mode="max", checkpoint=choice))
    refs = [await commit(rig, "ra", at, loss) for at, loss in ((10, 0.9), (20, 0.3), (30, 0.5), (40, 0.8))]
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="ra", generation=1, checkpoint=refs[-1])))
    request = (await rig.requests())[evaluation_id("ra")]
    expected = next(ref.uri for ref in refs if ref.step == step)
    assert request.evaluate is not None
    assert request.evaluate.checkpoint_uri == request.resume_from == expected
    assert (request.evaluate.metric, request.evaluate.mode) == ("accuracy", "max")
    ended = await rig.measured(evaluation_id("ra"), 0.9)
    # Whatever retention does meanwhile, what was measured is what is promoted.
    await rig.publish(CheckpointDeleted(run_id="ra", uri=refs[0].uri, step=10, reason="not the best"))
    await rig.restarted().on_run_ended(ended)
    [promoted] = await rig.facts("model.m.promoted")
    assert promoted.checkpoint_uri == expected
    [evaluated] = await rig.facts("run.ra.evaluated")
    report = next(each for each in evaluated.report if each.name == "report.md")
    assert f"Checkpoint: step {step}" in (await rig.objects.get(report.uri)).decode()


async def test_the_best_checkpoint_of_a_run_without_a_measured_one_is_not_promoted(rig: Rig) -> None:
    await accepted(rig, "ra", evaluation=Evaluation(metric="accuracy", mode="max", checkpoint="best"))
    ref = await commit(rig, "ra", 10, None)
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="ra", generation=1, checkpoint=ref)))
    [refused] = await rig.facts("run.ra.not_promoted")
    assert (
        "no checkpoint of the run was measured by validation/loss or accuracy: set retention.metric" in refused.reason
    )
    assert await rig.requests() == {}


async def test_an_operator_promotes_the_best_that_retention_has_left(rig: Rig) -> None:
    await accepted(rig, "ra")
    refs = [await commit(rig, "ra", at, loss) for at, loss in ((10, 0.1), (20, 0.3), (30, 0.5))]
    await rig.publish(CheckpointDeleted(run_id="ra", uri=refs[0].uri, step=10, reason="by hand"))
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id="ra", generation=1, checkpoint=refs[-1])))
    await rig.evaluator.on_promote_requested(rig.ask(PromoteRequested(model="m", run_id="ra"), "p1"))
    [promoted] = await rig.facts("model.m.promoted")
    assert promoted.checkpoint_uri == refs[1].uri


async def with_artifact(rig: Rig, run_id: str, content: bytes) -> str:
    """Commit a checkpoint with one artifact, train and complete its run; return where the artifact is stored."""
    await accepted(rig, run_id, evaluation=Evaluation(metric="accuracy", mode="max"))
    sha256 = hashlib.sha256(content).hexdigest()
    uri = f"s3://{rig.settings.bucket_models}/blobs/sha256/{sha256[:2]}/{sha256}"
    await rig.objects.put(uri, content)
    chunk = Chunk(sha256=sha256, size_bytes=len(content), uri=uri)
    file = CheckpointFile(path="artifacts/labels.txt", sha256=sha256, size_bytes=len(content), chunks=(chunk,))
    manifest = json.dumps({"files": [file.model_dump(mode="json")]}).encode()
    ref = rig.checkpoint(run_id)
    await rig.objects.put(ref.uri, manifest)
    await rig.publish(
        CheckpointCommitted(
            run_id=run_id,
            generation=1,
            checkpoint=ref,
            size_bytes=1,
            manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        )
    )
    await rig.evaluator.on_run_ended(await rig.publish(RunCompleted(run_id=run_id, generation=1, checkpoint=ref)))
    return uri


async def test_the_registered_version_names_its_artifacts_and_one_flipped_byte_refuses_it(rig: Rig) -> None:
    content = b"ant bee cow"
    await with_artifact(rig, "ra", content)
    await rig.evaluator.on_run_ended(await rig.measured(evaluation_id("ra"), 0.8))
    [promoted] = await rig.facts("model.m.promoted")
    assert promoted.artifacts == {"labels.txt": hashlib.sha256(content).hexdigest()}
    uri = await with_artifact(rig, "rb", b"ant bee dog")
    bucket, key = split_uri(uri)
    await rig.objects._client.put_object(Bucket=bucket, Key=key, Body=b"ant bee dof")
    await rig.evaluator.on_run_ended(await rig.measured(evaluation_id("rb"), 0.9))
    assert await rig.champions() == [(1, "ra")]
    [refused] = await rig.facts("run.rb.not_promoted")
    assert "the artifact 'labels.txt' of run rb is not the one that was committed" in refused.reason
    with pytest.raises(PoisonMessage, match=r"the artifact 'labels\.txt' of run rb is not the one"):
        await rig.evaluator.on_promote_requested(rig.ask(PromoteRequested(model="m", run_id="rb"), "p"))


BAD_REQUESTS: dict[str, tuple[Request, str]] = {
    "no such run": (PromoteRequested(model="m", run_id="rnone"), "there is no run 'rnone'"),
    "not completed": (PromoteRequested(model="m", run_id="rgoing"), "has not completed"),
    "another model": (PromoteRequested(model="other", run_id="ra"), "was trained for model 'm'"),
    "nothing before": (RollbackRequested(model="m"), "nothing to roll back to"),
    "no model": (RollbackRequested(model="none"), "has no champion"),
    "checkpoint gone": (PromoteRequested(model="m", run_id="rgone"), "no longer in the store"),
}


async def test_a_request_that_cannot_be_met_says_why(rig: Rig) -> None:
    await rig.through("ra", 0.9)
    spec = RunSpec(name="x", command=["x"])
    await rig.publish(RunAccepted(run_id="rgoing", spec=spec, request_id="1", request_source="t"))
    await rig.trained("rgone")
    await rig.objects.delete(rig.checkpoint("rgone").uri)
    for case, (request, words) in BAD_REQUESTS.items():
        received = rig.ask(request, case)
        on_request: Any = (
            rig.evaluator.on_promote_requested
            if isinstance(request, PromoteRequested)
            else rig.evaluator.on_rollback_requested
        )
        with pytest.raises(PoisonMessage, match=words):
            await on_request(received)
    assert await rig.champions() == [(1, "ra")]


async def test_a_candidate_that_fails_harms_no_other(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's message is handled while the store loses one candidate's report, and the candidate goes on later."""
    await rig.evaluator.on_run_ended(await rig.trained("rbad"))
    await rig.evaluator.on_run_ended(await rig.trained("rgood"))
    put = rig.objects.put

    async def put_others(uri: str, *args: Any, **fields: Any) -> None:
        if "/rbad/evaluation/" in uri:
            raise RuntimeError("the disk is full")
        await put(uri, *args, **fields)

    monkeypatch.setattr(rig.objects, "put", put_others)
    bad = await rig.measured(evaluation_id("rbad"), 0.8)
    good = await rig.measured(evaluation_id("rgood"), 0.9)
    await rig.evaluator.on_run_ended(good)
    await complete_elsewhere(rig, "rother")
    await rig.evaluator.on_promote_requested(rig.ask(PromoteRequested(model="other", run_id="rother"), "p0"))
    assert await rig.champions() == [(1, "rgood")]
    with pytest.raises(RuntimeError, match="the disk is full"):
        await rig.evaluator.on_run_ended(bad)
    monkeypatch.setattr(rig.objects, "put", put)
    assert await rig.restarted().settle_all() == {}
    [refused] = await rig.facts("run.rbad.not_promoted")
    assert "against the champion's 0.9 (rgood)" in refused.reason


async def complete_elsewhere(rig: Rig, run_id: str) -> None:
    """A run that competes for nothing, completed with a checkpoint."""
    await rig.publish(
        RunAccepted(run_id=run_id, spec=RunSpec(name="x", command=["x"]), request_id="1", request_source="t")
    )
    checkpoint = rig.checkpoint(run_id)
    await rig.objects.put(checkpoint.uri, b"{}")
    await rig.publish(RunCompleted(run_id=run_id, generation=1, checkpoint=checkpoint))


async def configured(rig: Rig, request_id: str, **gates: Any) -> None:
    request = ConfigureRequested(model="m", gates=ModelGates.model_validate(gates))
    await rig.evaluator.on_configure_requested(rig.ask(request, request_id))


async def test_a_candidate_waits_for_approval_and_is_promoted_once(rig: Rig) -> None:
    await configured(rig, "c1", approval=True, threshold=0.5)
    await rig.through("ra", 0.9)
    await rig.through("rb", 0.4)
    assert await rig.champions() == []
    [pending] = await rig.facts("run.ra.promotion_pending")
    assert (pending.awaits, [gate.name for gate in pending.gates]) == (
        "approval",
        ["threshold", "improvement", "approval"],
    )
    [refused] = await rig.facts("run.rb.not_promoted")
    assert refused.reason == "accuracy 0.4 is below the threshold 0.5"
    assert {gate.name: gate.passed for gate in refused.gates} == {
        "threshold": False,
        "improvement": True,
        "approval": None,
    }
    approve = rig.ask(ApproveRequested(model="m", run_id="ra", user="ada", reason="looked at it"), "a1")
    await rig.evaluator.on_approve_requested(approve)
    await rig.restarted().on_approve_requested(approve)
    assert await rig.champions() == [(1, "ra")]
    assert len(await rig.facts("model.m.approved")) == 1
    [promoted] = await rig.facts("run.ra.promoted")
    assert "approved by ada: looked at it" in promoted.reason
    assert len(await rig.facts("run.ra.promotion_pending")) == 1
    # A decline settles the next one; the champion stays.
    await rig.through("rc", 0.95)
    decline = ApproveRequested(model="m", run_id="rc", approved=False, user="bob")
    await rig.evaluator.on_approve_requested(rig.ask(decline, "a2"))
    [declined] = await rig.facts("run.rc.not_promoted")
    assert "declined by bob" in declined.reason
    assert await rig.champions() == [(1, "ra")]


async def test_who_waits_is_judged_again_when_the_champion_or_the_gates_change(rig: Rig) -> None:
    await rig.through("ra", 0.7)
    await configured(rig, "c1", approval=True)
    await rig.through("rb", 0.8)
    await rig.through("rc", 0.9)
    await rig.evaluator.on_approve_requested(rig.ask(ApproveRequested(model="m", run_id="rc"), "a1"))
    assert await rig.champions() == [(1, "ra"), (2, "rc")]
    [refused] = await rig.facts("run.rb.not_promoted")
    assert "against the champion's 0.9 (rc): not better" in refused.reason
    await rig.through("rd", 0.95)
    await configured(rig, "c2")
    assert (await rig.champions())[-1] == (3, "rd")


async def test_who_waits_is_judged_from_the_files_once_for_each_change(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    get = rig.objects.get

    async def counted(uri: str, *args: Any, **fields: Any) -> bytes:
        reads.append(uri.rpartition("/")[2])
        return await get(uri, *args, **fields)

    async def read_by_sweeps() -> list[str]:
        """Return what the change before and three sweeps after it have read."""
        for _ in range(3):
            await rig.evaluator.settle_all()
        found = [name for name in reads if name == PREDICTIONS_FILE]
        reads.clear()
        return found

    monkeypatch.setattr(rig.objects, "get", counted)
    for run_id, wrong in (("ra", 80), ("rb", 40)):
        await configured(rig, f"c-{run_id}", approval=run_id == "rb")
        await rig.evaluator.on_run_ended(await rig.trained(run_id))
        artifacts = (await rig.predictions(run_id, range(wrong)),)
        accuracy = 1 - wrong / 400
        await rig.evaluator.on_run_ended(await rig.measured(evaluation_id(run_id), accuracy, artifacts=artifacts))
    assert await read_by_sweeps() == [PREDICTIONS_FILE] * 3, "those of the first alone, then of both"
    await configured(rig, "c1", approval=True, threshold=0.5)
    assert await read_by_sweeps() == [PREDICTIONS_FILE] * 2
    rig.restarted()
    assert await read_by_sweeps() == [PREDICTIONS_FILE] * 2, "a new process has to read them once"
    assert len(await rig.facts("run.rb.promotion_pending")) == 1


async def test_a_confident_gate_measures_a_champion_without_predictions_again(rig: Rig) -> None:
    await rig.through("ra", 0.9)
    await configured(rig, "c1", confidence=0.95)
    await rig.evaluator.on_run_ended(await rig.trained("rb"))
    own = await rig.predictions("rb", wrong=range(20))
    await rig.evaluator.on_run_ended(await rig.measured(evaluation_id("rb"), 0.95, artifacts=(own,)))
    champion_id = run_id_for(SOURCE, f"evaluate/ra/{D1}")
    assert champion_id in await rig.requests()
    assert await rig.facts("run.rb.evaluated") == []
    other = await rig.predictions("ra", wrong=range(40))
    await rig.evaluator.on_run_ended(await rig.measured(champion_id, 0.9, artifacts=(other,)))
    [evaluated] = await rig.facts("run.rb.evaluated")
    [improvement] = evaluated.gates
    assert improvement.name == "improvement"
    assert improvement.passed
    assert improvement.interval[0] > 0
    assert (await rig.champions())[-1] == (2, "rb")


async def test_aliases_and_gates_are_set_once_and_bad_requests_say_why(rig: Rig) -> None:
    await rig.through("ra", 0.9)
    stage = rig.ask(StageRequested(model="m", alias="staging", version=1), "s1")
    await rig.evaluator.on_stage_requested(stage)
    await rig.restarted().on_stage_requested(stage)
    assert [(fact.alias, fact.version, fact.run_id) for fact in await rig.facts("model.m.staged")] == [
        ("staging", 1, "ra")
    ]
    await configured(rig, "c1", threshold=0.5)
    await configured(rig, "c1", threshold=0.5)
    [fact] = await rig.facts("model.m.configured")
    assert (fact.version, fact.gates.threshold) == (1, 0.5)
    handlers: dict[str, tuple[Any, Any, str]] = {
        "stale": (
            rig.evaluator.on_configure_requested,
            ConfigureRequested(model="m", gates=ModelGates(), replaces=0),
            "at version 1, not 0",
        ),
        "no version": (
            rig.evaluator.on_stage_requested,
            StageRequested(model="m", alias="a", version=9),
            "no version 9; there is: 1",
        ),
        "no alias": (rig.evaluator.on_stage_requested, StageRequested(model="m", alias="a"), "no alias 'a'"),
        "no candidate": (
            rig.evaluator.on_approve_requested,
            ApproveRequested(model="m", run_id="ra"),
            "no open candidate",
        ),
    }
    for case, (handle, request, words) in handlers.items():
        with pytest.raises(PoisonMessage, match=words):
            await handle(rig.ask(request, case))


async def test_many_candidates_at_once_with_kills_make_one_order(
    rig: Rig, make_bus: Callable[..., Any], objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two instances handle every message, and each is killed again and again before or after it publishes."""
    count = 12
    rivals = [rig, Rig(await make_bus("evaluation"), await make_bus(), objects, rig.settings)]
    ended = [await rig.trained(f"r{number:02d}") for number in range(count)]
    await rig.evaluator.settle_all()
    ended += [await rig.measured(evaluation_id(f"r{number:02d}"), 0.5 + number / 100) for number in range(count)]
    chance = random.Random(3)
    for each in rivals:

        async def dying(message: OutgoingMessage, send: Any = each.bus.send) -> PublishAck:
            if chance.random() < 0.15:
                raise Killed
            ack = await send(message)
            if chance.random() < 0.15:
                raise Killed
            return ack

        monkeypatch.setattr(each.bus, "send", dying)

    async def handle(instance: Rig, messages: list[Message[Any]]) -> None:
        for message in messages:
            while True:
                try:
                    await instance.evaluator.on_run_ended(message)
                    break
                except Killed:
                    instance.restarted()

    shuffled = chance.sample(ended[count:], count)
    await asyncio.gather(handle(rivals[0], shuffled), handle(rivals[1], shuffled[::-1]))
    champions = await rig.champions()
    assert [version for version, _ in champions] == list(range(1, len(champions) + 1))
    order = [run_id for _, run_id in champions]
    assert order == sorted(set(order)), "each champion is better than the one before, and champion once"
    assert order[-1] == f"r{count - 1:02d}"
    for number in range(count):
        run_id = f"r{number:02d}"
        settled = await rig.facts(f"run.{run_id}.promoted") + await rig.facts(f"run.{run_id}.not_promoted")
        assert len(settled) == 1
        assert len(await rig.facts(f"run.{run_id}.evaluated")) == 1
        assert (run_id in order) == (settled[0].fact == "promoted")
