"""The ledger of garbage collection: saved and folded on, it decides as one that folds everything at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import topology
from contracts.base import Event
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointRefused,
    CheckpointStaged,
    FileListing,
)
from contracts.events.run import RunAccepted, RunCancelled, RunFact, RunPlaced
from contracts.manifest import MANIFEST_URI
from contracts.spec.run import RunSpec
from services.checkpoint.core.garbage import StoredManifest, orphan_manifests
from services.checkpoint.core.ledger import Ledger
from services.checkpoint.core.ledger_codec import LedgerRefused, decode, encode
from services.checkpoint.core.retention import Holds
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.ledger_store import LEDGER_KEY
from services.checkpoint.settings import CheckpointSettings
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import blob_key
from tests.checkpoint.facts import committed, placed, sha, staged
from tests.manual_clock import ManualClock

BEGIN, GRACE = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=48)
STREAM = "2026-01-01T00:00:00+00:00"


@dataclass
class WholeHistory:
    """What decides by all facts that there ever were, and forgets nothing: what a ledger is compared with."""

    facts: list[tuple[Event, datetime]] = field(default_factory=list)

    def named(self, cutoff: datetime) -> tuple[set[str], set[str], set[str]]:
        """Return the blobs that parts name, the listings whose blobs stay, and those that stay themselves."""
        ended, parts, _, generation = self._fold()
        deleted = {fact.uri: time for fact, time in self.facts if isinstance(fact, CheckpointDeleted)}
        blobs, pending, kept = set[str](), set[str](), set[str]()
        for (run, of_generation, _), (uri, time, staged_parts) in parts.items():
            listings = {part.listing.uri for part in staged_parts if part.listing is not None}
            if uri and uri not in deleted:
                kept |= listings
                continue
            is_over = run in ended or of_generation < generation.get(run, 0)
            if (deleted[uri] > cutoff) if uri else (time > cutoff or not is_over):
                blobs |= {each for part in staged_parts for file in part.files for each in file.uris}
                pending |= listings
        return blobs, pending, kept

    def orphans(self, stored: set[str], cutoff: datetime) -> set[str]:
        _, _, holds, generation = self._fold()
        uris = {type(fact): set[str]() for fact, _ in self.facts}
        for fact, _ in self.facts:
            if isinstance(fact, CheckpointCommitted):
                uris[CheckpointCommitted].add(fact.checkpoint.uri)
            if isinstance(fact, CheckpointDeleted):
                uris[CheckpointDeleted].add(fact.uri)
        found = set()
        for uri in stored:
            match = MANIFEST_URI.fullmatch(uri)
            assert match is not None
            is_superseded = int(match["generation"]) < generation.get(match["run_id"], 0)
            is_committed = uri in uris.get(CheckpointCommitted, set())
            if uri not in holds and (uri in uris.get(CheckpointDeleted, set()) or (is_superseded and not is_committed)):
                found.add(uri)
        return found

    def _fold(self) -> tuple[set[str], dict[tuple[str, int, int], Any], Holds, dict[str, int]]:
        ended, holds, generation = set[str](), Holds(), dict[str, int]()
        parts: dict[tuple[str, int, int], Any] = {}
        for fact, time in self.facts:
            alive = set(holds.runs)
            holds.apply(fact)
            ended |= alive - set(holds.runs)
            match fact:
                case RunPlaced(run_id=run, generation=number):
                    generation[run] = max(number, generation.get(run, 0))
                case CheckpointStaged(run_id=run, generation=number, step=step):
                    _, _, before = parts.get((run, number, step), ("", time, []))
                    parts[run, number, step] = ("", time, [*before, fact])
                case CheckpointCommitted(run_id=run, generation=number, checkpoint=ref):
                    _, at, before = parts.get((run, number, ref.step), ("", time, []))
                    parts[run, number, ref.step] = (ref.uri, at, before)
                case CheckpointRefused(run_id=run, generation=number, step=step):
                    parts.pop((run, number, step), None)
        return ended, parts, holds, generation


class History:
    """Random lives of a few runs, as the scheduler, agents, the checkpoint service and people write them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.facts = BEGIN, list[tuple[Event, datetime]]()
        self.generation = dict[str, int]()
        self.open, self.live = dict[tuple[str, int, int], datetime](), list[CheckpointCommitted]()
        #: Manifests in the store. Retention deletes them after the fact, or is killed between.
        self.stored = set[str]()
        self.ended, self.step = set[str](), 0

    def add(self, fact: Event) -> None:
        self.facts.append((fact, self.now))

    def advance(self) -> None:
        """Let some time pass and something happen."""
        self.now += timedelta(hours=self.random.choice((0, 1, 5, 30)))
        self.random.choice(
            (self.begin, self.place, self.stage, self.stage, self.settle, self.settle, self.delete, self.end)
        )()

    def begin(self) -> None:
        run = f"r{len(self.generation)}"
        origin = self.random.choice(self.live).checkpoint.uri if self.live and self.random.random() < 0.5 else None
        task = {"task": "t:T", "code": {"uri": "s3://code/c", "sha256": "0" * 64}, "training": {"epochs": 1}}
        spec = RunSpec.model_validate({"name": "n", **task, "init_from": origin})
        self.add(RunAccepted(run_id=run, spec=spec, request_id=run, request_source="s"))
        self.generation[run] = 0
        self.place(run)

    def place(self, run: str = "") -> None:
        if run := run or self.pick():
            self.generation[run] += 1
            self.add(placed(self.generation[run], run=run))

    def stage(self) -> None:
        if run := self.pick():
            self.step += 1
            generation = self.random.choice((self.generation[run], max(1, self.generation[run] - 1)))
            for node in ("a", "b")[: self.random.choice((1, 2, 2))]:
                fields: dict[str, Any] = {}
                if self.random.random() < 0.5:
                    name = sha(f"{run}/{self.step}/{node}".encode())
                    uri = f"s3://models/{blob_key(name)}"
                    listing = FileListing(uri=uri, sha256=name, size_bytes=1, files_bytes=1)
                    fields = {"files": (), "listing": listing}
                self.add(staged("models", node, self.step, generation, run=run, **fields))
            self.open[run, generation, self.step] = self.now
            if self.random.random() < 0.3:  # the manifest of a commit that never follows
                self.stored.add(committed(self.step, generation=generation, run=run).checkpoint.uri)

    def settle(self) -> None:
        """Commit or refuse a step. What is over for longer than the grace is settled no more."""
        fit = [key for key, time in self.open.items() if key[1] == self.generation[key[0]] and key[0] not in self.ended]
        if not fit:
            return
        run, generation, step = key = self.random.choice(fit)
        del self.open[key]
        if self.random.random() < 0.2:
            self.add(CheckpointRefused(run_id=run, generation=generation, step=step, reason="bad"))
            return
        fact = committed(step, generation=generation, run=run)
        self.stored.add(fact.checkpoint.uri)
        self.live.append(fact)
        for _ in range(self.random.choice((1, 1, 2))):
            self.add(fact)

    def delete(self) -> None:
        if self.live:
            fact = self.live.pop(self.random.randrange(len(self.live)))
            self.add(
                CheckpointDeleted(
                    run_id=fact.run_id, uri=fact.checkpoint.uri, step=fact.checkpoint.step, reason="retention"
                )
            )
            if self.random.random() < 0.6:
                self.stored.discard(fact.checkpoint.uri)

    def end(self) -> None:
        if (run := self.pick()) and self.random.random() < 0.5:
            self.add(RunCancelled(run_id=run, generation=self.generation[run], reason="by request"))
            self.ended.add(run)

    def pick(self) -> str:
        return self.random.choice([run for run in self.generation if run not in self.ended] or [""])


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_ledger_that_is_saved_between_decides_as_the_whole_history(seed: int, length: int) -> None:
    history, ledger = History(seed), Ledger()
    for _ in range(length):
        history.advance()
        if history.random.random() < 0.8:
            continue
        for sequence, (fact, time) in enumerate(history.facts[ledger.sequence :], ledger.sequence + 1):
            ledger.apply(fact, time, sequence)
        cutoff, whole = history.now - GRACE, WholeHistory(history.facts)
        ledger.forget(cutoff, history.stored)
        ledger = decode(encode(ledger, STREAM), STREAM)
        pending = list(ledger.pending(cutoff))
        parts = [history.facts[sequence - 1][0] for each in pending for sequence in each.sequences]
        blobs = {
            uri for part in parts if isinstance(part, CheckpointStaged) for file in part.files for uri in file.uris
        }
        listings = {listing.uri for each in pending for listing in each.listings}
        assert (blobs, listings, {each.uri for each in ledger.committed_listings}) == whole.named(cutoff)
        manifests = [StoredManifest(uri, cutoff - GRACE) for uri in history.stored]
        orphans = {manifest.uri for manifest in orphan_manifests(manifests, ledger, cutoff)}
        assert orphans == whole.orphans(history.stored, cutoff)
        history.stored -= orphans


