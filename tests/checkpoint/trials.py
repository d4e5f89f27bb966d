"""Trials of the commit protocol: agents, the service, retention and collection, killed and failed at any call.

Every call that a part makes on the object store or the bus goes through a ``Faults`` proxy, which can kill the caller
just before or just after it, or make it fail before or after it was carried out (an answer that got lost). What was
killed starts again with empty memory, and messages are delivered until they are handled, as the bus does. After every
fault, and at the end, ``Trial.check`` reads the log and the store and holds the promises against them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from contracts import subjects
from contracts.base import Fact
from contracts.envelope import Envelope
from contracts.events.checkpoint import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointFile,
    CheckpointPinned,
    CheckpointRefused,
    CheckpointStaged,
    Chunk,
)
from contracts.events.train import PinRequested
from contracts.manifest import files_of
from contracts.spec.training import Retention
from services.checkpoint.app import Committer
from services.checkpoint.garbage_collection import collect_garbage
from services.checkpoint.keeper import Keeper
from services.checkpoint.settings import CheckpointSettings
from services.kit import chunks
from services.kit.bus import Bus, Conflict, Message, PoisonMessage, TransientError
from services.kit.store.errors import ObjectCorrupted, ObjectExists, ObjectNotFound
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import blob_sha256, split_uri
from tests.checkpoint.facts import NODES, blob_uri, placed, sha, support
from tests.manual_clock import ManualClock

#: What a part may call; each call is a line of the protocol at which it can be hit.
OBJECT_CALLS = ("put", "get", "head", "hash", "delete", "exists")
BUS_CALLS = ("publish", "last", "history", "last_sequence", "publish_event")
#: The lines of the protocol: an agent's, the commit's, retention's, a pin's, the collection's.
LINES = (
    "put blob", "publish checkpoint_staged",
    "last", "history", "head blob", "get blob", "put manifest", "get manifest", "publish checkpoint_committed",
    "publish checkpoint_refused", "last_sequence", "publish checkpoint_deleted", "delete manifest",
    "publish checkpoint_pinned", "delete blob",
)  # fmt: skip
#: A line is hit when it is reached this often, at most; rare ones are reached a few times in a life.
LATEST = {"put blob": 30, "head blob": 30, "history": 20, "get blob": 10, "last": 6}
KINDS = ("kill before", "kill after", "fail before", "fail after")


class Killed(BaseException):
    """Stands for kill -9: nothing in a service catches it."""


@dataclass
class Faults:
    """What is to go wrong: (line of the protocol, which time it is reached) -> the kind."""

    plan: dict[tuple[str, int], str] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)
    struck: list[str] = field(default_factory=list)
    off: bool = False

    async def around(self, line: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Carry out a call, or not, as planned."""
        if self.off:
            return await call()
        self.reached[line] += 1
        kind = self.plan.pop((line, self.reached[line]), "")
        if kind:
            self.struck.append(f"{kind} {line}")
        if kind == "kill before":
            raise Killed(line)
        if kind == "fail before":
            raise TransientError(f"{line} does not answer")
        result = await call()
        if kind == "kill after":
            raise Killed(line)
        if kind == "fail after":
            raise TransientError(f"the answer of {line} was lost")
        return result

    def over(self, target: Any, names: tuple[str, ...]) -> Any:
        """A proxy of ``target`` whose calls can be hit."""
        return _Proxy(self, target, names)


def _line(name: str, subject: Any) -> str:
    """What a call is called in the list of ``LINES``."""
    if isinstance(subject, Fact):
        return f"{name} {subject.fact}"
    if isinstance(subject, str) and subject.startswith("s3://"):
        return f"{name} {'blob' if blob_sha256(subject) else 'manifest'}"
    return name


class _Proxy:
    def __init__(self, faults: Faults, target: Any, names: tuple[str, ...]) -> None:
        self._faults, self._target, self._names = faults, target, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in self._names:
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._faults.around(_line(name, args[0]), lambda: found(*args, **kwargs))

        return call


