"""How much memory ingestion and sharding take for a source of any size, and how much disk each sample.

    python -m loadtest.data --only writing --gigabytes 20 --record-bytes 10240

The source is one file of records under many names. Both jobs run as the services run them, one after the other, each in
a process of its own; only the store is a folder, in which transfers are links and shards are as long as they should be,
and empty. So it needs the size of the source on disk, and ``TMPDIR`` says where.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.events.dataset import DatasetIngested
from contracts.spec.data import DataSource
from loadtest.data.ingested import BUCKET, FolderStore

RECORDS_A_FILE = 10_000
#: What each may take, and how much more in the last quarter of its time than in the second.
MEMORY_BYTES, GROWTH_BYTES = 512 * 2**20, 64 * 2**20
Row = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True)
class Used:
    """What one job took: memory in bytes, the most in each quarter of its time; disk beside what it made."""

    quarters: tuple[int, ...]
    disk_bytes: int

    @property
    def peak(self) -> int:
        return max(self.quarters)


class Forgetful(FolderStore):
    """Keeps of a shard that it is there, and how long it is."""

    async def put_file(self, path: Path, uri: str, *, sha256: str, if_absent: bool = False) -> None:
        size_bytes = path.stat().st_size
        await super().put_file(path, uri, sha256=sha256, if_absent=if_absent)
        if "/shards/" in uri:
            os.truncate(path, 0)
            os.truncate(path, size_bytes)


def source(root: Path, records: int, record_bytes: int) -> DataSource:
    """Files of ``RECORDS_A_FILE`` records: the same bytes under several names, so that only the first takes up disk."""
    folder = root / "source"
    folder.mkdir(parents=True)
    draw = random.Random(0)
    text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=2**20))
    with (folder / "f-00000.jsonl").open("w") as file:
        for number in range(min(RECORDS_A_FILE, records)):
            at = draw.randrange(len(text) - record_bytes)
            file.write(json.dumps({"text": text[at : at + record_bytes], "n": number, "y": number % 10}) + "\n")
    for number in range(1, records // RECORDS_A_FILE):
        os.link(folder / "f-00000.jsonl", folder / f"f-{number:05d}.jsonl")
    return DataSource(source=folder.as_uri(), format="jsonl", label_field="y")


def ingest(root: Path, work: Path, data: DataSource) -> None:
    """The whole ingestion; what it says lies beside the store."""
    from services.ingestion.app import SourceWork, ingested_fact
    from services.ingestion.decoders import DecoderPool
    from services.ingestion.job import IngestionJob
    from services.ingestion.sources import FolderSource

    async def run() -> DatasetIngested:
        store: Any = FolderStore(root / "store")
        where = FolderSource.of(data.source, (root,))
        async with DecoderPool(1) as decoders:
            job = IngestionJob(BUCKET, store, where, decoders, work, data)
            return ingested_fact(SourceWork("i1", data), await job.run())

    (root / "ingested.json").write_text(asyncio.run(run()).model_dump_json())


def shard(root: Path, work: Path, data: DataSource) -> None:
    """The whole of sharding, as the service does it with two workers."""
    from services.sharding.job import ShardingJob

    store: Any = Forgetful(root / "store")
    told = DatasetIngested.model_validate_json((root / "ingested.json").read_text())
    job = ShardingJob(store, work, told, BUCKET, workers=2, disk_bytes=2**30)
    asyncio.run(job.run())


WORK: dict[str, Callable[[Path, Path, DataSource], None]] = {"ingestion": ingest, "sharding": shard}


def used(name: str, root: Path, data: DataSource) -> Used:
    """Run one job in a process of its own."""
    command = [sys.executable, "-m", "loadtest.data.memory", name, str(root), data.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
    return Used(**json.loads(done.stdout.splitlines()[-1]))


def _watched(work: Callable[[], None], folder: Path) -> Used:
    """The process's resident memory, and what lies in its folder, looked at while it works."""
    seen: list[int] = []
    disk, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            with open("/proc/self/statm") as file:
                seen.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            if len(seen) % 10 == 0:
                disk.append(_disk_bytes(folder))

    watching = threading.Thread(target=look)
    watching.start()
    try:
        work()
    finally:
        over.set()
        watching.join()
    quarter = max(1, -(-len(seen) // 4))
    return Used(tuple(max(seen[at : at + quarter]) for at in range(0, len(seen), quarter)), max(disk))


def _disk_bytes(folder: Path) -> int:
    """What a job has put down for itself: neither packs nor shards, which are bounded, nor links to the store."""
    total = 0
    for path in folder.rglob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if path.suffix in (".sqlite", ".jsonl", ".rows"):
            total += found.st_size
    return total


def measure(gigabytes: float, record_bytes: int) -> list[Row]:
    """Both jobs on a source of that size (GiB), of records of so many bytes."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="trainbus-memory-") as folder:
        root = Path(folder)
        records = max(1, round(gigabytes * 2**30 / record_bytes / RECORDS_A_FILE)) * RECORDS_A_FILE
        data = source(root, records, record_bytes)
        for name in WORK:
            found = used(name, root, data)
            quarters = ", ".join(f"{peak / 2**20:.0f}" for peak in found.quarters)
            flat = found.peak < MEMORY_BYTES and found.quarters[-1] - found.quarters[1] < GROWTH_BYTES
            measured = (
                f"{found.peak / 2**20:.0f} MB (by quarters of its time {quarters}); "
                f"{found.disk_bytes / records:.0f} bytes of disk a sample"
            )
            what = f"memory of {name}, {gigabytes:.1f} GB in {records:,} samples"
            rows.append((what, measured, "below 512 MB, and flat", flat))
    return rows


if __name__ == "__main__":
    job, where, settings = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=where) as own:
        asked = DataSource.model_validate_json(settings)
        result = _watched(lambda: WORK[job](Path(where), Path(own), asked), Path(own))
    print(json.dumps({"quarters": result.quarters, "disk_bytes": result.disk_bytes}))