def test_ledger_holds_what_lives_and_not_what_was() -> None:
    ledger, size = Ledger(), 0
    for number in range(1, 60):
        now, run, step = BEGIN + timedelta(days=number), f"r{number}", number
        facts: list[RunFact] = [
            RunAccepted(run_id=run, spec=placed().spec, request_id=run, request_source="s"),
            placed(run=run),
            *(staged("models", node, step, run=run) for node in ("a", "b")),
            committed(step, run=run),
            CheckpointDeleted(run_id=run, uri=committed(step, run=run).checkpoint.uri, step=step, reason=""),
            RunCancelled(run_id=run, generation=1, reason=""),
        ]
        for fact in facts:
            ledger.apply(fact, now, ledger.sequence + 1)
        ledger.forget(now - GRACE, set())
        if number == 40:
            size = len(encode(ledger, STREAM))
    assert len(encode(ledger, STREAM)) < size * 1.1
    assert len(ledger.deleted) == len(ledger.removed) == 2
    assert not ledger.committed


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "changed": lambda content: content[:-5] + b"x" + content[-4:],
    "something else": lambda content: b'{"version": 1}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_ledger_is_refused(damage: str) -> None:
    with pytest.raises(LedgerRefused):
        decode(DAMAGED[damage](encode(Ledger(), STREAM)), STREAM)


