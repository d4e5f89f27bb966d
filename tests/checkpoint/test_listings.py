"""Parts whose files are listed in the store: committed as the others, refused for a reason, collected in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio

from contracts.events.checkpoint import CheckpointRefused, CheckpointStaged, FileListing
from contracts.manifest import MAX_LISTING_BYTES, encode_listing, files_of
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.scrubber import MAX_REPORTED_BLOBS, Scrubber
from services.checkpoint.staged_steps import StagedSteps
from services.kit.bus import Bus, Message
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from tests.checkpoint.facts import RUN, blob_uri, committed, content, sha, staged
from tests.checkpoint.test_app import Rig
from tests.manual_clock import ManualClock


@pytest_asyncio.fixture
async def rig(make_bus: Callable[..., Any], objects: ObjectStore, s3_settings: Settings) -> Rig:
    return Rig(await make_bus(), objects, s3_settings)


def listing_of(bucket: str, body: bytes, files_bytes: int = 0, **fields: object) -> FileListing:
    values = {"uri": blob_uri(bucket, body), "sha256": sha(body), "size_bytes": len(body), "files_bytes": files_bytes}
    return FileListing.model_validate({**values, **fields})


async def stage_listed(
    rig: Rig, node: str, step: int = 100, generation: int = 1, body: bytes | None = None, **fields: object
) -> Message[Any]:
    """Publish a node's part with its files in the store, where their list is ``body`` or the true one."""
    part = staged(rig.bucket, node, step, generation)
    await rig.upload(part)
    body = encode_listing(part.files) if body is None else body
    listing = listing_of(rig.bucket, body, part.size_bytes, **fields)
    await rig.objects.put(blob_uri(rig.bucket, body), body)
    return await rig.publish(part.model_copy(update={"files": (), "listing": listing}))


async def test_listed_part_makes_the_manifest_that_an_inline_one_makes(rig: Rig) -> None:
    await rig.place()
    listed = [await stage_listed(rig, node) for node in ("a", "b")]
    assert [message.event.files for message in listed] == [(), ()]
    await rig.deliver(listed)
    [commit] = await rig.facts("checkpoint_committed")
    manifest = await rig.objects.get(commit.checkpoint.uri)
    assert files_of(manifest) == tuple(file for node in ("a", "b") for file in staged(rig.bucket, node).files)
    await rig.place(2)
    await rig.deliver(await rig.stage(generation=2))
    inline = (await rig.facts("checkpoint_committed"))[1]
    assert [file.path for file in files_of(await rig.objects.get(inline.checkpoint.uri))] == [
        file.path for file in files_of(manifest)
    ]


BAD_LISTINGS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "missing": ({"uri": f"s3://models/blobs/sha256/00/{'0' * 64}", "sha256": "0" * 64}, "is not in the store", True),
    "of another size": ({"size_bytes": 7}, "is corrupt in the store", True),
    "not JSON": ({"body": b"[" * 100_000}, "cannot be read", False),
    "no files": ({"body": b'{"files": [{"path": "../x"}]}'}, "cannot be read", False),
    "too long": ({"size_bytes": MAX_LISTING_BYTES + 1}, "is not read: a list of files has", False),
    "elsewhere": ({"uri": "s3://other/list"}, "must be a blob by its hash", False),
}


@pytest.mark.parametrize("fault", BAD_LISTINGS)
async def test_bad_listing_refuses_its_checkpoint_and_stops_no_other(rig: Rig, fault: str) -> None:
    fields, reason, infrastructure_failure = BAD_LISTINGS[fault]
    if "sha256" in fields:
        fields = {**fields, "uri": fields["uri"].replace("models", rig.bucket)}
    await rig.place()
    bad = [await stage_listed(rig, "a", **fields), await stage_listed(rig, "b")]
    await rig.deliver(bad)
    await rig.deliver([await stage_listed(rig, node, 200) for node in ("a", "b")])
    [refused] = await rig.facts("checkpoint_refused")
    assert (refused.step, refused.infrastructure_failure) == (100, infrastructure_failure)
    assert "the list of files of node a" in refused.reason
    assert reason in refused.reason
    assert await rig.commits() == [(1, 200)]


async def test_corrupt_listing_is_the_fault_of_the_store(rig: Rig) -> None:
    await rig.place()
    messages = [await stage_listed(rig, node) for node in ("a", "b")]
    listing = messages[1].event.listing
    await rig.overwrite(listing.uri, b"x" * listing.size_bytes)
    await rig.deliver(messages)
    [refused] = await rig.facts("checkpoint_refused")
    assert refused.infrastructure_failure
    assert "has hash" in refused.reason


async def collect_later(rig: Rig, days: float) -> None:
    clock, rig.bus.clock = rig.bus.clock, ManualClock(start=rig.bus.clock.now() + timedelta(days=days))
    await collect_garbage(rig.bus, rig.objects, rig.settings)
    rig.bus.clock = clock


