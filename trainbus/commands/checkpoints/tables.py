"""``trainbus checkpoints ls`` and ``show``."""

from __future__ import annotations

from typing import Any

from services.checkpoint.core.commit import blobs_of_files
from trainbus.client.checkpoints import (
    StoredCheckpoint,
    find_checkpoint,
    load_checkpoint,
    open_checkpoint_store,
)
from trainbus.client.client import AsyncClient
from trainbus.commands import render


async def print_checkpoints(client: AsyncClient, name: str, *, as_json: bool) -> None:
    """Print a run's checkpoints that can be restored."""
    run_id = await client.find_run(name)
    found = await client.checkpoints(run_id)
    if as_json:
        print(render.as_json([_to_plain(each) for each in found]))
        return
    if not found:
        print(f"run {run_id} has no committed checkpoint")
        return
    numbers = ("step", "epoch", "samples", "size")
    table = render.table("step", "epoch", "samples", "size", "exactness", "state", "", "manifest", right=numbers)
    for each in found:
        ref, commit = each.commit.checkpoint, each.commit
        table.add_row(
            str(ref.step), str(ref.epoch), f"{ref.samples_consumed:,}", render.size(commit.size_bytes),
            commit.exactness, (commit.state_digest or "")[:12], _format_marks(each), ref.uri,
        )  # fmt: skip
    render.console().print(table, soft_wrap=True)


async def print_checkpoint(client: AsyncClient, target: str, *, as_json: bool) -> None:
    """Print all there is to know about one checkpoint."""
    stored = await find_checkpoint(client.connection, target)
    async with open_checkpoint_store(client.address) as objects:
        loaded = await load_checkpoint(objects, stored)
    stored_bytes = sum(blob.size_bytes for blob in blobs_of_files(loaded.files))
    if as_json:
        files = [file.model_dump(mode="json") for file in loaded.files]
        print(render.as_json({**_to_plain(stored), "stored_bytes": stored_bytes, "files": files}))
        return
    commit, ref, console = stored.commit, stored.commit.checkpoint, render.console()
    rows = {
        "manifest": stored.uri,
        "manifest SHA-256": loaded.manifest_sha256,
        "state digest": commit.state_digest or "(none: not written by a Task)",
        "exactness": commit.exactness,
        "step": f"{ref.step}, epoch {ref.epoch}, {ref.samples_consumed:,} samples",
        "size": f"{render.size(commit.size_bytes)}, {render.size(stored_bytes)} stored (with bases, each blob once)",
        "metrics": render.numbers(commit.metrics),
        "marks": _format_marks(stored),
    }
    for name, value in rows.items():
        if value:
            console.print(f"[dim]{name:<17}[/] {value}", soft_wrap=True)
    table = render.table("file", "size", "chunks", "differences", "sha256", right=("size", "chunks", "differences"))
    for file in loaded.files:
        differences = sum(chunk.encoding != "plain" for chunk in file.chunks)
        table.add_row(
            file.path, render.size(file.size_bytes), str(len(file.chunks)), str(differences or ""), file.sha256[:16]
        )
    console.print(table)


def _to_plain(stored: StoredCheckpoint) -> dict[str, Any]:
    commit = stored.commit
    return {
        **commit.checkpoint.model_dump(mode="json"),
        "generation": commit.generation,
        "size_bytes": commit.size_bytes,
        "exactness": commit.exactness,
        "state_digest": commit.state_digest,
        "manifest_sha256": commit.manifest_sha256,
        "metrics": commit.metrics,
        "final": commit.final,
        "pinned": stored.pinned,
        "rotten": sorted(stored.rotten),
    }


def _format_marks(stored: StoredCheckpoint) -> str:
    marks = {"pinned": stored.pinned, "final": stored.commit.final, "[bold red]rotten[/]": bool(stored.rotten)}
    return " ".join(mark for mark, holds in marks.items() if holds)