def test_ledger_of_another_stream_is_refused() -> None:
    with pytest.raises(LedgerRefused, match="another stream"):
        decode(encode(Ledger(), STREAM), "2026-01-02T00:00:00+00:00")


@pytest.mark.parametrize("ledger", ["there", "missing", "damaged", "ahead"])
async def test_second_collection_reads_only_new_facts(
    bus: Bus, objects: ObjectStore, s3_settings: Settings, ledger: str
) -> None:
    own = CheckpointSettings.of(s3_settings)
    bus.clock = ManualClock(start=bus.clock.now())
    for fact in (placed(), *(staged(own.bucket_models, "a", step) for step in range(10))):
        await bus.publish(fact)
    assert (await collect_garbage(bus, objects, own)).facts == 11
    await bus.publish(staged(own.bucket_models, "b", 1))
    uri = f"s3://{own.bucket_models}/{LEDGER_KEY}"
    match ledger:
        case "missing":
            await objects.delete(uri)
        case "damaged":
            await objects.put(uri, b"scrambled")
        case "ahead":
            info = await bus.js.stream_info(topology.FACTS.name)
            created = info.created
            assert isinstance(created, datetime)
            await objects.put(uri, encode(Ledger(sequence=1000), created.isoformat()))
    assert (await collect_garbage(bus, objects, own)).facts == (1 if ledger == "there" else 12)
