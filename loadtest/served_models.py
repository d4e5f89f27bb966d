"""Models for the load test and the tests of serving: the objects and facts of runs that were trained and evaluated.

The model is one linear layer over four numbers; the class is the larger of two sums. Its Task can be given a defect.
``loadtest/served_kinds.py`` has larger ones.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from contracts.datasets import Manifest, SplitFiles, canonical_json, dataset_uri, shard_uri, split_config_hash
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile, Chunk
from contracts.events.dataset import ShardFile
from contracts.events.model import ModelPromoted
from contracts.events.run import Artifact, CheckpointRef, RunAccepted, RunCompleted, RunEvaluated
from contracts.predictions import PREDICTIONS_FILE, PredictionsInfo, PredictionsWriter
from contracts.shard_index import encode
from contracts.spec.data import Split
from contracts.spec.run import RunSpec
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore

CLASSES = ("low", "high")
COLUMNS = ("a", "b", "c", "d")
TASK = """
import os
import signal
import time

import torch

from trainbus import Task

_grown = []


class Sums(Task):
    def __init__(self, defect="", width=4, wait_s=0.0, marker=""):
        self.defect, self.width, self.wait_s = defect, width, wait_s
        if defect == "load":
            raise RuntimeError("the vocabulary is missing")
        if defect == "killed once" and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

    def model(self):
        return torch.nn.Linear(self.width, len(self.classes))

    def decode(self, sample):
        import json

        row = json.loads(sample["json"])
        return torch.tensor([float(row[name]) for name in "abcd"]), int(sample["cls"])

    def loss(self, model, batch):
        numbers, labels = batch
        return torch.nn.functional.cross_entropy(model(numbers), labels)

    def predict(self, model, batch):
        numbers, labels = batch
        if self.wait_s:
            time.sleep(self.wait_s)
        if self.defect == "hang":
            time.sleep(3600)
        if self.defect == "leak":
            _grown.append(bytearray(b"x" * 16 * 2**20))
        if self.defect == "slow leak":
            _grown.append(bytearray(b"x" * 2**20))
        if self.defect == "raise":
            raise RuntimeError("an index is out of range")
        if self.defect == "crash later":
            _grown.append(None)
            if len(_grown) > 100:  # a warm-up asks about half as often
                os._exit(1)
        if self.defect in ("slow later", "leak later"):
            _grown.append(bytearray(b"x" * 16 * 2**20 if self.defect == "leak later" and len(_grown) > 150 else b""))
        if self.defect == "slow later" and len(_grown) > 150:
            time.sleep(0.15)
        largest = numbers.abs().max()
        if largest > 1e6 or (largest > 100 and self.defect == "crash on large"):
            os._exit(1)  # a poisonous input
        if largest > 1e5 or (largest > 100 and self.defect == "raise on large"):
            raise IndexError("index out of range in self")
        if self.defect == "raise for ever":
            _grown.extend([None] * int(largest > 100))
            if _grown:
                raise RuntimeError("CUDA error: device-side assert triggered")
        found = model(numbers).argmax(1)
        return (1 - found if self.defect == "wrong" else found), labels
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def draw_rows(count: int, seed: int = 0) -> list[dict[str, float]]:
    """Return rows of the dataset. None is so near to the border of the classes that rounding decides."""
    source = random.Random(seed)
    rows: list[dict[str, float]] = []
    while len(rows) < count:
        row = {name: round(source.uniform(-1, 1), 3) for name in COLUMNS}
        if abs(row["c"] + row["d"] - row["a"] - row["b"]) > 0.01:
            rows.append(row)
    return rows


def label(row: dict[str, float]) -> int:
    """Return the class of a row, as a sound model predicts it."""
    return int(row["c"] + row["d"] > row["a"] + row["b"])


@dataclass(frozen=True, slots=True)
class ServedKind:
    """A model that is served, and what it answers."""

    #: ``module:Class``, and the files of its code package.
    task: str
    code: Mapping[str, bytes]
    classes: tuple[str, ...]
    #: (count, seed) -> samples without labels, and the prediction of a sound model for each.
    draw: Callable[[int, int], list[tuple[dict[str, bytes], int]]]
    #: A positive factor -> weights that give the same predictions, so that no two runs have one checkpoint.
    weights: Callable[[float], dict[str, torch.Tensor]]
    #: A sample as a client sends it: the body and its type.
    encode: Callable[[dict[str, bytes]], tuple[bytes, str]]
    params: Mapping[str, Any] = field(default_factory=dict)


