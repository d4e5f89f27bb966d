"""Garbage collection over many blobs: time must grow no faster than the blobs, and memory must stay nearly flat.

    python -m loadtest.garbage [--blobs 100000 1000000]

What is real: the event server and all facts, the collection and its ledger, the manifests, and the files with names.
What is not: the blobs. A stand-in for the store makes them up from their number, with the names of the real layout, so
that it holds nothing of them in memory; what the requests to a store take comes on top: for each blob a thousandth of
a listing, for each that is deleted two requests. Each size runs in a process of its own, which collects three times:
all facts are new; nothing is new; a checkpoint has been removed since.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import tempfile
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted, CheckpointFile, Chunk
from contracts.events.run import CheckpointRef
from contracts.manifest import encode_listing
from loadtest.checkpoint_size import Figures, LaterClock, StandInStore, open_bus
from loadtest.common import report
from services.checkpoint.core.commit import manifest_uri
from services.checkpoint.garbage_collection import GarbageReport, collect_garbage
from services.kit.bus import Bus
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectInfo, ObjectPage, ObjectStore
from services.kit.store.uris import blob_sha256, split_uri

BUCKET, RUN, BLOB_BYTES = "models", "rgarbage", 8 * 2**20
#: Blobs of one checkpoint: a state of 8 GiB.
BLOBS_OF_MANIFEST = 1000
#: Of as many blobs one is garbage: no manifest names it.
GARBAGE_SHARE = 10
PAGE = 1000
#: A collection may take this much longer for a blob of the larger store than for one of the smaller.
MAX_GROWTH = 1.5
#: Peak memory of a collection may differ by this much between the sizes, for ten times the blobs.
MAX_EXTRA_MIB = 96.0
MIN_COMPARED_S = 1.0


class ManyBlobs(StandInStore):
    """A store with ``count`` blobs, of which it holds a byte each. The hash of a blob ends with its number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.is_gone = count, bytearray(count)

    def uri_of(self, number: int) -> str:
        """Return the address of a blob. Numbers are dealt to the 256 folders in turn, in the order of names."""
        folder, place = number % 256, number // 256
        scattered = hashlib.sha256(b"%d" % number).hexdigest()[:44]
        return f"s3://{BUCKET}/blobs/sha256/{folder:02x}/{folder:02x}{place:010x}{scattered}{number:08x}"

    def _info(self, uri: str) -> ObjectInfo:
        if not (sha256 := blob_sha256(uri)):
            return super()._info(uri)
        if self.is_gone[int(sha256[-8:], 16)]:
            raise ObjectNotFound(uri)
        return ObjectInfo(*split_uri(uri), BLOB_BYTES, "1", self.stored_at, sha256)

    async def delete(self, uri: str, *, if_match: str = "") -> None:
        if sha256 := blob_sha256(uri):
            self.is_gone[int(sha256[-8:], 16)] = 1
        else:
            await super().delete(uri)

    async def list_pages(self, uri: str, *, by_folder: bool = False) -> AsyncIterator[ObjectPage]:
        folder = uri.removeprefix(f"s3://{BUCKET}/blobs/sha256/").strip("/")
        if by_folder or len(folder) != 2:
            async for page in super().list_pages(uri, by_folder=by_folder):
                yield page
            return
        numbers = range(int(folder, 16), self.count, 256)
        for start in range(0, len(numbers), PAGE):
            there = (number for number in numbers[start : start + PAGE] if not self.is_gone[number])
            yield ObjectPage(tuple(self._info(self.uri_of(number)) for number in there))


