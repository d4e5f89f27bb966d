"""``trainbus datasets``: list, look at, verify and compare datasets, and tell where they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from trainbus.client.errors import USAGE, CliError

app = typer.Typer(help="Datasets: list, look at, verify and compare them; where they come from and what came of them.")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Name = Annotated[
    str, typer.Argument(help="A dataset's id or the unique start of one; or an ingestion or run that has one.")
]


def _address(data_dir: Path | None) -> Any:
    from trainbus.client.address import find

    return find(data_dir)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Datasets: list, look at, verify and compare them; where they come from and what came of them."""
    if context.invoked_subcommand is None:
        ls(data_dir=data_dir, as_json=as_json)
    elif data_dir is not None or as_json:
        raise CliError(
            f"give the options after the command: `trainbus datasets {context.invoked_subcommand} ...`", USAGE
        )


@app.command()
def ls(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the datasets, what is being made, and what failed."""
    from trainbus.commands.datasets import tables

    _run(tables.ls(_address(data_dir), as_json=as_json))


@app.command()
def show(
    name: Name,
    urls: Annotated[bool, typer.Option("--urls", help="Print the shards' addresses alone, one a line.")] = False,
    split: Annotated[str | None, typer.Option("--split", help="For --urls: of this split alone.")] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Count the records of each class in each split (reads the index).")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show one dataset: its splits, classes, statistics and shards."""
    from trainbus.commands.datasets import tables

    if urls:
        _run(tables.urls(_address(data_dir), name, split, as_json=as_json))
    else:
        _run(tables.show(_address(data_dir), name, classes=classes, as_json=as_json))


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="A dataset; default: all of them.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have what is wrong made anew, wait, and look again.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read datasets back from the store and compare every byte with its hash; exit 1 if anything is wrong."""
    from trainbus.commands.datasets import verify

    _run(verify.verify(_address(data_dir), name, repair=repair, as_json=as_json))


@app.command()
def fetch(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Where to: becomes the dataset's folder.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Shards of this split alone; may be given again.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset into a folder, each byte compared; what is there already stays."""
    from trainbus.commands.datasets import fetch

    _run(fetch.fetch(_address(data_dir), name, folder, split or [], as_json=as_json))


@app.command()
def diff(
    one: Name,
    other: Name,
    examples: Annotated[int, typer.Option(min=0, help="So many keys of each kind of change.")] = 3,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say what changed between two datasets, by split and class; exit 1 if anything did."""
    from trainbus.commands.datasets import diff

    _run(diff.diff(_address(data_dir), one, other, examples=examples, as_json=as_json))


@app.command()
def lineage(name: Name, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Tell where a dataset comes from, which runs trained on it, and which models were promoted."""
    from trainbus.commands.datasets import lineage

    _run(lineage.lineage(_address(data_dir), name, as_json=as_json))


@app.command()
def ingest(
    source: Annotated[
        str | None, typer.Argument(help="s3://bucket/prefix of the raw data, or a folder (embedded).")
    ] = None,
    data_format: Annotated[
        str | None, typer.Option("--format", help="images, jsonl, parquet, text, tokens, binary, webdataset or mds.")
    ] = None,
    label_field: Annotated[str | None, typer.Option("--label", help="Field or column that is the label.")] = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", help="JSON or TOML file with more: split, checks, features...")
    ] = None,
    again: Annotated[
        str | None, typer.Option("--again", help="With the settings that this dataset was made with.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--detach", help="Stay until the dataset is there.")] = True,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a dataset without training on it; print its id."""
    from trainbus.commands.datasets import ingest

    given = {"format": data_format, "label_field": label_field}
    address = _address(data_dir)
    _run(ingest.ingest(address, source, given=given, settings=settings, again=again, follow=follow, as_json=as_json))
