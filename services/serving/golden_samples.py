"""Reads the golden set: the first samples of the split that was evaluated, and the predictions that it kept."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog

from contracts import subjects
from contracts.datasets import Manifest, dataset_uri, shard_uri
from contracts.events.model import ModelPromoted
from contracts.events.run import Artifact, RunCompleted, RunEvaluated
from contracts.predictions import ID, PREDICTIONS_FILE, SCORE, TARGET, Predictions, PredictionsError
from contracts.shard_index import decode
from services.kit.bus import Bus
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.serving.core.golden import GoldenSet

log = structlog.get_logger(__name__)

SPLITS = ("test", "validation", "train")
#: In predictions the column with the name of the true class; the output of this name has the predicted one.
TRUE_CLASS = "class"
#: Golden sets that are kept on disk.
MAX_KEPT = 50
#: Samples and predictions larger than this are left out.
MAX_SAMPLE_BYTES, MAX_PREDICTIONS_BYTES = 16 * 2**20, 256 * 2**20


class GoldenSamples:
    """Reads golden sets from the log and the object store."""

    def __init__(self, bus: Bus, objects: ObjectStore, bucket: str, count: int, folder: Path) -> None:
        self._bus, self._objects, self._bucket, self._count = bus, objects, bucket, count
        #: Those that were read, so that a restart needs no object store.
        self._folder = folder

    async def fetch(self, promotion: ModelPromoted) -> Path | None:
        """Write the golden set of a promotion to a file, where it is not yet, and return that; None: there is none.

        It expects nothing where no evaluation kept predictions.
        """
        if promotion.dataset_id is None or not self._count:
            return None
        predictions = await self._find_predictions(promotion)
        parts = (promotion.checkpoint_uri, promotion.dataset_id, self._count, predictions.uri if predictions else "")
        name = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
        path = self._folder / f"{name[:32]}.json"
        if await asyncio.to_thread(read_golden, path) is not None:
            return path
        try:
            samples = await self._read_samples(promotion.dataset_id)
            expected = await self._read_expected(predictions, samples) if predictions is not None else {}
        except (ObjectNotFound, ObjectCorrupted, ValueError) as error:
            log.warning("golden set left out", model=promotion.model, version=promotion.version, error=str(error))
            return None
        await asyncio.to_thread(_write_golden, path, GoldenSet(samples, expected))
        return path

    async def _read_samples(self, dataset_id: str) -> dict[str, dict[str, bytes]]:
        manifest = Manifest.model_validate_json(await self._objects.get(dataset_uri(self._bucket, dataset_id)))
        split = next(manifest.splits[name] for name in SPLITS if manifest.splits[name].samples)
        shard = split.shards[0]
        index = decode(await self._objects.get(shard_uri(self._bucket, shard.index_sha256)))
        rows = range(min(self._count, index.samples))
        places = {index.key(row): index.places(row) for row in rows}
        bounds = [bound for fields in places.values() for at, size in fields.values() for bound in (at, at + size)]
        first, last = min(bounds), max(bounds)
        if last - first > MAX_SAMPLE_BYTES:
            raise ValueError(f"{len(places)} samples of the dataset have {last - first} bytes")
        content = bytearray()
        uri = shard_uri(self._bucket, shard.sha256)
        await self._objects.reader.read(uri, content.extend, start=first, stop=last)
        return {
            key: {name: bytes(content[at - first : at - first + size]) for name, (at, size) in fields.items()}
            for key, fields in places.items()
        }

    async def _read_expected(self, artifact: Artifact, keys: Collection[str]) -> dict[str, dict[str, Any]]:
        if (await self._objects.head(artifact.uri)).size_bytes > MAX_PREDICTIONS_BYTES:
            log.warning("predictions are too large to be compared", uri=artifact.uri)
            return {}
        return await asyncio.to_thread(_parse_predictions, await self._objects.get(artifact.uri), keys)

    async def _find_predictions(self, promotion: ModelPromoted) -> Artifact | None:
        """Return the artifact of the run that evaluated the promoted checkpoint."""
        evaluated = await self._bus.get_last_message(subjects.fact("run", promotion.run_id, RunEvaluated.fact))
        if evaluated is None:
            return None
        run_id = evaluated.event.evaluation_run_id
        completed = await self._bus.get_last_message(subjects.fact("run", run_id, RunCompleted.fact))
        artifacts = completed.event.artifacts if completed is not None else ()
        return next((each for each in artifacts if each.name.rsplit("/", 1)[-1] == PREDICTIONS_FILE), None)


def _write_golden(path: Path, golden: GoldenSet) -> None:
    """Write a golden set, whole or not at all; drop the oldest ones."""
    samples = {
        key: {name: base64.b64encode(content).decode() for name, content in sample.items()}
        for key, sample in golden.samples.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"samples": samples, "expected": dict(golden.expected)}))
    partial.replace(path)
    for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MAX_KEPT]:
        old.unlink(missing_ok=True)


def read_golden(path: Path) -> GoldenSet | None:
    """Return the golden set of a file; None where it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        samples = {
            key: {name: base64.b64decode(text) for name, text in sample.items()}
            for key, sample in content["samples"].items()
        }
        return GoldenSet(samples, content["expected"])
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _parse_predictions(content: bytes, keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return by key what the evaluation kept of these samples; what is true is no answer."""
    try:
        predictions = Predictions(content)
        names = [name for name in predictions.columns if name not in (TARGET, SCORE, TRUE_CLASS)]
        rows = [row for batch in predictions.batches(names) for row in batch.to_pylist() if row[ID] in keys]
    except PredictionsError as error:
        raise ValueError(str(error)) from error
    return {row.pop(ID): row for row in rows}
