"""What writing shards costs, against a raw copy of the same bytes with their SHA-256; and how much memory it takes.

    python -m loadtest.data --only writing [--gigabytes 20] [--record-bytes 1024]

The raw copy reads a file of all records in portions of 1 MiB, hashes it and writes it. Sharding is the whole job: it
reads the index, sorts it, takes each record from where it lies in the packs, compares its hash, writes and hashes the
shards, writes their indexes and the manifest; only the transfers to and from the store are left out. Both in seconds of
the processor, interleaved, the best of several. Memory, also of ingestion: see ``memory``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from contracts.spec.data import DataSource
from loadtest.data import memory
from loadtest.data.ingested import BUCKET, FolderStore, Record, ingest
from services.sharding.job import ShardingJob

RECORD_BYTES = 10_240
PORTION_BYTES = 2**20
TARGET = 3.0
Row = tuple[str, str, str, bool]


def records(count: int, size: int = RECORD_BYTES, *, keys: int = 0) -> Iterator[Record]:
    """Random contents; drawn from one block, since making them is not what is measured."""
    block, draw = random.Random(0).randbytes(4 * 2**20), random.Random(keys)
    for i in range(count):
        at = draw.randrange(len(block) - size)
        yield Record(f"{i % 100:03d}/{i:09d}", block[at : at + size], "train", str(i % 100), "png")


def source(root: Path, count: int, *, size: int = RECORD_BYTES, text: bool = False, groups: int = 1) -> FolderStore:
    """A store with a finished ingestion; what sharding was told of it lies beside."""
    store = FolderStore(root)
    data = DataSource(source="s3://lake/made-up", format="text" if text else "images")
    made = records(count, size)
    if text:
        made = (Record(f"t-0a1b2c/{i:09d}", r.content, "train", None, "bin") for i, r in enumerate(made))
    pack_bytes = max(8 * 2**20, min(64 * 2**20, 4 * 2**30 // groups))
    ingested = ingest(store, made, data, groups=groups, pack_bytes=pack_bytes)
    (root / "ingested.json").write_text(ingested.model_dump_json())
    return store


def shard(root: Path, workers: int = 1, disk_bytes: int = 8 * 2**30) -> str:
    """Make the dataset of ``source``; return its id."""
    from contracts.events.dataset import DatasetIngested

    ingested = DatasetIngested.model_validate_json((root / "ingested.json").read_text())
    store = FolderStore(root)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        job = ShardingJob(store, Path(folder), ingested, BUCKET, workers=workers, disk_bytes=disk_bytes)  # type: ignore[arg-type]
        return asyncio.run(job.run()).dataset_id


def raw_copy(paths: list[Path], target: Path) -> str:
    """Copy the files into one, and return the SHA-256 of it."""
    digest = hashlib.sha256()
    with target.open("wb", buffering=0) as out:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while portion := file.read(PORTION_BYTES):
                    digest.update(portion)
                    out.write(portion)
    target.unlink()
    return digest.hexdigest()


def _cpu_s(work: Callable[[], object]) -> float:
    # All threads of the process, in the system too.
    began = time.process_time()
    work()
    return time.process_time() - began


def _forget(root: Path) -> None:
    """Back to what was ingested."""
    for part in ("shards", "datasets"):
        shutil.rmtree(root / BUCKET / part, ignore_errors=True)
    for link in (root / BUCKET / "ingestions").rglob("dataset-*.json"):
        link.unlink()


def ratio(root: Path, rounds: int, workers: int = 1) -> tuple[float, float, float]:
    """Seconds of the raw copy and of sharding, the best of ``rounds``, and the one over the other."""
    packs = sorted((root / BUCKET / "ingestions").rglob("pack-*"))
    copies, jobs = [], []
    for _ in range(rounds):
        copies.append(_cpu_s(lambda: raw_copy(packs, root / "copy")))
        jobs.append(_cpu_s(lambda: shard(root, workers)))
        _forget(root)
    return min(copies), min(jobs), min(jobs) / min(copies)


def peak_bytes(root: Path, disk_bytes: int, workers: int = 2) -> int:
    """The largest resident memory of a process that does nothing but make the dataset."""
    # Not ru_maxrss, which a process inherits from the one that started it.
    code = (
        "import sys; from pathlib import Path; from loadtest.data.writing import shard\n"
        "shard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    command = [sys.executable, "-c", code, str(root), str(workers), str(disk_bytes)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    return 1024 * int(answer.stdout.splitlines()[-1])


def measure(quick: bool = False, gigabytes: float | None = None, record_bytes: int = RECORD_BYTES) -> list[Row]:
    """``gigabytes``, ``record_bytes``: the source that memory is measured with."""
    rows = memory.measure(gigabytes or (0.2 if quick else 4.0), record_bytes)
    with tempfile.TemporaryDirectory(prefix="trainbus-writing-") as folder:
        root = Path(folder)
        count, rounds = (10_000, 2) if quick else (100_000, 5)
        source(root / "ratio", count)
        for workers in (1, 2):
            copy_s, shard_s, times = ratio(root / "ratio", rounds, workers)
            name = f"{count:,} samples of 10 KB into shards, {workers} worker{'s' * (workers > 1)}"
            measured = f"{times:.2f} x ({shard_s:.2f} s; raw copy with sha256 {copy_s:.2f} s)"
            rows.append((name, measured, f"at most {TARGET} x of the CPU", times <= TARGET))
        shutil.rmtree(root / "ratio")
        count = 200_000 if quick else 3_000_000
        source(root / "windows", count, size=129, text=True)
        peak = peak_bytes(root / "windows", disk_bytes=256 * 2**20)
        measured = f"{peak / 2**20:.0f} MB for {count:,} windows"
        what = "memory of sharding, text in windows of 129 bytes"
        rows.append((what, measured, "below 512 MB", peak < memory.MEMORY_BYTES))
    return rows
