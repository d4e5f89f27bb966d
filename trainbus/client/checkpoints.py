"""What the store holds of checkpoints: read, verified, fetched and compared here, without any service."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts import subjects, topology
from contracts.events import checkpoint
from contracts.events.model import ModelPromoted
from contracts.events.train import PinRequested, ScrubRequested
from services.checkpoint.core import digests
from services.checkpoint.core.commit import Blob, blobs_of_files, files_of
from services.checkpoint.core.garbage import MANIFEST_KEY
from services.kit.bus import TransientError
from services.kit.chunks import piece_of, restore_file
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.files import hash_file
from services.kit.store.objects import ObjectStore
from services.kit.store.uris import blob_sha256, split_uri
from trainbus.client.address import Address
from trainbus.client.connection import Link, Stored, connect
from trainbus.client.errors import USAGE, CliError
from trainbus.client.object_store import store as reachable
from trainbus.client.runs import resolve
from trainbus.commands import render

FACTS = (
    checkpoint.CheckpointCommitted,
    checkpoint.CheckpointDeleted,
    checkpoint.CheckpointPinned,
    checkpoint.CheckpointRotten,
    checkpoint.CheckpointRepaired,
)
#: Blobs that are read back at the same time.
PARALLEL = 4
#: Differences that a table shows; JSON has them all.
SHOWN = 40
ANSWER_S = 10.0
PROMOTED = subjects.fact("model", subjects.WILDCARD, ModelPromoted.fact)
#: How MLflow names a version of a registered model.
MODELS = "models:/"


@dataclass(slots=True)
class Kept:
    """A committed checkpoint that nobody has deleted."""

    commit: checkpoint.CheckpointCommitted
    pinned: bool = False
    #: Blobs that were found rotten and not repaired since.
    rotten: set[str] = field(default_factory=set)

    @property
    def uri(self) -> str:
        return self.commit.checkpoint.uri


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint with its manifest, which is as it was committed."""

    kept: Kept
    manifest_sha256: str
    files: tuple[checkpoint.CheckpointFile, ...]


def kept_of(events: Iterable[Any]) -> dict[str, Kept]:
    """Manifest -> checkpoint, out of facts in stream order."""
    found: dict[str, Kept] = {}
    for event in events:
        if isinstance(event, checkpoint.CheckpointCommitted):
            found[event.checkpoint.uri] = Kept(event)
            continue
        kept = found.get(event.uri)
        if kept is None:
            continue
        match event:
            case checkpoint.CheckpointDeleted():
                del found[event.uri]
            case checkpoint.CheckpointPinned():
                kept.pinned = event.pinned
            case checkpoint.CheckpointRotten():
                kept.rotten |= set(event.blobs)
            case checkpoint.CheckpointRepaired():
                for each in found.values():  # blobs are shared
                    each.rotten.discard(event.blob)
    return found


async def read_kept(link: Link, run_id: str = subjects.WILDCARD) -> dict[str, Kept]:
    filters = [subjects.fact("run", run_id, event.fact) for event in FACTS]
    return kept_of(each.event for each in await link.read(*filters))


@asynccontextmanager
async def store(address: Address) -> AsyncIterator[ObjectStore]:
    """The object store; what goes wrong with it ends the command in words."""
    try:
        async with reachable(address) as objects:
            yield objects
    except ObjectCorrupted as error:
        raise CliError(f"{error}: `trainbus checkpoints verify --repair` looks for another copy") from error
    except ObjectNotFound as error:
        raise CliError(f"{error} is not in the store: `trainbus checkpoints verify` says what else is") from error


async def find(link: Link, target: str) -> Kept:
    """The checkpoint that RUN, RUN@STEP, models:/NAME@champion or an s3:// address means.

    Raises:
        CliError: there is none, or it was deleted.
    """
    if target.startswith(MODELS):
        target = await _champion(link, target)
    if target.startswith("s3://"):
        match = MANIFEST_KEY.match(split_uri(target)[1]) if "/" in target[5:] else None
        kept = (await read_kept(link, match["run_id"])).get(target) if match else None
        if kept is None:
            raise CliError(f"{target} is no committed checkpoint, or was deleted: `trainbus checkpoints ls RUN`", USAGE)
        return kept
    name, at, step = target.rpartition("@")
    if at and not step.isdigit():
        raise CliError(f"{target!r}: give RUN@STEP, as in demo@200", USAGE)
    run_id = await resolve(link, name if at else target)
    there = sorted((await read_kept(link, run_id)).values(), key=lambda each: each.commit.checkpoint.step)
    chosen = [each for each in there if not at or each.commit.checkpoint.step == int(step)]
    if not chosen:
        steps = ", ".join(str(each.commit.checkpoint.step) for each in there)
        raise CliError(f"run {run_id} has no such checkpoint; it has steps {steps or '(none)'}", USAGE)
    return chosen[-1]


