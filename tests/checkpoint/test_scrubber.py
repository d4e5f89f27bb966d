"""Scrubs that are killed go on, and remember a bounded number of blobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytest_asyncio

from contracts import topology
from contracts.envelope import Envelope
from contracts.events.train import ScrubRequested
from contracts.spec.training import Retention
from services.checkpoint import scrub_progress
from services.checkpoint.scrub_progress import ScrubProgress, SeenBlobs
from services.checkpoint.scrubber import Scrubber, job_id
from services.kit.bus import Message
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.checkpoint.facts import RUN, blob_uri, content, sha
from tests.checkpoint.test_app import Killed, Rig


@pytest_asyncio.fixture
async def rig(make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings) -> Rig:
    return Rig(await make_bus(), objects, s3_settings)


class WatchedScrubs:
    """Scrubs of one request, and which blobs they read."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig, self.read, self.kill_at = rig, list[str](), ""
        request = ScrubRequested(run_id=RUN)
        self.envelope = Envelope("scrub-1", "test", request.type, rig.bus.clock.now())
        self.message = Message(request, self.envelope, request.subject)
        hash_object = rig.objects.hash

        async def watched(uri: str) -> str:
            if uri == self.kill_at:
                raise Killed
            self.read.append(uri)
            return await hash_object(uri)

        monkeypatch.setattr(rig.objects, "hash", watched)

    async def run(self) -> list[str]:
        """Scrub in a new process; return the blobs that it read."""
        self.read.clear()
        await Scrubber(self.rig.bus, self.rig.objects, self.rig.settings).scrub(self.message)
        return sorted(self.read)

    def blobs(self, *steps: int) -> list[str]:
        return sorted(blob_uri(self.rig.bucket, content(rank, step)) for step in steps for rank in range(4))


@pytest.fixture
def scrubs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> WatchedScrubs:
    return WatchedScrubs(rig, monkeypatch)


@pytest.mark.parametrize("page", [1, 500])
async def test_killed_scrub_goes_on_behind_the_last_checkpoint_that_it_read(
    rig: Rig, scrubs: WatchedScrubs, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("services.kit.follow.BATCH", page)
    await rig.place(retention=Retention(last=9))
    for step in (10, 20, 30):
        await rig.deliver(await rig.stage(step))
    scrubs.kill_at = scrubs.blobs(20)[1]
    with pytest.raises(Killed):
        await scrubs.run()
    scrubs.kill_at = ""
    # Committed since it began: the next scrub reads it.
    await rig.deliver(await rig.stage(40))
    assert await scrubs.run() == scrubs.blobs(20, 30)
    # It is over. The same request once more is a new scrub.
    assert await scrubs.run() == scrubs.blobs(10, 20, 30, 40)


async def test_scrub_that_is_given_up_leaves_no_progress(rig: Rig, scrubs: WatchedScrubs) -> None:
    await rig.place()
    await rig.deliver(await rig.stage(10))
    scrubs.kill_at = scrubs.blobs(10)[0]
    progress = await ScrubProgress.open(rig.bus, job_id(scrubs.envelope), 7)
    await progress.save(5)
    assert (await ScrubProgress.open(rig.bus, job_id(scrubs.envelope), 9)).until == 7
    await Scrubber(rig.bus, rig.objects, rig.settings)._give_up(scrubs.message, "it fails again and again")
    assert (await ScrubProgress.open(rig.bus, job_id(scrubs.envelope), 9)).until == 9


@pytest.mark.parametrize("saved", [b"", b"{", b"[]", b'{"done": "x", "until": 1}'])
async def test_progress_that_cannot_be_read_begins_anew(rig: Rig, saved: bytes) -> None:
    bucket = await rig.bus.open_bucket(topology.JOBS)
    await bucket.put("scrubbed.j1", saved)
    progress = await ScrubProgress.open(rig.bus, "j1", 9)
    assert (progress.done, progress.until) == (0, 9)


async def test_removed_checkpoints_are_not_read(rig: Rig, scrubs: WatchedScrubs) -> None:
    await rig.place(retention=Retention(last=2, best=0))
    for step in (10, 20, 30):
        await rig.deliver(await rig.stage(step))
    assert await scrubs.run() == scrubs.blobs(20, 30)
    assert not await rig.facts("checkpoint_rotten")


def test_blobs_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_progress, "MAX_SEEN_BLOBS", 2)
    seen, hashes = SeenBlobs(), [sha(b"%d" % number) for number in range(3)]
    seen.add(hashes[0], True)
    seen.add(hashes[1], False)
    assert seen.find(hashes[0]) is True
    seen.add(hashes[2], True)
    assert [seen.find(each) for each in hashes] == [True, None, True]
    assert (seen.count, seen.rotten) == (3, 1)