async def test_listing_and_what_it_names_stay_as_long_as_its_checkpoint(rig: Rig) -> None:
    await rig.place()
    messages = [await stage_listed(rig, node) for node in ("a", "b")]
    listings = [message.event.listing.uri for message in messages]
    blobs = [blob_uri(rig.bucket, content(rank, 100)) for rank in range(4)]
    await collect_later(rig, 3)
    assert all([await rig.objects.exists(uri) for uri in (*listings, *blobs)]), "it waits for its commit"
    await rig.deliver(messages)
    assert await rig.commits() == [(1, 100)]
    await collect_later(rig, 3)
    assert all([await rig.objects.exists(uri) for uri in listings]), "the manifest is rebuilt from them"
    # Retention lets it go: with it go the blobs and the lists.
    for step in range(200, 700, 100):
        await rig.deliver([await stage_listed(rig, node, step) for node in ("a", "b")])
    assert next(fact.step for fact in await rig.facts("checkpoint_deleted")) == 100
    await collect_later(rig, 3)
    assert not any([await rig.objects.exists(uri) for uri in (*listings, *blobs)])


async def test_unreadable_listing_does_not_stop_the_collection(rig: Rig) -> None:
    await rig.place()
    message = await stage_listed(rig, "a", body=b"{")
    await rig.objects.put(blob_uri(rig.bucket, b"garbage"), b"garbage")
    await collect_later(rig, 3)
    assert await rig.objects.exists(message.event.listing.uri)
    assert not await rig.objects.exists(blob_uri(rig.bucket, b"garbage"))


async def test_lost_manifest_is_rebuilt_from_listings(rig: Rig) -> None:
    await rig.place()
    await rig.deliver([await stage_listed(rig, node) for node in ("a", "b")])
    [commit] = await rig.facts("checkpoint_committed")
    manifest = await rig.objects.get(commit.checkpoint.uri)
    await rig.objects.delete(commit.checkpoint.uri)
    sealed = await Scrubber(rig.bus, rig.objects, rig.settings)._rebuild_manifest(commit)
    assert sealed is not None
    assert sealed.manifest == manifest


async def test_report_of_many_rotten_blobs_is_as_many_facts_as_it_takes(rig: Rig) -> None:
    """131,000 blobs of a terabyte in one fact were 14 MB, which no reader reads."""
    blobs = tuple(blob_uri(rig.bucket, b"%d" % number) for number in range(2 * MAX_REPORTED_BLOBS + 1))
    scrubber = Scrubber(rig.bus, rig.objects, rig.settings)
    await scrubber._publish_rotten(committed(100), blobs, True, "now", None)
    reports = await rig.facts("checkpoint_rotten")
    assert [len(report.blobs) for report in reports] == [MAX_REPORTED_BLOBS, MAX_REPORTED_BLOBS, 1]
    assert tuple(uri for report in reports for uri in report.blobs) == blobs


# -- which facts are read --------------------------------------------------------


def read_back(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what is read of the log from now on: followed messages by their fact, and single ones."""
    found: Counter[str] = Counter()
    follow, get_message = bus.follow, bus.get_message

    async def counting_follow(*args: Any, **kwargs: Any) -> Any:
        async for batch in follow(*args, **kwargs):
            found.update(message.subject.rsplit(".", 1)[1] for message in batch)
            yield batch

    async def counting_get(*args: Any, **kwargs: Any) -> Any:
        found["single"] += 1
        return await get_message(*args, **kwargs)

    monkeypatch.setattr(bus, "follow", counting_follow)
    monkeypatch.setattr(bus, "get_message", counting_get)
    return found


async def test_parts_of_a_step_are_found_without_reading_the_steps_before(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.place()
    for step in range(1, 41):
        await rig.deliver(await rig.stage(step))
    messages = await rig.stage(41)
    found = read_back(rig.bus, monkeypatch)
    await rig.deliver(messages)
    assert (found["checkpoint_staged"], found["single"]) == (2, 2)


async def test_waiting_parts_are_read_again_only_when_their_step_is_complete(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.place()
    found = read_back(rig.bus, monkeypatch)
    first = staged(rig.bucket, "a")
    await rig.upload(first)
    await rig.deliver(3 * [await rig.publish(first)])
    assert (found["checkpoint_staged"], found["single"]) == (1, 0)


def messages_of(*events: Any) -> list[Message[Any]]:
    return [Message(event, None, event.subject, sequence=place) for place, event in enumerate(events, 1)]  # type: ignore[arg-type]


def test_open_steps_are_the_same_in_any_order_and_number_of_reads() -> None:
    events = (
        staged("models", "a", 1),
        staged("models", "b", 1),
        committed(1),
        staged("models", "a", 2),
        CheckpointRefused(run_id=RUN, generation=1, step=2, reason="because"),
        staged("models", "b", 2),
        staged("models", "a", 3, generation=2),
    )
    steps, again = StagedSteps(), StagedSteps()
    for message in messages_of(*events):
        steps.apply(message)
    for message in (*messages_of(*events), *reversed(messages_of(*events))):
        again.apply(message)
    assert (steps.parts, steps.settled, steps.newest, steps.position) == (
        again.parts,
        again.settled,
        again.newest,
        again.position,
    )
    assert list(steps.of_generation(2)) == [3]
    assert steps.settled == {(1, 1), (1, 2)}


def test_listing_is_read_as_what_it_was_made_from() -> None:
    part: CheckpointStaged = staged("models", "a")
    assert files_of(encode_listing(part.files)) == part.files
    assert files_of(encode_listing([])) == ()
