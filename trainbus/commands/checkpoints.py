"""``trainbus checkpoints``: list, look at, verify, pin, fetch and compare what a run has committed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="A run's checkpoints: list, verify, pin, fetch and compare them, start a new run from one.",
)

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's id, the unique start of one, or its name.")]
Target = Annotated[
    str,
    typer.Argument(
        help="RUN (its newest checkpoint), RUN@STEP, models:/NAME@champion, or the s3:// address of a manifest."
    ),
]


def _address(data_dir: Path | None) -> Any:
    from trainbus.client.address import find

    return find(data_dir)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@app.command()
def ls(name: Run, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List a run's committed checkpoints."""
    from trainbus.client import checkpoints as stored

    _run(stored.ls(_address(data_dir), name, as_json=as_json))


@app.command()
def show(target: Target, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one checkpoint: its hashes, its files, and what they take in the store."""
    from trainbus.client import checkpoints as stored

    _run(stored.show(_address(data_dir), target, as_json=as_json))


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="A run; default: all of them.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Let nodes that still have what is rotten write it anew, and wait.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=1, help="Seconds to wait for repairs.")] = 120.0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read committed checkpoints back from the store and compare every hash; exit 1 if anything is rotten."""
    from trainbus.client import checkpoints as stored

    _run(stored.verify(_address(data_dir), name, repair=repair, wait_s=wait_s, as_json=as_json))


@app.command()
def pin(
    target: Annotated[str, typer.Argument(help="RUN@STEP, as in demo@200.")],
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "pinned by request",
    data_dir: DataDir = None,
) -> None:
    """Keep a checkpoint whatever retention says."""
    from trainbus.client import checkpoints as stored

    _run(stored.pin(_address(data_dir), target, pinned=True, reason=reason))


@app.command()
def unpin(
    target: Annotated[str, typer.Argument(help="RUN@STEP, as in demo@200.")],
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "unpinned by request",
    data_dir: DataDir = None,
) -> None:
    """Leave a pinned checkpoint to retention again; it may be deleted at once."""
    from trainbus.client import checkpoints as stored

    _run(stored.pin(_address(data_dir), target, pinned=False, reason=reason))


@app.command()
def fetch(
    target: Target,
    folder: Annotated[Path, typer.Argument(help="Where to put the files; a new or empty folder.")],
    manifest_sha256: Annotated[
        str | None,
        typer.Option(help="Refuse any other manifest: the tag trainbus.manifest_sha256 of the MLflow model version."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Fetch a checkpoint's files, every byte verified."""
    from trainbus.client import checkpoints as stored

    _run(stored.fetch(_address(data_dir), target, folder, manifest_sha256))


@app.command()
def diff(one: Target, other: Target, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Say which tensors differ between two checkpoints; exit 1 if any does."""
    from trainbus.client import checkpoints as stored

    _run(stored.diff(_address(data_dir), one, other, as_json=as_json))


@app.command()
def restore(
    name: Run,
    step: Annotated[int | None, typer.Option(min=0)] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="The last checkpoint of this epoch.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Start a new run from a checkpoint of another."""
    from trainbus.client import submission as acting

    _run(acting.restore(_address(data_dir), name, step, epoch))
