"""What the check before the upload knows of a submission's data: a few samples, and what the dataset says of all."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx

from contracts import shard_index
from contracts.datasets import FieldStatistics, Manifest
from contracts.events.dataset import ShardFile
from contracts.spec.data import DataSource
from trainbus.client.address import StackAddress
from trainbus.client.data_format import read_classes, read_samples
from trainbus.client.gateway import open_gateway

#: Seconds for the sample of a dataset that the gateway has.
FETCH_TIMEOUT_S = 5.0
#: The largest index of a shard, and the largest sample, that is fetched.
MAX_INDEX_BYTES, MAX_SAMPLE_BYTES = 16 * 2**20, 16 * 2**20


@dataclass(frozen=True, slots=True)
class SampledData:
    """Samples, their fields by extension; ``absence`` says why there is none. None: not known before ingestion."""

    samples: Sequence[Mapping[str, bytes]] = ()
    absence: str = ""
    classes: Sequence[str] | None = None
    statistics: Mapping[str, FieldStatistics] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        statistics = self.statistics
        return {
            "samples": [
                {name: base64.b64encode(value).decode() for name, value in sample.items()} for sample in self.samples
            ],
            "absence": self.absence,
            "classes": None if self.classes is None else list(self.classes),
            "statistics": None
            if statistics is None
            else {name: each.model_dump() for name, each in statistics.items()},
        }


def read_local(data: DataSource) -> SampledData:
    """Return what a source tells that lies on this machine; of another one, that it is not read."""
    if not data.source.startswith("file:"):
        return SampledData(absence=f"{data.source} is not read before it is ingested")
    path = Path(unquote(urlsplit(data.source).path))
    samples = read_samples(path, data)
    absence = "" if samples else f"no sample of {path} can be read before it is ingested"
    return SampledData(samples, absence, read_classes(path, data) or None)


async def fetch_stored(address: StackAddress | None, dataset_id: str) -> SampledData:
    """Return a sample of a dataset with its classes and statistics; only why not, if the gateway does not give them."""
    absence = f"the gateway gave no sample of dataset {dataset_id[:12]}"
    if address is None:
        return SampledData(absence=absence)
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S), open_gateway(address) as http:
            path = f"/datasets/{dataset_id}"
            manifest = Manifest.model_validate_json(await _fetch(http, f"{path}/manifest"))
            train = manifest.splits.get("train")
            sample = await _fetch_first(http, f"{path}/files", train.shards[0]) if train and train.shards else None
    except Exception:  # whatever it is, nothing is known of the Task by it
        return SampledData(absence=absence)
    if sample is None:
        return SampledData((), absence, manifest.classes, manifest.statistics)
    return SampledData((sample,), "", manifest.classes, manifest.statistics)


async def _fetch_first(http: httpx.AsyncClient, path: str, shard: ShardFile) -> Mapping[str, bytes] | None:
    """Return the first sample of a shard; None if that takes too many bytes."""
    if not 0 < shard.index_bytes <= MAX_INDEX_BYTES:
        return None
    index = shard_index.decode(memoryview(await _fetch(http, f"{path}/{quote(shard.index_path)}")))
    places = index.places(0)
    start, end = min(at for at, _ in places.values()), max(at + size for at, size in places.values())
    if not start < end <= start + MAX_SAMPLE_BYTES:
        return None
    content = await _fetch(http, f"{path}/{quote(shard.path)}", (start, end))
    return {name: content[at - start : at - start + size] for name, (at, size) in places.items()}


async def _fetch(http: httpx.AsyncClient, path: str, part: tuple[int, int] | None = None) -> bytes:
    """Return a file, or the bytes of it from the first place up to, not with, the second.

    Raises:
        ValueError: the gateway does not answer with it.
    """
    headers = {} if part is None else {"Range": f"bytes={part[0]}-{part[1] - 1}"}
    async with http.stream("GET", path, headers=headers) as answer:
        if answer.status_code != (200 if part is None else 206):
            raise ValueError(f"the gateway answers {path} with {answer.status_code}")
        return await answer.aread()
