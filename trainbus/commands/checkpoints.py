"""``trainbus checkpoints``: list, verify, pin, fetch and compare what runs have committed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.formats import plural
from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.options import Checkpoint, Json, Run, command
from trainbus.commands.progress import byte_bar

if TYPE_CHECKING:
    from contracts.events.checkpoint import CheckpointRepaired
    from trainbus.client.checkpoints import StoredCheckpoint
    from trainbus.client.client import AsyncClient

#: Differences that a table shows; JSON has them all.
MAX_SHOWN = 40

app = typer.Typer(
    name="checkpoints",
    no_args_is_help=True,
    help="A run's checkpoints: list, verify, pin, fetch and compare them, start a new run from one.",
)
PinTarget = Annotated[str, typer.Argument(help="RUN@STEP, RUN@best or RUN@last, as in demo@200.")]
Reason = Annotated[str, typer.Option(help="Why; it is written into the log.")]


@command(app)
async def ls(client: AsyncClient, name: Run, as_json: Json = False) -> None:
    """List a run's committed checkpoints: their metric, and which is the best and which the last."""
    from trainbus.client.checkpoints import read_ranking

    run_id = await client.find_run(name)
    found = await client.checkpoints(run_id)
    metric, best = await read_ranking(client.connection, run_id, found)
    if as_json:
        named = {} if metric is None else {"ranked_by": metric.name, "mode": metric.mode}
        print(
            render.as_json(
                [{**each.to_plain(), **named, "best": each is best, "last": each is found[-1]} for each in found]
            )
        )
        return
    if not found:
        print(f"run {run_id} has no committed checkpoint")
        return
    numbers = ("step", "epoch", "samples", "size", *([] if metric is None else [f"{metric.name} ({metric.mode})"]))
    table = render.table(*numbers, "", "exactness", "state", right=numbers)
    for each in found:
        ref, commit = each.commit.checkpoint, each.commit
        value = None if metric is None else each.metrics.get(metric.name)
        table.add_row(
            ref.point if ref.step_is_count else str(ref.step), str(ref.epoch or ""),
            f"{ref.samples_consumed:,}" if ref.samples_consumed else "",
            render.size(commit.size_bytes),
            *([] if metric is None else ["" if value is None else f"{value:.6g}"]),
            _format_marks(each, best=each is best, last=each is found[-1]),
            commit.exactness if ref.samples_consumed else "", (commit.state_digest or "")[:12],
        )  # fmt: skip
    render.console().print(table, soft_wrap=True)


@command(app)
async def show(client: AsyncClient, target: Checkpoint, as_json: Json = False) -> None:
    """Show one checkpoint: its hashes, its files, and the bytes that they take in the store."""
    from trainbus.client.checkpoints import find_checkpoint
    from trainbus.client.run_files import open_file_source, read_manifest

    stored = await find_checkpoint(client.connection, target)
    async with open_file_source(client.address) as source:
        loaded = await read_manifest(source, stored)
    if as_json:
        print(render.as_json({**stored.to_plain(), "stored_bytes": loaded.stored_bytes, "files": loaded.files}))
        return
    commit, ref = stored.commit, stored.commit.checkpoint
    size, stored_size = render.size(commit.size_bytes), render.size(loaded.stored_bytes)
    render.print_fields(
        {
            "manifest": stored.uri,
            "manifest SHA-256": loaded.manifest_sha256,
            "state digest": commit.state_digest or "(none: not written by a Task)",
            "exactness": commit.exactness,
            "checkpoint of": ref.point,
            "epoch": str(ref.epoch or ""),
            "samples": f"{ref.samples_consumed:,}" if ref.samples_consumed else "",
            "size": f"{size}, {stored_size} stored (with bases, each blob once)",
            "metrics": render.numbers(commit.metrics),
            "marks": _format_marks(stored),
        }
    )
    table = render.table("file", "size", "chunks", "differences", "sha256", right=("size", "chunks", "differences"))
    for file in loaded.files:
        differences = str(sum(chunk.encoding != "plain" for chunk in file.chunks) or "")
        table.add_row(file.path, render.size(file.size_bytes), str(len(file.chunks)), differences, file.sha256[:16])
    render.console().print(table)


def _format_marks(stored: StoredCheckpoint, *, best: bool = False, last: bool = False) -> str:
    marks = {
        "[bold green]best[/]": best,
        "last": last,
        "pinned": stored.pinned,
        "final": stored.commit.final,
        "[bold red]rotten[/]": bool(stored.rotten),
    }
    return " ".join(mark for mark, holds in marks.items() if holds)