class Trial:
    """One random life of one run's checkpoints."""

    def __init__(self, bus: Bus, objects: ObjectStore, settings: CheckpointSettings, seed: int) -> None:
        self.random = random.Random(seed)
        self.run_id = f"rtrial{seed}"
        self.bus, self.objects, self.settings = bus, objects, settings
        self.bucket = settings.bucket_models
        self.faults = Faults()
        self.faulty_bus: Any = self.faults.over(bus, BUS_CALLS)
        self.faulty_objects: Any = self.faults.over(objects, OBJECT_CALLS)
        self.generation = 0
        self.queue: list[Message[Any]] = []
        self.corrupted: set[str] = set()
        self.problems: list[str] = []
        self.pins = 0
        #: (generation, step, node) -> the pieces of that part, by rank.
        self.parts: dict[tuple[int, int, str], dict[int, tuple[Chunk, bytes]]] = {}
        self.start_service()

    def start_service(self) -> None:
        self.committer = Committer(self.faulty_bus, self.faulty_objects, self.settings)
        self.keeper = Keeper(self.faulty_bus, self.faulty_objects)

    # -- the parts ----------------------------------------------------------

    async def place(self) -> None:
        """Publish the scheduler's fact. The trials do not test the scheduler, so no fault hits it."""
        self.generation += 1
        retention = Retention(last=2, best=1, every_steps=40)
        run = placed(self.generation, run=self.run_id, retention=retention)
        for fact in (*support(run), run):
            await self.bus.publish(fact)

    async def agent(self, node: str, step: int) -> None:
        """Upload a node's files and publish that. Idempotent: an agent that was killed does it again."""
        files, pieces = [], {}
        bases = await self.bases(node)
        for rank in NODES[node]:
            content = random.Random(f"{self.run_id} {rank} {step}").randbytes(300)
            shared = random.Random(f"{self.run_id} {rank} frozen").randbytes(200)
            chunk = await self.upload(content, bases.get(rank))
            pieces[rank] = (chunk, content)
            files.append(_file(f"model-{rank}.bin", content + shared, (chunk, await self.upload(shared, None))))
            digests = json.dumps({f"model/{rank}": sha(content), "state": sha(b"%d" % step)}).encode()
            files.append(_file(f"digests-{rank}.json", digests, (await self.upload(digests, None),)))
        part = CheckpointStaged(
            run_id=self.run_id,
            generation=self.generation,
            node_id=node,
            ranks=NODES[node],
            world_size=4,
            step=step,
            epoch=1,
            samples_consumed=step * 64,
            files=tuple(files),
            metrics={"validation/loss": float(content[0])},
            exactness="exact",
        )
        await self.publish(part)
        self.parts[self.generation, step, node] = pieces

    async def bases(self, node: str) -> dict[int, tuple[Chunk, bytes]]:
        """Return the base of differences: the newest committed checkpoint, as agents do it."""
        commits = await self.bus.read_history(subjects.fact("run", self.run_id, CheckpointCommitted.fact))
        newest = max(((each.event.generation, each.event.checkpoint.step) for each in commits), default=(0, 0))
        return self.parts.get((*newest, node), {})

    async def upload(self, piece: bytes, base: tuple[Chunk, bytes] | None) -> Chunk:
        if base is not None and chunks.count_differences(base[0]) < chunks.MAX_CHAIN and self.random.random() < 0.5:
            blob = chunks.encode_difference(piece, base[1], 4)
            difference = {"encoding": "xor-zstd", "stored_bytes": len(blob), "base": base[0]}
        else:
            blob, difference = piece, {}
        uri = blob_uri(self.bucket, blob)
        await self.faulty_objects.put(uri, blob)
        return Chunk(sha256=sha(piece), size_bytes=len(piece), uri=uri, **difference)  # type: ignore[arg-type]

    async def publish(self, fact: Fact) -> None:
        await self.faulty_bus.publish(fact)
        stored = await self.bus.get_last_message(fact.subject)
        assert stored is not None
        self.queue += [stored] * self.random.choice((1, 1, 2))

    async def pin(self, step: int) -> None:
        self.pins += 1
        request = PinRequested(run_id=self.run_id, step=step)
        envelope = Envelope(f"{self.run_id}-pin-{self.pins}", "test", request.type, self.bus.clock.now())
        self.queue.append(Message(request, envelope, request.subject))

    async def deliver(self) -> None:
        """Hand out what waits, each message until it is handled. Old ones come again now and then."""
        waiting, self.queue = self.queue, []
        for message in waiting:
            await self.again(partial(self.handle, message))

    async def handle(self, message: Message[Any]) -> None:
        if isinstance(message.event, CheckpointStaged):
            await self.committer.on_checkpoint_staged(message)
            return
        with suppress(PoisonMessage):  # deleted before: a dead letter
            await self.keeper.on_pin_requested(message)

    async def collect(self) -> None:
        """Garbage collection as if all this had been three days ago."""
        later = ManualClock(start=self.bus.clock.now() + timedelta(days=3))
        old: Any = _At(self.faulty_bus, later)
        try:
            await collect_garbage(old, self.faulty_objects, self.settings)
        except ValueError:
            # The needs of a manifest that cannot be read are unknown, so nothing may go.
            if not any("/checkpoints/" in uri for uri in self.corrupted):
                raise

    async def again(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` until it is done: a fault costs a try, and a kill all that was in memory."""
        for _ in range(30):
            try:
                await work()
                return
            except Killed:
                self.start_service()
            except (TransientError, Conflict, ObjectExists, ObjectNotFound):
                pass
            await self.check()
        self.problems.append("not done after 30 tries")

    async def corrupt(self) -> None:
        """Change one byte of one stored object, as no client would."""
        found = [info async for info in self.objects.list(f"s3://{self.bucket}/") if info.size_bytes]
        if not found:
            return
        info = self.random.choice(found)
        body = bytearray(await self.objects.get(info.uri))
        body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        bucket, key = split_uri(info.uri)
        await self.objects._client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
        self.corrupted.add(info.uri)

    # -- one life -----------------------------------------------------------

    async def live(self, *, steps: int, faults: int, corruptions: int) -> None:
        """Train ``steps`` checkpoints with ``faults`` hits at random calls; then check everything without faults."""
        await self.place()
        for line in self.random.choices(LINES, k=faults):
            self.faults.plan[line, self.random.randint(1, LATEST.get(line, 2))] = self.random.choice(KINDS)
        corrupt_at = set(self.random.choices(range(1, steps + 1), k=corruptions))
        for number in range(1, steps + 1):
            step = number * 10
            for node in NODES:
                await self.again(partial(self.agent, node, step))
                if self.random.random() < 0.3:
                    await self.deliver()
            if number in corrupt_at:
                await self.corrupt()
            if self.random.random() < 0.15:
                await self.place()  # preempted: what waits is a zombie's now
            await self.deliver()
            if self.random.random() < 0.2:
                await self.pin(self.random.randrange(1, number + 1) * 10)
            if self.random.random() < 0.3:
                await self.again(self.collect)
        self.faults.off = True
        await self.deliver()
        await self.again(self.collect)
        await self.check(last=True)

    # -- the promises -------------------------------------------------------

    async def check(self, *, last: bool = False) -> None:
        """Hold the log against the store: what counts as committed is whole, and nothing it names is gone."""
        run = self.run_id
        deleted = {r.event.uri for r in await self.bus.read_history(subjects.fact("run", run, CheckpointDeleted.fact))}
        commits = [r.event for r in await self.bus.read_history(subjects.fact("run", run, CheckpointCommitted.fact))]
        there = {info.uri async for info in self.objects.list(f"s3://{self.bucket}/")}
        for commit in commits:
            if commit.checkpoint.uri not in deleted:
                await self._check_one(commit, there, last=last)
        if last:
            await self._check_pins(deleted)
            if not self.corrupted and not commits:
                refused = await self.bus.read_history(subjects.fact("run", run, CheckpointRefused.fact))
                why = [f"step {each.event.step}.g{each.event.generation}: {each.event.reason}" for each in refused]
                self.problems.append(f"{run}: nothing was committed; refused: {why}; struck: {self.faults.struck}")

    async def _check_one(self, commit: CheckpointCommitted, there: set[str], *, last: bool) -> None:
        where = f"{self.run_id} step {commit.checkpoint.step}.g{commit.generation}"
        try:
            manifest = await self.objects.get(commit.checkpoint.uri)
        except ObjectNotFound:
            if not await self._is_deleted(commit):
                self.problems.append(f"{where}: committed, and its manifest is gone")
            return
        if hashlib.sha256(manifest).hexdigest() != commit.manifest_sha256:
            if commit.checkpoint.uri not in self.corrupted:
                self.problems.append(f"{where}: its manifest is not the one that was committed")
            return  # its hash shows it
        ranks = set()
        for file in files_of(manifest):
            ranks.add(file.path)
            if gone := set(file.uris) - there:
                self.problems.append(f"{where}: {file.path} is named and gone: {sorted(gone)}")
            if gone or not last:
                continue
            try:
                content = b"".join([await chunks.read_piece(self.objects, chunk) for chunk in file.chunks])
            except ObjectCorrupted as error:
                if not self.corrupted.intersection(file.uris):
                    self.problems.append(f"{where}: {file.path}: {error}")
                continue  # reading finds the changed byte
            if sha(content) != file.sha256:
                self.problems.append(f"{where}: {file.path} was restored as other bytes, unnoticed")
        if ranks != {
            f"{kind}-{rank}.{end}" for rank in range(4) for kind, end in (("model", "bin"), ("digests", "json"))
        }:
            self.problems.append(f"{where}: committed without every rank's files: {sorted(ranks)}")

    async def _is_deleted(self, commit: CheckpointCommitted) -> bool:
        """Whether retention took it while we looked: a service of its own goes on."""
        subject = subjects.fact("run", self.run_id, CheckpointDeleted.fact)
        for _ in range(20):
            if commit.checkpoint.uri in {each.event.uri for each in await self.bus.read_history(subject)}:
                return True
            await asyncio.sleep(0.1)
        return False

    async def _check_pins(self, deleted: set[str]) -> None:
        pins = await self.bus.read_history(subjects.fact("run", self.run_id, CheckpointPinned.fact))
        for each in pins:
            if each.event.uri in deleted:
                self.problems.append(f"{self.run_id} step {each.event.step}: pinned, and deleted")


class _At:
    """A bus whose clock shows another time."""

    def __init__(self, bus: Any, clock: ManualClock) -> None:
        self._bus, self.clock = bus, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


def _file(path: str, content: bytes, parts: tuple[Chunk, ...]) -> CheckpointFile:
    return CheckpointFile(path=path, sha256=sha(content), size_bytes=len(content), chunks=parts)
