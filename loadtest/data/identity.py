"""The same data gives the same bytes: rebuilt from shuffled listings, by one or two workers, killed midway.

    python -m loadtest.data --only identity

Each trial packs the same records in an order of its own, as another listing would, makes the dataset with one or two
workers in a process that is killed (SIGKILL) after some of the shards, goes on in another, and compares the
id and every byte under ``shards/`` and ``datasets/`` with those of a plain run.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from contracts.spec.data import DataSource
from loadtest.data.ingested import FolderStore, Record, digest, ingest
from loadtest.data.writing import shard

SHARD_BYTES = 2**20
CODE = """
import sys, time
from pathlib import Path
from loadtest.data import ingested, writing
from services.sharding import journal, job
job.Journal = lambda objects, uri: journal.Journal(objects, uri, every_s=0.0)

class Slow(ingested.FolderStore):
    # Stops to be killed once so many files (shards and indexes) are in the store.
    left = 2 * int(sys.argv[2])

    async def put_file(self, path, uri, **given):
        await super().put_file(path, uri, **given)
        Slow.left -= 1
        if Slow.left == 0:
            print("now", flush=True)
            time.sleep(600)

writing.FolderStore = Slow
writing.shard(Path(sys.argv[1]), int(sys.argv[3]))
print("now", flush=True)
"""
Row = tuple[str, str, str, bool]


def kill_and_go_on(root: Path, after_shards: int, workers: int) -> str:
    """Make the dataset in a process that is killed once so many shards are stored, then in this one; return its id."""
    command = [sys.executable, "-c", CODE, str(root), str(after_shards), str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline()
        victim.kill()
    if said.strip() != b"now":
        raise RuntimeError("the process that was to be killed ended by itself: see above")
    return shard(root, workers)


def _records(count: int) -> list[Record]:
    drawn = random.Random(3)
    return [
        Record(
            f"{i % 7}/{i:06d}",
            drawn.randbytes(drawn.randrange(20_000)),
            ("train", "validation", "test")[(i % 10 == 8) + 2 * (i % 10 == 9)],
            str(i % 7),
            drawn.choice(("png", "jpg")),
        )
        for i in range(count)
    ]


def measure(quick: bool = False) -> list[Row]:
    trials, count = (6, 500) if quick else (60, 2_000)
    records, data = _records(count), DataSource(source="s3://lake/x", format="images", shard_bytes=SHARD_BYTES)
    found: set[tuple[str, str]] = set()
    began = time.monotonic()
    for trial in range(trials):
        root = Path(tempfile.mkdtemp(prefix="trainbus-identity-"))
        try:
            drawn = random.Random(trial)
            drawn.shuffle(records)
            groups, pack_bytes = drawn.choice((1, 3, 16)), drawn.choice((2**16, 2**20, 2**26))
            store = FolderStore(root)
            ingested = ingest(store, records, data, groups=groups, pack_bytes=pack_bytes)
            (root / "ingested.json").write_text(ingested.model_dump_json())
            workers = 1 + trial % 2
            killed = trial % 3 > 0
            after = drawn.randrange(1, max(2, count * 10_000 // SHARD_BYTES))
            dataset_id = kill_and_go_on(root, after, workers) if killed else shard(root, workers)
            found.add((dataset_id, digest(store)))
        finally:
            shutil.rmtree(root)
    name = f"{trials} rebuilds: shuffled, 1 or 2 workers, {sum(t % 3 > 0 for t in range(trials))} of them killed midway"
    measured = f"{len(found)} different (in {time.monotonic() - began:.0f} s)"
    return [(name, measured, "1: the same id, every byte the same", len(found) == 1)]
