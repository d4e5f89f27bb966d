"""Shards written the slow and obvious way, to read with what is tested."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contracts import shard_index
from contracts.events.dataset import ShardFile
from trainbus.data.dataset import Dataset

Samples = Sequence[tuple[str, dict[str, bytes]]]


def write_tar(folder: Path, name: str, samples: Samples) -> ShardFile:
    """Write samples as a ustar archive; any of them may lack a field."""
    path = folder / f"{name}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = sorted({extension for _, fields in samples for extension in fields})
    places = {extension: ([0] * len(samples), [shard_index.ABSENT] * len(samples)) for extension in names}
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row, (key, fields) in enumerate(samples):
            for extension, content in sorted(fields.items()):
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                places[extension][0][row] = tar.offset + tarfile.BLOCKSIZE
                places[extension][1][row] = len(content)
                tar.addfile(info, io.BytesIO(content))
    return _with_index(folder, path, [key for key, _ in samples], places)


def write_flat(folder: Path, name: str, samples: Samples) -> ShardFile:
    """Write samples of one field and one size one after the other."""
    path = folder / f"{name}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = [fields["bin"] for _, fields in samples]
    path.write_bytes(b"".join(contents))
    sizes = [len(content) for content in contents]
    offsets = [sizes[0] * row for row in range(len(sizes))]
    return _with_index(folder, path, [key for key, _ in samples], {"bin": (offsets, sizes)})


def write(folder: Path, splits: Mapping[str, Samples], *, per_shard: int = 50, flat: bool = False) -> Dataset:
    """Write a dataset and open it."""
    manifest: dict[str, Any] = {
        "version": 2,
        "format": "tokens" if flat else "images",
        "fingerprint": "0" * 64,
        "split_config_hash": "1" * 64,
        "splits": {},
    }
    for split, samples in splits.items():
        files = [
            (write_flat if flat else write_tar)(folder, f"{split}/shard-{number:05d}", samples[at : at + per_shard])
            for number, at in enumerate(range(0, len(samples), per_shard))
        ]
        shards = [file.model_dump(mode="json") for file in files]
        manifest["splits"][split] = {"samples": len(samples), "shards": shards}  # type: ignore[index]
    content = json.dumps(manifest, sort_keys=True).encode()
    (folder / "manifest.json").write_bytes(content)
    return Dataset(folder, hashlib.sha256(content).hexdigest())


def fixed(count: int, size: int = 100) -> Samples:
    rng = np.random.default_rng(1)
    return [(f"s{number:05d}", {"bin": rng.bytes(size)}) for number in range(count)]


def ragged(count: int) -> Samples:
    """Images have sizes of their own, their class has one byte, every third has a caption."""
    rng = np.random.default_rng(2)
    samples = []
    for number in range(count):
        fields = {"png": rng.bytes(int(rng.integers(0, 900))), "cls": b"%d" % (number % 10)}
        if number % 3 == 0:
            fields["txt"] = rng.bytes(7)
        samples.append((f"s{number:05d}", fields))
    return samples


def _with_index(folder: Path, path: Path, keys: list[str], places: dict[str, tuple[list[int], list[int]]]) -> ShardFile:
    index_path = path.with_suffix(".idx")
    index_path.write_bytes(shard_index.encode(keys, places))
    return ShardFile(
        path=str(path.relative_to(folder)),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        size_bytes=path.stat().st_size,
        samples=len(keys),
        index_path=str(index_path.relative_to(folder)),
        index_sha256=hashlib.sha256(index_path.read_bytes()).hexdigest(),
        index_bytes=index_path.stat().st_size,
    )