@command(app)
async def verify(
    client: AsyncClient,
    name: Annotated[
        str | None, typer.Argument(help="RUN, or one checkpoint: RUN@STEP, RUN@best, RUN@last; default: all.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have nodes that still hold a copy write rotten blobs again, and wait.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds to wait for repairs.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Read committed checkpoints back from the store and compare every hash; exit 1 if anything is rotten."""
    from trainbus.client.checkpoints import request_repair, verify_checkpoints

    with byte_bar("reading back", quiet=as_json) as advance:
        found = await verify_checkpoints(client.connection, name, advance)
    rotten = found.rotten
    if as_json:
        print(render.as_json({"checkpoints": found.checkpoints, "rotten": rotten}))
    for uri, bad in rotten.items() if not as_json else ():
        print(f"rotten: {uri}")
        for each in bad:
            print(f"  {'its manifest' if each == uri else each}")
    if not rotten:
        if not as_json:
            print(f"{found.checkpoints} checkpoints are as they were committed")
        return
    if not repair:
        raise TrainbusError(
            f"{len(rotten)} of {found.checkpoints} checkpoints are rotten; --repair looks for other copies"
        )
    missing = {blob for bad in rotten.values() for blob in bad}
    await request_repair(client.connection, found.runs, missing, wait_s, _print_repaired)
    print("repaired: every rotten blob was written again from a node's copy, and read back")


def _print_repaired(fact: CheckpointRepaired) -> None:
    print(f"repaired by {fact.node_id}: {fact.blob}", flush=True)


@command(app)
async def pin(client: AsyncClient, target: PinTarget, reason: Reason = "pinned by request") -> None:
    """Exempt a checkpoint from retention."""
    await _set_pinned(client, target, True, reason)


@command(app)
async def unpin(client: AsyncClient, target: PinTarget, reason: Reason = "unpinned by request") -> None:
    """Subject a pinned checkpoint to retention again; it may be deleted at once."""
    await _set_pinned(client, target, False, reason)


async def _set_pinned(client: AsyncClient, target: str, pinned: bool, reason: str) -> None:
    from trainbus.client.checkpoints import pin_checkpoint

    fact = await pin_checkpoint(client.connection, target, pinned=pinned, reason=reason)
    print(f"{fact.run_id}: step {fact.step} is {'pinned' if pinned else 'unpinned'}: {fact.uri}")


@command(app)
async def fetch(
    client: AsyncClient,
    target: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="Where to put the files; a new or empty folder.")],
    manifest_sha256: Annotated[
        str | None,
        typer.Option(help="Refuse any other manifest: the tag trainbus.manifest_sha256 of the MLflow model version."),
    ] = None,
) -> None:
    """Fetch a checkpoint's files and verify every byte."""
    fetched = await client.fetch(target, folder, manifest_sha256=manifest_sha256)
    print(f"{plural(len(fetched.paths), 'file')}, {render.size(fetched.stored.commit.size_bytes)}, verified: {folder}")


@command(app)
async def diff(client: AsyncClient, one: Checkpoint, other: Checkpoint, as_json: Json = False) -> None:
    """List the tensors that differ between two checkpoints; exit 1 if any does."""
    from services.checkpoint.core import digests
    from trainbus.client.checkpoints import find_checkpoint
    from trainbus.client.run_files import read_digests_of

    pair = [await find_checkpoint(client.connection, target) for target in (one, other)]
    first, second = await read_digests_of(client.address, pair)
    found = digests.differences(first, second)
    names = {*first, *second}
    if as_json:
        print(render.as_json({"same": not found, "names": len(names), "different": dict(found)}))
    elif not found:
        print(f"the same state, to the bit: all {len(first)} digests are equal")
    else:
        table = render.table("name", "", "first", "second")
        for name, how in found[:MAX_SHOWN]:
            table.add_row(render.escape(name), how, first.get(name, "")[:12], second.get(name, "")[:12])
        render.console().print(table)
    if found:
        more = f" (the first {MAX_SHOWN} are shown)" if len(found) > MAX_SHOWN and not as_json else ""
        raise TrainbusError(f"{len(found)} of {len(names)} differ{more}")


@command(app)
async def restore(
    client: AsyncClient,
    name: Annotated[str, typer.Argument(help="RUN@best, RUN@last or RUN@STEP; or RUN with --step or --epoch.")],
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step.")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="The last checkpoint of this epoch.")] = None,
) -> None:
    """Start a new run from a checkpoint of another."""
    restored, answer = await client.restore(name, step=step, epoch=epoch)
    print(f"{restored}  {answer or 'requested; the scheduler has not answered yet'}")
    if answer and answer.startswith("rejected"):
        raise TrainbusError(f"the restore was {answer}")
