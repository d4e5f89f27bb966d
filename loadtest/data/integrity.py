"""One bit flipped anywhere between the store and the trainer is found before the trainer sees it.

    python -m loadtest.data --only integrity

Each trial flips one bit of a dataset that is in the store, in the shared folder, in the node's cache (shard, index,
note of the fast hash, manifest) or in the manifest in the run's folder, then begins a run and reads every sample of
the train split as a rank does. Either the samples are those that were stored, or the run ends with an error that
names what is damaged; which of the two follows from the place. What is flipped in a shard that the run has been
given already is not looked for: checks are made when a run begins to use a shard, not at every step.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from contracts.datasets import shard_uri
from contracts.ranks import ShardRequestLine
from loadtest.data.stored import Stored, be_quiet, node, store
from services.kit.ports import free_ports
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.worker.cache.node_cache import CacheError
from trainbus.data.dataset import Dataset
from trainbus.data.reader import DatasetError
from trainbus.embedded.servers import S3Server

TRIALS, QUICK_TRIALS = 1000, 60
IN_STORE = ("store shard", "store index", "store manifest")
SHARED = ("shared shard", "shared index")
CACHED = ("cached shard", "cached index", "cached note", "cached manifest")
#: The rank reads it by itself and compares it with the dataset's id.
IN_RUN = ("run's manifest",)
PLACES = (*IN_STORE, *SHARED, *CACHED, *IN_RUN)


@dataclass
class Outcome:
    """How many trials ended how, by place."""

    mended: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)

    @property
    def trials(self) -> int:
        return self.mended.total() + self.refused.total() + self.unseen.total()


class Trials:
    """Flips bits of one dataset, trial after trial."""

    def __init__(self, objects: ObjectStore, settings: Settings, folder: Path, seed: int = 0) -> None:
        self._objects, self._settings, self._folder = objects, settings, folder
        self._random = random.Random(seed)
        self.outcome = Outcome()

    async def run(self, count: int) -> Outcome:
        """Do ``count`` trials, each place in turn."""
        stored = await store(self._objects, self._settings.bucket_datasets, shards=2, samples=4, sample_bytes=300)
        for number in range(count):
            await self._trial(stored, PLACES[number % len(PLACES)], self._folder / f"trial{number}")
            shutil.rmtree(self._folder / f"trial{number}")
        return self.outcome

    async def _trial(self, stored: Stored, place: str, folder: Path) -> None:
        warm = folder / "warm" if place in SHARED else None
        if place not in IN_STORE:  # there is something here from before
            await self._read(stored, folder / "cache", folder / "before", warm)
        if warm is not None:
            shutil.rmtree(folder / "cache")  # another node, that shares the folder
        mend = await self._flip(stored, place, folder)
        try:
            right = await self._read(stored, folder / "cache", folder / "run", warm, place)
            # An undamaged copy was found, and the damaged one is not there any more.
            (self.outcome.mended if right and place not in IN_STORE + IN_RUN else self.outcome.unseen)[place] += 1
        except (CacheError, DatasetError) as error:
            named = stored.dataset_id[:12] in str(error) or "shard-0000" in str(error)
            expected = place in IN_STORE + IN_RUN
            (self.outcome.refused if named and expected else self.outcome.unseen)[place] += 1
        await mend()

    async def _read(self, stored: Stored, cache_folder: Path, view: Path, warm: Path | None, place: str = "") -> bool:
        """Read as a run does; whether all samples are those that were stored."""
        async with (
            node(self._settings, cache_folder, warm=warm, objects=self._objects) as (cache, _),
            cache.pin_files() as pins,
        ):
            dataset = await cache.dataset(stored.manifest_uri, stored.dataset_id, view, pins)
            for shard in stored.shards():
                problem = await dataset.request(ShardRequestLine(rank=0, generation=1, shard=shard.path))
                if problem:
                    raise DatasetError(problem)
            if place in IN_RUN:
                _flip_file(view / "manifest.json", self._random)
            return await asyncio.to_thread(_samples_are, stored, view)

    async def _flip(self, stored: Stored, place: str, folder: Path) -> Callable[[], Awaitable[None]]:
        """Flip one bit; return what undoes it."""
        shard = self._random.choice(stored.shards())
        if place in IN_STORE:
            uri, content = {
                "store shard": (shard_uri(stored.bucket, shard.sha256), stored.contents[shard.path]),
                "store index": (shard_uri(stored.bucket, shard.index_sha256), stored.contents[shard.index_path]),
                "store manifest": (stored.manifest_uri, stored.manifest.to_bytes()),
            }[place]
            await self._objects.put(uri, _flipped(content, self._random))
            return lambda: self._objects.put(uri, content)
        if place not in IN_RUN:
            within = f"{shard.sha256[:2]}/{shard.sha256}"
            path = {
                "shared shard": folder / "warm" / within,
                "shared index": folder / "warm" / f"{within}.idx",
                "cached shard": folder / "cache" / "shards" / within,
                "cached index": folder / "cache" / "shards" / f"{within}.idx",
                "cached note": folder / "cache" / "shards" / f"{within}.json",
                "cached manifest": folder / "cache" / "datasets" / stored.dataset_id / "manifest.json",
            }[place]
            _flip_file(path, self._random)

        async def nothing() -> None:
            """It goes with the folder."""

        return nothing


def _samples_are(stored: Stored, folder: Path) -> bool:
    split = Dataset(folder, stored.dataset_id).split("train")
    place = 0
    for shard in stored.shards():
        content = stored.contents[shard.path]
        size = len(content) // shard.samples
        for row in range(shard.samples):
            if split[place].fields["bin"] != content[row * size : (row + 1) * size]:
                return False
            place += 1
    return place == len(split)


def _flipped(content: bytes, source: random.Random) -> bytes:
    bit = source.randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _flip_file(path: Path, source: random.Random) -> None:
    content = _flipped(path.read_bytes(), source)
    path.chmod(0o644)
    path.write_bytes(content)


async def _measure(count: int) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = S3Server(folder / "s3", free_ports(1)[0], "key", "secret")
        server.start()
        try:
            settings = Settings(
                s3_endpoint=server.endpoint,
                s3_access_key="key",
                s3_secret_key=Settings.model_validate({"s3_secret_key": "secret"}).s3_secret_key,
            )
            async with ObjectStore(settings) as objects:
                await objects.ensure_bucket(settings.bucket_datasets)
                return await Trials(objects, settings, folder).run(count)
        finally:
            server.stop()


def measure(quick: bool = False) -> list[tuple[str, str, str, bool]]:
    """Flip bits and say how many were found."""
    be_quiet()
    outcome = asyncio.run(_measure(QUICK_TRIALS if quick else TRIALS))
    found = outcome.mended.total() + outcome.refused.total()
    how = f"{outcome.mended.total()} mended from another copy, {outcome.refused.total()} refused by name"
    missed = f"; not found: {dict(outcome.unseen)}" if outcome.unseen else ""
    return [
        (
            f"one bit flipped in {outcome.trials} trials, {len(PLACES)} places",
            f"{found} found: {how}{missed}",
            "all found before the trainer sees them",
            found == outcome.trials,
        )
    ]
