"""A trial of promotions: candidates that end at once, while the services that promote and show them are killed.

Evaluation, tracking and the gateway are processes of their own. Each is killed by SIGKILL right after something that
they publish or write appears, and started again, until it has been killed as often as it may be. Then all of them
come to an end undisturbed, and the log, MLflow and the gateway must tell one story.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from typing import Any

from contracts import topology
from contracts.base import Fact, run_id_for
from contracts.events.model import ModelPromoted
from contracts.events.run import (
    CheckpointRef,
    RunAccepted,
    RunCompleted,
    RunEvaluated,
    RunNotPromoted,
    RunPrepared,
    RunPromoted,
    RunTracked,
)
from contracts.spec.run import RunSpec
from contracts.spec.training import Evaluation, EvaluationTarget
from services.kit.bus import Bus
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.tracking.settings import TrackingSettings
from services.tracking.store import EVENT_ID, Store
from tests.lives import supported
from tests.tracking.conftest import World, eventually
from trainbus import AsyncClient
from trainbus.client.address import StackAddress
from trainbus.client.errors import TrainbusError
from trainbus.client.models import find_model

MODEL = "m"
DATASET_ID = "1" * 64
SOURCE = "trainbus/evaluation"
SETTLED = (RunPromoted, RunNotPromoted)
#: Each fact, or version in MLflow, kills a service with this chance.
KILL_CHANCE = 0.4
#: Seconds after which a killed holder of a lease is taken for dead; the default is for busy clusters.
LEASE_TTL_S = 2.0


@dataclass(slots=True)
class PromotionTrial:
    """Candidates, the processes that judge and show them, and the kills that these have left to suffer."""

    bus: Bus
    objects: ObjectStore
    settings: Settings
    candidates: int
    #: Service -> how often it is killed.
    kills: Mapping[str, int]
    seed: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _gateway_port: int = field(default_factory=lambda: free_ports(1)[0])

    @property
    def run_ids(self) -> list[str]:
        return [f"r{number:03d}" for number in range(self.candidates)]

    def accuracy_of(self, run_id: str) -> float:
        """Every second candidate is worse than the one before it."""
        number = int(run_id[1:])
        return 0.5 + (number if number % 2 == 0 else number - 3) / (4 * self.candidates)

    async def run(self) -> list[ModelPromoted]:
        """Return the promotions, once everything is settled and was found to agree."""
        await self._publish_candidates()
        async with self._running():
            await asyncio.gather(self._kill_by_facts(), self._kill_by_versions(), self._wait_settled())
            promotions = await self._check_log()
            await World(self.bus, self._tracking_settings, self._store).settled()
            self._check_mlflow(promotions)
            await self._check_gateway(promotions)
        return promotions

    # -- candidates ---------------------------------------------------------

    async def _publish_candidates(self) -> None:
        """Publish every training and its evaluation; the ends of the trainings come last, all at once."""
        ends = []
        for run_id in self.run_ids:
            uri = f"s3://{self.settings.bucket_models}/digits/{run_id}/checkpoints/epoch_1/step_00000100.g1.json"
            await self.objects.put(uri, b"{}")
            evaluation = Evaluation(metric="accuracy", mode="max")
            spec = RunSpec(name="digits", experiment="digits", command=["x"], evaluation=evaluation, model=MODEL)
            *before, end = await self._publish_run(
                run_id, spec, checkpoint=CheckpointRef(uri=uri, step=100, epoch=1, samples_consumed=6400)
            )
            target = EvaluationTarget(run_id=run_id, checkpoint_uri=uri, split="test")
            measuring = spec.model_copy(update={"kind": "evaluate", "evaluate": target})
            metrics = {"accuracy": self.accuracy_of(run_id)}
            evaluation_id = run_id_for(SOURCE, f"evaluate/{run_id}")
            before += await self._publish_run(evaluation_id, measuring, metrics=metrics)
            for fact in before:
                await self.bus.publish(fact)
            ends.append(end)
        for end in ends:
            await self.bus.publish(end)

    async def _publish_run(self, run_id: str, spec: RunSpec, **result: Any) -> list[Any]:
        """Publish that a run is accepted and prepared; return the rest of its life."""
        await self.bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
        prepared = RunPrepared(run_id=run_id, dataset_id=DATASET_ID, manifest_uri="s3://datasets/x", train_samples=1)
        await self.bus.publish(prepared)
        return supported(RunCompleted(run_id=run_id, generation=1, **result), spec)

    # -- processes and kills ------------------------------------------------

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        try:
            for service in ("evaluation", "tracking", "gateway"):
                self._spawn(service)
            yield
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _spawn(self, service: str) -> None:
        settings, secret = self.settings, self.settings.s3_secret_key
        own = {
            "NATS_URL": settings.nats_url,
            "DATA_DIR": str(settings.data_dir),
            "HTTP_PORT": "-1",
            "LEASE_TTL_S": str(LEASE_TTL_S),
            "GATEWAY_PORT": str(self._gateway_port),
            "S3_ENDPOINT": settings.s3_endpoint or "",
            "S3_ACCESS_KEY": settings.s3_access_key or "",
            "S3_SECRET_KEY": secret.get_secret_value() if secret else "",
            **{f"BUCKET_{name}": getattr(settings, f"bucket_{name.lower()}") for name in ("MODELS", "CODE", "LAKE")},
        }
        environment = {**os.environ, **{f"TRAINBUS_{name}": value for name, value in own.items()}}
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with (settings.data_dir / f"{service}.log").open("ab") as log:
            command = [sys.executable, "-m", f"services.{service}"]
            self._processes[service] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _kill_perhaps(self, service: str, chance: random.Random) -> None:
        if self.killed[service] >= self.kills.get(service, 0) or chance.random() >= KILL_CHANCE:
            return
        process = self._processes[service]
        assert process.poll() is None, f"{service} has ended by itself: its log is in {self.settings.data_dir}"
        process.kill()
        process.wait()
        self.killed[service] += 1
        self._spawn(service)

    async def _kill_by_facts(self) -> None:
        """Kill who has just published a fact, and the gateway, which has just read it."""
        chance = random.Random(self.seed)
        published: dict[type[Fact], str] = {
            RunEvaluated: "evaluation",
            ModelPromoted: "evaluation",
            RunTracked: "tracking",
        }
        watched: tuple[type[Fact], ...] = (*published, *SETTLED)
        filters = tuple(fact.subject_filter() for fact in watched)
        open_ = set(self.run_ids)
        async for batch in self.bus.follow(topology.FACTS.name, filters):
            for received in batch:
                if isinstance(received.event, SETTLED):
                    open_.discard(received.event.run_id)
                for service in (published.get(type(received.event), ""), "gateway"):
                    self._kill_perhaps(service, chance)
            if not open_:
                return

    async def _kill_by_versions(self) -> None:
        """Kill tracking while it registers versions."""
        chance, seen = random.Random(self.seed + 1), 0
        while self.killed["tracking"] < self.kills.get("tracking", 0):
            if (found := self._count_versions()) > seen:
                seen = found
                self._kill_perhaps("tracking", chance)
            if seen and await self._is_tracking_done():
                return  # fewer versions than kills
            await asyncio.sleep(0.02)

    def _count_versions(self) -> int:
        path = self.settings.data_dir / "mlflow.db"
        # The database may be put there at this moment.
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT count(*) FROM model_versions").fetchone()[0])
        return 0

    async def _is_tracking_done(self) -> bool:
        info = await self.bus.js.consumer_info(topology.TRACKING.stream, topology.TRACKING.name)
        settled = await self._find_settled()
        return len(settled) == self.candidates and not info.num_pending and not info.num_ack_pending

    # -- one story ----------------------------------------------------------

    async def _find_settled(self) -> set[str]:
        facts = await self.bus.read_history(*(fact.subject_filter() for fact in SETTLED))
        return {received.event.run_id for received in facts}

    async def _wait_settled(self) -> None:
        async def is_settled() -> bool:
            return len(await self._find_settled()) == self.candidates

        await eventually(is_settled)

    async def _check_log(self) -> list[ModelPromoted]:
        """Return the promotions: one order, each better than the one before, and one outcome of each candidate."""
        promotions = [each.event for each in await self.bus.read_history(ModelPromoted.subject_filter())]
        assert [each.version for each in promotions] == list(range(1, len(promotions) + 1))
        accuracies = [self.accuracy_of(each.run_id) for each in promotions]
        assert accuracies == sorted(set(accuracies)), "each champion is better than the one before"
        assert accuracies[-1] == max(map(self.accuracy_of, self.run_ids))
        for fact in (RunEvaluated, *SETTLED):
            found = Counter(each.event.run_id for each in await self.bus.read_history(fact.subject_filter()))
            assert set(found.values()) <= {1}, f"{fact.fact} twice: {found.most_common(3)}"
        promoted = [each.event for each in await self.bus.read_history(RunPromoted.subject_filter())]
        assert {each.run_id: each.version for each in promoted} == {each.run_id: each.version for each in promotions}
        return promotions

    def _check_mlflow(self, promotions: list[ModelPromoted]) -> None:
        client = self._store._mlflow
        # More than one page of versions is no concern of a trial of this size.
        versions = client.search_model_versions(f"name = '{MODEL}'", max_results=1000)
        found = {int(each.version): (each.tags["trainbus.version"], each.tags[EVENT_ID]) for each in versions}
        assert len(found) == len(versions)
        assert found == {each.version: (str(each.version), each.event_id) for each in promotions}
        assert dict(client.get_registered_model(MODEL).aliases) == {"champion": len(promotions)}

    async def _check_gateway(self, promotions: list[ModelPromoted]) -> None:
        expected = [(each.version, each.run_id) for each in promotions]
        address = StackAddress(gateway_url=f"http://127.0.0.1:{self._gateway_port}")
        promoted = {each.run_id for each in promotions}
        verdicts = {run_id: "promoted" if run_id in promoted else "not_promoted" for run_id in self.run_ids}

        async def agrees() -> bool:
            with suppress(TrainbusError):
                async with AsyncClient(address=address) as client:
                    record = await find_model(client.connection, MODEL)
                    runs = {each: await client.connection.get(f"/training-runs/{each}") for each in self.run_ids}
                versions = [(each.version, each.run_id) for each in record.versions]
                return versions == expected and {each: run["verdict"] for each, run in runs.items()} == verdicts
            return False

        await eventually(agrees)

    @property
    def _tracking_settings(self) -> TrackingSettings:
        return TrackingSettings.of(self.settings)

    @property
    def _store(self) -> Store:
        return Store(self._tracking_settings.tracking_uri, None)