async def _champion(link: Link, target: str) -> str:
    """The manifest of a registered model's champion, named as MLflow names it."""
    model, _, alias = target.removeprefix(MODELS).partition("@")
    if alias != "champion":
        raise CliError(f"{target!r}: give models:/NAME@champion, the one alias that trainbus sets", USAGE)
    champions = {each.event.model: each.event.checkpoint_uri for each in await link.read(PROMOTED)}
    if model not in champions:
        raise CliError(f"there is no champion of {model!r}; there are {', '.join(sorted(champions)) or 'none'}", USAGE)
    return str(champions[model])


async def load(objects: ObjectStore, kept: Kept) -> Loaded:
    """The checkpoint's manifest, if it is the one that was committed.

    Raises:
        CliError: it is another, or none.
    """
    content = await objects.get(kept.uri)
    sha256 = hashlib.sha256(content).hexdigest()
    expected = kept.commit.manifest_sha256
    if expected not in (None, sha256):
        raise CliError(
            f"{kept.uri} is not the manifest that was committed (SHA-256 {sha256}, not {expected}): "
            f"`trainbus checkpoints verify {kept.commit.run_id} --repair` writes that one anew"
        )
    try:
        return Loaded(kept, sha256, files_of(content))
    except ValueError as error:
        raise CliError(f"{kept.uri} is {error}") from error


async def tensor_digests(objects: ObjectStore, loaded: Loaded) -> dict[str, str]:
    """Tensor -> hash, as the ranks wrote it.

    Raises:
        CliError: the checkpoint has none.
    """
    by_path = {}
    for file in loaded.files:
        if digests.DIGESTS.match(file.path):
            by_path[file.path] = b"".join([await piece_of(objects, chunk) for chunk in file.chunks])
    if not by_path:
        raise CliError(f"{loaded.kept.uri} holds no digests: only runs of a Task write them")
    try:
        return digests.union(by_path)
    except ValueError as error:
        raise CliError(f"{loaded.kept.uri}: {error}") from error


# -- commands --------------------------------------------------------------------


def _plain(kept: Kept) -> dict[str, Any]:
    commit = kept.commit
    return {
        **commit.checkpoint.model_dump(mode="json"),
        "generation": commit.generation,
        "size_bytes": commit.size_bytes,
        "exactness": commit.exactness,
        "state_digest": commit.state_digest,
        "manifest_sha256": commit.manifest_sha256,
        "metrics": commit.metrics,
        "final": commit.final,
        "pinned": kept.pinned,
        "rotten": sorted(kept.rotten),
    }


def _marks(kept: Kept) -> str:
    marks = {"pinned": kept.pinned, "final": kept.commit.final, "[bold red]rotten[/]": bool(kept.rotten)}
    return " ".join(mark for mark, holds in marks.items() if holds)


