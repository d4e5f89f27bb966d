"""``trainbus datasets``: list, show, verify and compare datasets, and print their lineage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainbus.client.address import find_address
from trainbus.client.errors import UsageError
from trainbus.commands.options import DataDir, Dataset, Json, run

app = typer.Typer(help="Datasets: list, show, verify and compare them, make one, print their lineage.")


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Datasets: list, show, verify and compare them, make one, print their lineage."""
    if context.invoked_subcommand is None:
        ls(data_dir=data_dir, as_json=as_json)
    elif data_dir is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus datasets {context.invoked_subcommand} ...`")


@app.command()
def ls(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the datasets, the ingestions in progress, and those that failed."""
    from trainbus.commands.datasets.tables import print_datasets

    run(print_datasets(find_address(data_dir), as_json=as_json))


@app.command()
def show(
    name: Dataset,
    urls: Annotated[bool, typer.Option("--urls", help="Print only the shards' addresses, one per line.")] = False,
    split: Annotated[str | None, typer.Option("--split", help="With --urls: only of this split.")] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Count the records of each class in each split (reads the index).")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show one dataset: its splits, classes, statistics and shards."""
    from trainbus.commands.datasets.tables import print_dataset, print_urls

    if urls:
        run(print_urls(find_address(data_dir), name, split, as_json=as_json))
    else:
        run(print_dataset(find_address(data_dir), name, classes=classes, as_json=as_json))


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="A dataset; default: all of them.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have what is damaged made again, wait, and verify again.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Read datasets back from the store and compare every hash; exit 1 if anything is damaged."""
    from trainbus.commands.datasets.verify import verify_datasets

    run(verify_datasets(find_address(data_dir), name, repair=repair, as_json=as_json))


@app.command()
def fetch(
    name: Dataset,
    folder: Annotated[Path, typer.Argument(help="Where to put it; becomes the dataset's folder.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only the shards of this split; repeatable.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset into a folder and verify every byte; files that are there already stay."""
    from trainbus.commands.datasets.fetch import fetch_dataset

    run(fetch_dataset(find_address(data_dir), name, folder, split or [], as_json=as_json))


@app.command()
def diff(
    one: Dataset,
    other: Dataset,
    examples: Annotated[int, typer.Option(min=0, help="Keys to print of each kind of change.")] = 3,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List what changed between two datasets, by split and class; exit 1 if anything did."""
    from trainbus.commands.datasets.diff import diff_datasets

    run(diff_datasets(find_address(data_dir), one, other, examples=examples, as_json=as_json))


@app.command()
def lineage(name: Dataset, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Print where a dataset comes from, which runs trained on it, and which models were promoted."""
    from trainbus.commands.datasets.lineage import print_lineage

    run(print_lineage(find_address(data_dir), name, as_json=as_json))


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
        Path | None,
        typer.Option("--settings", help="JSON or TOML file of other settings: split, checks, features..."),
    ] = None,
    again: Annotated[str | None, typer.Option("--again", help="Use the settings of this dataset.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--detach", help="Stay until the dataset is made.")] = True,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make a dataset without training on it; print its id."""
    from trainbus.commands.datasets.ingest import ingest_dataset

    given = {"format": data_format, "label_field": label_field}
    address = find_address(data_dir)
    run(ingest_dataset(address, source, given=given, settings=settings, again=again, follow=follow, as_json=as_json))
