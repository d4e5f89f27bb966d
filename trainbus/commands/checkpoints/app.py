"""``trainbus checkpoints``: list, verify, pin, fetch and compare what runs have committed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainbus.commands.options import Checkpoint, DataDir, Json, Run, with_client

app = typer.Typer(
    no_args_is_help=True,
    help="A run's checkpoints: list, verify, pin, fetch and compare them, start a new run from one.",
)
PinTarget = Annotated[str, typer.Argument(help="RUN@STEP, as in demo@200.")]


@app.command()
def ls(name: Run, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List a run's committed checkpoints."""
    from trainbus.commands.checkpoints.tables import print_checkpoints

    with_client(data_dir, lambda client: print_checkpoints(client, name, as_json=as_json))


@app.command()
def show(target: Checkpoint, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one checkpoint: its hashes, its files, and the bytes that they take in the store."""
    from trainbus.commands.checkpoints.tables import print_checkpoint

    with_client(data_dir, lambda client: print_checkpoint(client, target, as_json=as_json))


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="A run; default: all of them.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have nodes that still hold a copy write rotten blobs again, and wait.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds to wait for repairs.")] = 120.0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read committed checkpoints back from the store and compare every hash; exit 1 if anything is rotten."""
    from trainbus.commands.checkpoints.verify import verify_checkpoints

    with_client(
        data_dir, lambda client: verify_checkpoints(client, name, repair=repair, wait_s=wait_s, as_json=as_json)
    )


@app.command()
def pin(
    target: PinTarget,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "pinned by request",
    data_dir: DataDir = None,
) -> None:
    """Exempt a checkpoint from retention."""
    from trainbus.commands.checkpoints.pin import pin_checkpoint

    with_client(data_dir, lambda client: pin_checkpoint(client, target, pinned=True, reason=reason))


@app.command()
def unpin(
    target: PinTarget,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "unpinned by request",
    data_dir: DataDir = None,
) -> None:
    """Subject a pinned checkpoint to retention again; it may be deleted at once."""
    from trainbus.commands.checkpoints.pin import pin_checkpoint

    with_client(data_dir, lambda client: pin_checkpoint(client, target, pinned=False, reason=reason))


@app.command()
def fetch(
    target: Checkpoint,
    folder: Annotated[Path, typer.Argument(help="Where to put the files; a new or empty folder.")],
    manifest_sha256: Annotated[
        str | None,
        typer.Option(help="Refuse any other manifest: the tag trainbus.manifest_sha256 of the MLflow model version."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Fetch a checkpoint's files and verify every byte."""
    from trainbus.commands.checkpoints.fetch import fetch_checkpoint

    with_client(data_dir, lambda client: fetch_checkpoint(client, target, folder, manifest_sha256))


@app.command()
def diff(one: Checkpoint, other: Checkpoint, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the tensors that differ between two checkpoints; exit 1 if any does."""
    from trainbus.commands.checkpoints.diff import diff_checkpoints

    with_client(data_dir, lambda client: diff_checkpoints(client, one, other, as_json=as_json))


@app.command()
def restore(
    name: Run,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step.")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="The last checkpoint of this epoch.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Start a new run from a checkpoint of another."""
    from trainbus.commands.checkpoints.restore import restore_run

    with_client(data_dir, lambda client: restore_run(client, name, step, epoch))