async def ls(address: Address, name: str, *, as_json: bool) -> None:
    """Print a run's checkpoints that can be restored."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        found = sorted((await read_kept(link, run_id)).values(), key=lambda each: each.commit.checkpoint.step)
    if as_json:
        print(render.as_json([_plain(each) for each in found]))
        return
    if not found:
        print(f"run {run_id} has no committed checkpoint")
        return
    numbers = ("step", "epoch", "samples", "size")
    made = render.table("step", "epoch", "samples", "size", "exactness", "state", "", "manifest", right=numbers)
    for each in found:
        ref, commit = each.commit.checkpoint, each.commit
        made.add_row(
            str(ref.step), str(ref.epoch), f"{ref.samples_consumed:,}", render.size(commit.size_bytes),
            commit.exactness, (commit.state_digest or "")[:12], _marks(each), ref.uri,
        )  # fmt: skip
    render.console().print(made, soft_wrap=True)


async def show(address: Address, target: str, *, as_json: bool) -> None:
    """Print all there is to know about one checkpoint."""
    async with connect(address) as link:
        kept = await find(link, target)
    async with store(address) as objects:
        loaded = await load(objects, kept)
    stored = sum(blob.size_bytes for blob in blobs_of_files(loaded.files))
    if as_json:
        files = [file.model_dump(mode="json") for file in loaded.files]
        print(render.as_json({**_plain(kept), "stored_bytes": stored, "files": files}))
        return
    commit, ref, console = kept.commit, kept.commit.checkpoint, render.console()
    rows = {
        "manifest": kept.uri,
        "manifest SHA-256": loaded.manifest_sha256,
        "state digest": commit.state_digest or "(none: not written by a Task)",
        "exactness": commit.exactness,
        "step": f"{ref.step}, epoch {ref.epoch}, {ref.samples_consumed:,} samples",
        "size": f"{render.size(commit.size_bytes)}, {render.size(stored)} in the store (with bases, each blob once)",
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in sorted(commit.metrics.items())),
        "marks": _marks(kept),
    }
    for name, value in rows.items():
        if value:
            console.print(f"[dim]{name:<17}[/] {value}", soft_wrap=True)
    made = render.table("file", "size", "chunks", "differences", "sha256", right=("size", "chunks", "differences"))
    for file in loaded.files:
        differences = sum(chunk.encoding != "plain" for chunk in file.chunks)
        made.add_row(
            file.path, render.size(file.size_bytes), str(len(file.chunks)), str(differences or ""), file.sha256[:16]
        )
    console.print(made)


async def verify(address: Address, name: str | None, *, repair: bool, wait_s: float, as_json: bool) -> None:
    """Read everything back and print what is rotten; with ``repair`` ask for it to be written anew, and wait."""
    async with connect(address) as link:
        run_id = await resolve(link, name) if name is not None else subjects.WILDCARD
        found = await read_kept(link, run_id)
        async with store(address) as objects:
            rotten = await _rotten(objects, found, quiet=as_json)
        if as_json:
            print(
                render.as_json({"checkpoints": len(found), "rotten": {uri: sorted(bad) for uri, bad in rotten.items()}})
            )
        else:
            for uri, bad in rotten.items():
                print(f"rotten: {uri}")
                for each in sorted(bad):
                    print(f"  {'its manifest' if each == uri else each}")
        if not rotten:
            if not as_json:
                print(f"{len(found)} checkpoints are as they were committed")
            return
        if not repair:
            raise CliError(f"{len(rotten)} of {len(found)} checkpoints are rotten; --repair looks for other copies")
        await _repair(link, {found[uri].commit.run_id for uri in rotten}, set().union(*rotten.values()), wait_s)
    print("repaired: every rotten blob was written anew from a node's copy, and read back")


async def _rotten(objects: ObjectStore, found: dict[str, Kept], *, quiet: bool) -> dict[str, set[str]]:
    """Manifest -> what of it is missing or wrong. Each blob is read once, however many checkpoints share it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    rotten: dict[str, set[str]] = {}
    users: dict[Blob, list[str]] = {}
    for uri, kept in found.items():
        try:
            loaded = await load(objects, kept)
        except (CliError, ObjectNotFound):
            rotten[uri] = {uri}
            continue
        for blob in blobs_of_files(loaded.files):
            users.setdefault(blob, []).append(uri)
    gate = asyncio.Semaphore(PARALLEL)
    columns = (TextColumn("reading back"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=render.console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=sum(blob.size_bytes for blob in users))

        async def look(blob: Blob) -> None:
            async with gate:
                try:
                    right = await objects.hash(blob.uri) == blob_sha256(blob.uri)
                except ObjectNotFound:
                    right = False
                except TransientError:
                    # A store with sums of its own gives no rotten bytes out. If it is away altogether, this says so.
                    await objects.head(blob.uri)
                    right = False
            if not right:
                for uri in users[blob]:
                    rotten.setdefault(uri, set()).add(blob.uri)
            bar.advance(task, blob.size_bytes)

        await asyncio.gather(*(look(blob) for blob in users))
    return rotten


async def _repair(link: Link, runs: set[str], missing: set[str], wait_s: float) -> None:
    """Ask for a scrub of the runs and wait until each rotten thing was written anew."""
    start = await link.last_sequence(topology.FACTS) + 1
    for run_id in sorted(runs):
        await link.request(ScrubRequested(run_id=run_id, repair=True))
    repaired = subjects.fact("run", subjects.WILDCARD, checkpoint.CheckpointRepaired.fact)

    async def wait() -> None:
        async for batch in link.follow(topology.FACTS, repaired, start_sequence=start):
            for each in batch:
                missing.discard(each.event.blob)
                print(f"repaired by {each.event.node_id}: {each.event.blob}", flush=True)
            if not missing:
                return

    try:
        await asyncio.wait_for(wait(), wait_s)
    except TimeoutError:
        raise CliError(
            f"{len(missing)} are still rotten after {wait_s:.0f} s: no node that is up has another copy, or the "
            "checkpoint service does not run; restore from another checkpoint (`trainbus checkpoints ls RUN`)"
        ) from None


async def pin(address: Address, target: str, *, pinned: bool, reason: str) -> None:
    """Ask for a checkpoint to be kept, or no longer, and say what came of it."""
    name, at, number = target.rpartition("@")
    if not at or not number.isdigit():
        raise CliError(f"{target!r}: give RUN@STEP, as in demo@200", USAGE)
    step = int(number)
    async with connect(address) as link:
        run_id = await resolve(link, name)
        there = {each.commit.checkpoint.step for each in (await read_kept(link, run_id)).values()}
        if step not in there:
            steps = ", ".join(str(each) for each in sorted(there)) or "(none)"
            raise CliError(f"run {run_id} has no checkpoint of step {step}; it has steps {steps}", USAGE)
        start = await link.last_sequence(topology.FACTS) + 1
        request_id = await link.request(PinRequested(run_id=run_id, step=step, pinned=pinned, reason=reason))
        answer = await _answer(link, run_id, start, request_id)
    verb = "pinned" if pinned else "unpinned"
    if answer is None:
        raise CliError(f"asked, but not {verb} yet: the checkpoint service has not answered (`trainbus doctor`)")
    print(f"{run_id}: step {step} is {verb}: {answer.event.uri}")


async def _answer(link: Link, run_id: str, start: int, request_id: str) -> Stored | None:
    subject = subjects.fact("run", run_id, checkpoint.CheckpointPinned.fact)

    async def wait() -> Stored:
        async for batch in link.follow(topology.FACTS, subject, start_sequence=start):
            for each in batch:
                if each.event.request_id == request_id:
                    return each
        raise AssertionError("follow does not end")

    try:
        return await asyncio.wait_for(wait(), ANSWER_S)
    except TimeoutError:
        return None


async def fetch(address: Address, target: str, folder: Path, manifest_sha256: str | None) -> None:
    """Put a checkpoint's files into a folder: all of them, verified, or an error that says which is not."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CliError(f"{folder} is there and not an empty folder: name a new one", USAGE)
    async with connect(address) as link:
        kept = await find(link, target)
    async with store(address) as objects:
        loaded = await load(objects, kept)
        if manifest_sha256 not in (None, loaded.manifest_sha256):
            raise CliError(
                f"refused: the manifest of {kept.uri} has SHA-256 {loaded.manifest_sha256}, not {manifest_sha256}"
            )
        for file in loaded.files:
            path = folder / file.path
            if not path.resolve().is_relative_to(folder.resolve()):
                raise CliError(f"{file.path!r} leaves the folder: this manifest was not written by trainbus")
            await restore_file(objects, file, path)
            if await asyncio.to_thread(hash_file, path) != file.sha256:
                path.unlink()
                raise CliError(f"{file.path!r} of {kept.uri} does not have the hash that was committed")
    print(f"{len(loaded.files)} files, {render.size(kept.commit.size_bytes)}, verified: {folder}")


async def diff(address: Address, one: str, other: str, *, as_json: bool) -> None:
    """Print which tensors differ between two checkpoints, and fail if any does."""
    async with connect(address) as link:
        kept = [await find(link, target) for target in (one, other)]
    async with store(address) as objects:
        ours, theirs = [await tensor_digests(objects, await load(objects, each)) for each in kept]
    found = digests.differences(ours, theirs)
    if as_json:
        print(render.as_json({"same": not found, "names": len({*ours, *theirs}), "different": dict(found)}))
    elif not found:
        print(f"the same state, to the bit: all {len(ours)} digests are equal")
    else:
        made = render.table("name", "", "first", "second")
        for name, words in found[:SHOWN]:
            made.add_row(render.escape(name), words, ours.get(name, "")[:12], theirs.get(name, "")[:12])
        render.console().print(made)
    if found:
        more = f" (the first {SHOWN} are shown)" if len(found) > SHOWN and not as_json else ""
        raise CliError(f"{len(found)} of {len({*ours, *theirs})} differ{more}")