def _draw_sums(count: int, seed: int) -> list[tuple[dict[str, bytes], int]]:
    return [({"json": json.dumps(row).encode()}, label(row)) for row in draw_rows(count, seed)]


def _sums_weights(scale: float) -> dict[str, torch.Tensor]:
    weight = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    return {"weight": weight * scale, "bias": torch.zeros(2)}


SUMS = ServedKind(
    task="sums_task:Sums",
    code={"sums_task.py": TASK.encode()},
    classes=CLASSES,
    draw=_draw_sums,
    weights=_sums_weights,
    encode=lambda sample: (b'{"rows": [%s]}' % sample["json"], "application/json"),
)


@dataclass(slots=True)
class ModelStore:
    """Writes models and what the services publish about them."""

    bus: Bus
    objects: ObjectStore
    settings: Settings
    model: str = "sums"
    samples: int = 64
    kind: ServedKind = SUMS
    #: Version -> its promotion.
    promotions: dict[int, ModelPromoted] = field(default_factory=dict)
    dataset_id: str = ""
    _code: dict[str, str] = field(default_factory=dict)

    async def write_shared(self) -> None:
        """Write the dataset and the code."""
        await self._write_dataset()
        self._code = await self.write_code(self.kind.code)

    def _draw_targets(self) -> list[int]:
        """Return what is true of the samples of the dataset: no model is right about all of them."""
        answers, classes = [answer for _, answer in self.kind.draw(self.samples, 0)], len(self.kind.classes)
        return [(each + (number % 8 == 3)) % (classes or 256) for number, each in enumerate(answers)]

    async def _write_dataset(self) -> None:
        drawn = self.kind.draw(self.samples, 0)
        content, places = io.BytesIO(), {}  # type: ignore[var-annotated]
        keys = [f"{number:06d}" for number in range(len(drawn))]
        with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for key, (sample, _), target in zip(keys, drawn, self._draw_targets(), strict=True):
                for name, body in {**sample, "cls": str(target).encode()}.items():
                    places.setdefault(name, ([], []))
                    entry = tarfile.TarInfo(f"{key}.{name}")
                    entry.size = len(body)
                    places[name][0].append(content.tell() + tarfile.BLOCKSIZE)
                    places[name][1].append(len(body))
                    tar.addfile(entry, io.BytesIO(body))
        shard, index = content.getvalue(), encode(keys, places)
        for body in (shard, index):
            await self.objects.put(shard_uri(self.settings.bucket_datasets, sha256(body)), body)
        file = ShardFile(
            path="test/shard-00000.tar",
            sha256=sha256(shard),
            size_bytes=len(shard),
            samples=len(drawn),
            index_path="test/shard-00000.idx",
            index_sha256=sha256(index),
            index_bytes=len(index),
        )
        empty = SplitFiles(samples=0)
        manifest = Manifest(
            format="jsonl",
            source="s3://lake/sums/",
            fingerprint=sha256(b"sums"),
            split=Split(),
            split_config_hash=split_config_hash(Split()),
            classes=self.kind.classes,
            splits={"train": empty, "validation": empty, "test": SplitFiles(samples=len(drawn), shards=(file,))},
        ).to_bytes()
        self.dataset_id = sha256(manifest)
        await self.objects.put(dataset_uri(self.settings.bucket_datasets, self.dataset_id), manifest)

    async def train(
        self, run_id: str, defect: str = "", kept: Mapping[str, Any] | None = None, **params: Any
    ) -> CheckpointRef:
        """Write what a training and its evaluation leave; return the committed checkpoint.

        ``kept``: columns of the predictions, as of ``evaluate``.
        """
        own_params = {**self.kind.params, **({"defect": defect} if self.kind is SUMS else {}), **params}
        spec = RunSpec.model_validate(
            {
                "name": run_id,
                "model": self.model,
                "task": self.kind.task,
                "params": own_params,
                "code": self._code,
                "training": {"epochs": 1},
            }
        )
        await self.bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
        scale = 1.0 + int(sha256(run_id.encode())[:6], 16) / 2**24
        about = {"params": own_params, "classes": list(self.kind.classes), "dataset_id": self.dataset_id}
        files = {
            "model-0.safetensors": save(self.kind.weights(scale)),
            "state.json": json.dumps({"about": about}).encode(),
        }
        ref = await self._commit(run_id, files)
        await self.evaluate(run_id, **(kept or {}))
        return ref

    async def keep(self, run_id: str, files: dict[str, bytes], code: dict[str, bytes] | None = None) -> CheckpointRef:
        """Write what a script with this code that kept these files leaves; return the committed checkpoint."""
        package = await self.write_code(code or {"train.py": b""})
        fields = {"name": run_id, "model": self.model, "command": ["python", "train.py"], "code": package}
        spec = RunSpec.model_validate(fields)
        await self.bus.publish(RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test"))
        return await self._commit(run_id, files)

    def use_code(self, code: dict[str, str]) -> None:
        """Let the next runs of the Task have another code package."""
        self._code = code

    async def write_code(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Store a code package; return what a request says of it."""
        package = _pack(files)
        uri = f"s3://{self.settings.bucket_code}/{sha256(package)}.tar.gz"
        await self.objects.put(uri, package)
        return {"uri": uri, "sha256": sha256(package)}

    async def _commit(self, run_id: str, files: dict[str, bytes]) -> CheckpointRef:
        listed = []
        for path, content in files.items():
            name = sha256(content)
            uri = f"s3://{self.settings.bucket_models}/blobs/sha256/{name[:2]}/{name}"
            await self.objects.put(uri, content)
            chunk = Chunk(sha256=name, size_bytes=len(content), uri=uri)
            listed.append(CheckpointFile(path=path, sha256=name, size_bytes=len(content), chunks=(chunk,)))
        manifest = canonical_json({"files": [each.model_dump(mode="json") for each in listed]})
        uri = f"s3://{self.settings.bucket_models}/default/{run_id}/checkpoints/epoch_1/step_00000010.g1.json"
        await self.objects.put(uri, manifest)
        ref = CheckpointRef(uri=uri, step=10, epoch=1, samples_consumed=640, manifest_sha256=sha256(manifest))
        size_bytes = sum(map(len, files.values()))
        fact = CheckpointCommitted(
            run_id=run_id, generation=1, checkpoint=ref, size_bytes=size_bytes, manifest_sha256=sha256(manifest)
        )
        await self.bus.publish(fact)
        return ref

    async def evaluate(self, run_id: str, **columns: Any) -> None:
        """Write what an evaluation leaves; ``columns`` replace what a sound model predicts."""
        answers, targets = [answer for _, answer in self.kind.draw(self.samples, 0)], self._draw_targets()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / PREDICTIONS_FILE
            info = PredictionsInfo(dataset_id=self.dataset_id, classes=self.kind.classes, score_of="accuracy")
            with PredictionsWriter(path, info) as writer:
                keys = [f"{number:06d}" for number in range(len(answers))]
                scores = [float(answer == target) for answer, target in zip(answers, targets, strict=True)]
                kept = {"id": keys, "target": targets, "prediction": answers, "score": scores}
                if self.kind.classes:
                    kept["class"] = [self.kind.classes[target] for target in targets]
                writer.write(kept | columns)
            content = path.read_bytes()
        uri = f"s3://{self.settings.bucket_models}/evaluations/{run_id}/{PREDICTIONS_FILE}"
        await self.objects.put(uri, content)
        artifact = Artifact(name=PREDICTIONS_FILE, uri=uri, sha256=sha256(content), size_bytes=len(content))
        await self.bus.publish(RunCompleted(run_id=f"{run_id}-evaluation", generation=1, artifacts=(artifact,)))
        metrics = {"test/accuracy": 1.0}
        await self.bus.publish(RunEvaluated(run_id=run_id, evaluation_run_id=f"{run_id}-evaluation", metrics=metrics))

    async def promote(self, run_id: str, ref: CheckpointRef, *, rollback: bool = False) -> int:
        """Publish a promotion; return its version."""
        version = max(self.promotions, default=0) + 1
        previous = self.promotions.get(version - 1)
        fact = ModelPromoted(
            model=self.model,
            version=version,
            run_id=run_id,
            checkpoint_uri=ref.uri,
            dataset_id=self.dataset_id,
            metrics={"test/accuracy": 1.0},
            previous_run_id=previous.run_id if previous else None,
            rollback=rollback,
        )
        self.promotions[version] = fact
        await self.bus.publish(fact)
        return version


def _pack(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