class Trial:
    """One store of one size, and its collections."""

    def __init__(self, bus: Bus, settings: Any, blobs: int) -> None:
        self.bus, self.settings = bus, settings
        self.store, self.figures = ManyBlobs(blobs), Figures()

    async def run(self) -> dict[str, Any]:
        kept = [number for number in range(self.store.count) if number % GARBAGE_SHARE]
        steps = [await self._commit(kept[at : at + BLOBS_OF_MANIFEST]) for at in range(0, len(kept), BLOBS_OF_MANIFEST)]
        clock = cast(LaterClock, self.bus.clock)
        clock.ahead = timedelta(days=3)
        first = await self._collect("first collection")
        assert first.blobs == self.store.count - len(kept)
        second = await self._collect("second collection")
        assert (second.blobs, second.facts) == (0, 0)
        uri = steps[-1]
        await self.bus.publish(CheckpointDeleted(run_id=RUN, uri=uri, step=len(steps), reason="loadtest"))
        await self.store.delete(uri)
        clock.ahead = timedelta(days=6)
        third = await self._collect("collection after a removal")
        assert third.facts == 1
        assert sum(self.store.is_gone) == first.blobs + third.blobs
        assert 0 < third.blobs <= BLOBS_OF_MANIFEST
        return {
            "blobs": self.store.count,
            "manifests": len(steps),
            "facts": [first.facts, second.facts, third.facts],
            "deleted": [first.blobs, second.blobs, third.blobs],
            "ledger_bytes": len(self.store.objects[f"s3://{BUCKET}/gc/ledger"]),
            "stages": self.figures.stages,
        }

    async def _collect(self, name: str) -> GarbageReport:
        with self.figures.stage(name):
            return await collect_garbage(self.bus, cast(ObjectStore, self.store), self.settings)

    async def _commit(self, numbers: list[int]) -> str:
        """Store a manifest of these blobs and publish its commit; return its address."""
        step = numbers[0] + 1
        uri = manifest_uri(BUCKET, "loadtest", RUN, 1, step, 1)
        chunks = []
        for number in numbers:
            blob = self.store.uri_of(number)
            chunks.append(Chunk(sha256=blob_sha256(blob), size_bytes=BLOB_BYTES, uri=blob))
        size = BLOB_BYTES * len(chunks)
        file = CheckpointFile(path="model", sha256="0" * 64, size_bytes=size, chunks=tuple(chunks))
        self.store.objects[uri] = encode_listing([file])
        ref = CheckpointRef(uri=uri, step=step, epoch=1, samples_consumed=step)
        await self.bus.publish(CheckpointCommitted(run_id=RUN, generation=1, checkpoint=ref, size_bytes=size))
        return uri


async def measure(blobs: int) -> dict[str, Any]:
    """Return the figures of the collections of one size."""
    with tempfile.TemporaryDirectory(prefix="trainbus-garbage-") as name:
        async with open_bus(Path(name)) as (bus, settings):
            return await Trial(bus, settings, blobs).run()


def _run(blobs: int) -> dict[str, Any]:
    return asyncio.run(measure(blobs))


def find_growth(small: dict[str, Any], large: dict[str, Any]) -> list[str]:
    """Return in words which collections grow faster than the blobs in time, or at all in memory."""
    factor, problems = large["blobs"] / small["blobs"], []
    for name, before in small["stages"].items():
        after = large["stages"][name]
        if after["cpu_s"] > MAX_GROWTH * factor * max(before["cpu_s"], MIN_COMPARED_S):
            problems.append(
                f"{name}: {before['cpu_s']} s of a core became {after['cpu_s']} for {factor:g} times the blobs"
            )
        if after["extra_mib"] > before["extra_mib"] + MAX_EXTRA_MIB:
            problems.append(f"{name}: {before['extra_mib']} MiB became {after['extra_mib']}")
    return problems


def table_rows(sizes: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return a row for each collection of each size."""
    rows = []
    for size in sizes:
        what = f"{size['manifests']:,} manifests, ledger of {size['ledger_bytes']:,} bytes"
        rows.append((f"{size['blobs']:,} blobs", what, ""))
        for (name, each), facts, deleted in zip(size["stages"].items(), size["facts"], size["deleted"], strict=True):
            took = f"{each['seconds']:.1f} s, {each['extra_mib']:.0f} MiB"
            a_blob = f"{1e6 * each['cpu_s'] / size['blobs']:.0f} us of a core a blob"
            rows.append((f"  {name}", took, f"{facts:,} facts read, {deleted:,} blobs deleted, {a_blob}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blobs", type=int, nargs="+", default=[100_000, 1_000_000])
    given = parser.parse_args()
    sizes = []
    for blobs in sorted(given.blobs):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sizes.append(pool.apply(_run, (blobs,)))
        print(f"{blobs:,} blobs measured", flush=True)
    problems = [problem for small, large in pairwise(sizes) for problem in find_growth(small, large)]
    report("garbage", table_rows(sizes), {"sizes": sizes, "problems": problems})
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
