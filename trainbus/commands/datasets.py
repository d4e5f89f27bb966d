"""``trainbus datasets``: list, show, verify and compare datasets, and print their lineage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.formats import plural
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Dataset, Json, StackName, choose_data_dir, command, with_client
from trainbus.commands.progress import byte_bar, ingestion_bar

if TYPE_CHECKING:
    from contracts.verification import DatasetVerification
    from trainbus.client.client import AsyncClient

app = typer.Typer(
    name="datasets",
    help="Datasets: list, show, verify and compare them, make one, print their lineage.",
)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, stack: StackName = None, as_json: Json = False) -> None:
    """Datasets: list, show, verify and compare them, make one, print their lineage."""
    if context.invoked_subcommand is None:
        with_client(choose_data_dir(data_dir, stack), lambda client: ls(client, as_json=as_json))
    elif data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus datasets {context.invoked_subcommand} ...`")


@command(app)
async def ls(client: AsyncClient, as_json: Json = False) -> None:
    """List the datasets, the ingestions in progress, and those that failed."""
    from trainbus.client.datasets import list_datasets, list_newest_ingestions, list_unfinished
    from trainbus.client.ingestion import read_progress
    from trainbus.commands import dataset_tables

    # In this order an ingestion whose dataset is made meanwhile is in both lists; in the other, in neither.
    unfinished, datasets = await list_unfinished(client.connection), await list_datasets(client.connection)
    if as_json:
        print(render.as_json(dataset_tables.list_to_plain(datasets, unfinished)))
    else:
        progress = await read_progress(client.connection)
        ended = {each.ingestion_id for each in await list_newest_ingestions(client.connection) if each.has_ended}
        working = [event for event in progress if event.ingestion_id not in ended]
        dataset_tables.print_list(datasets, unfinished, working)


@command(app)
async def show(
    client: AsyncClient,
    name: Dataset,
    urls: Annotated[bool, typer.Option("--urls", help="Print only the shards' addresses, one per line.")] = False,
    split: Annotated[str | None, typer.Option("--split", help="With --urls: only of this split.")] = None,
    classes: Annotated[
        bool, typer.Option("--classes", help="Count the records of each class in each split (reads the index).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one dataset: its splits, classes, statistics and shards."""
    from trainbus.client.datasets import count_classes, list_shard_uris, load_dataset
    from trainbus.client.gateway import open_gateway
    from trainbus.commands import dataset_tables

    known = await client.dataset(name)
    async with open_gateway(client.address) as http:
        loaded = await load_dataset(http, known)
        counts = await count_classes(http, loaded) if classes and not urls else None
    if urls:
        found = list_shard_uris(loaded, split)
        print(render.as_json(found) if as_json else "\n".join(found))
    elif as_json:
        print(render.as_json(dataset_tables.dataset_to_plain(loaded, counts)))
    else:
        dataset_tables.print_dataset(loaded, counts)


@command(app)
async def verify(
    client: AsyncClient,
    name: Annotated[str | None, typer.Argument(help="A dataset; default: all of them.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Have what is damaged made again, wait, and verify again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read datasets back from the store and compare every hash; exit 1 if anything is damaged."""
    from trainbus.client.ingestion import repair_dataset

    chosen = [(await client.dataset(name)).dataset_id] if name is not None else []
    found = await _verify(client, chosen, quiet=as_json)
    if repair and found.damaged:
        _print_verification(found, as_json=False, stderr=True)
        for dataset_id, files in found.damaged.items():
            with ingestion_bar(quiet=as_json) as report:
                await repair_dataset(client.connection, await client.dataset(dataset_id), files, report)
        found = await _verify(client, [*found.damaged], quiet=as_json)
    _print_verification(found, as_json=as_json)
    if found.damaged:
        remedy = "--repair makes the damaged files again, from what was ingested or from the source"
        hint = "" if repair else f"; {remedy}"
        raise TrainbusError(f"{len(found.damaged)} of {found.datasets} datasets damaged{hint}")


async def _verify(client: AsyncClient, datasets: list[str], *, quiet: bool) -> DatasetVerification:
    """Verify the datasets of these ids; of none, all."""
    from trainbus.client.datasets import verify_datasets

    with byte_bar("reading back", quiet=quiet) as advance:
        return await verify_datasets(client.connection, datasets, advance)


def _print_verification(found: DatasetVerification, *, as_json: bool, stderr: bool = False) -> None:
    stream = sys.stderr if stderr else sys.stdout
    if as_json:
        print(render.as_json(found), file=stream)
        return
    for dataset_id, files in found.damaged.items():
        print(f"dataset {dataset_id}", file=stream)
        for each in files:
            print(f"  {each.path or 'manifest.json'}: {each.problem}\n    {each.uri}", file=stream)
    if not found.damaged:
        subject = "1 dataset is" if found.datasets == 1 else f"{found.datasets} datasets are"
        sizes = f"{found.samples:,} samples in {found.shards:,} shards, {render.size(found.size_bytes)}"
        print(f"{subject} whole: {sizes}, every byte verified", file=stream)


@command(app)
async def fetch(
    client: AsyncClient,
    name: Dataset,
    folder: Annotated[Path, typer.Argument(help="Where to put it; becomes the dataset's folder.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only the shards of this split; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset into a folder and verify every byte; files that are there already stay."""
    from trainbus.client.datasets import fetch_dataset, load_dataset
    from trainbus.client.gateway import open_gateway

    async with open_gateway(client.address) as http:
        loaded = await load_dataset(http, await client.dataset(name))
        with byte_bar("fetching", quiet=as_json) as advance:
            found = await fetch_dataset(http, loaded, folder, split or (), advance)
    if as_json:
        named = {"dataset_id": loaded.known.dataset_id, "folder": str(folder)}
        print(render.as_json({**named, **render.to_plain(found)}))
    else:
        kept = f" ({found.files - found.fetched} were there)" if found.fetched < found.files else ""
        print(f"{folder}: {plural(found.files, 'file')}, {render.size(found.size_bytes)}{kept}, every byte verified")


@command(app)
async def diff(
    client: AsyncClient,
    one: Dataset,
    other: Dataset,
    examples: Annotated[int, typer.Option(min=0, help="Keys to print of each kind of change.")] = 3,
    as_json: Json = False,
) -> None:
    """List what changed between two datasets, by split and class; exit 1 if anything did."""
    from trainbus.client.datasets import compare_datasets, load_dataset
    from trainbus.client.gateway import open_gateway
    from trainbus.commands import dataset_tables

    pair = [await client.dataset(name) for name in (one, other)]
    async with open_gateway(client.address) as http:
        old, new = [await load_dataset(http, known) for known in pair]
        found = await compare_datasets(http, old, new, examples)
    settings = dataset_tables.list_settings_changes(old.manifest, new.manifest)
    if as_json:
        print(render.as_json(dataset_tables.difference_to_plain(old, new, found, settings)))
    else:
        dataset_tables.print_difference(old, new, found, settings)
    if found.total or settings:
        raise TrainbusError(f"they differ: {dataset_tables.format_totals(found) or 'in their settings alone'}")


@command(app)
async def lineage(client: AsyncClient, name: Dataset, as_json: Json = False) -> None:
    """Print where a dataset comes from, which runs trained on it, and which models were promoted."""
    from trainbus.commands import dataset_tables

    known = await client.dataset(name)
    if as_json:
        print(render.as_json(dataset_tables.lineage_to_plain(known)))
    else:
        render.console().print(dataset_tables.render_lineage(known))


@command(app)
async def ingest(
    client: AsyncClient,
    source: Annotated[
        str | None, typer.Argument(help="s3://bucket/prefix of the raw data, or a folder (embedded).")
    ] = None,
    data_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="images, jsonl, csv, parquet, text, tokens, binary, webdataset or mds; default: by the files.",
        ),
    ] = None,
    label_field: Annotated[str | None, typer.Option("--label", help="Field or column that is the label.")] = None,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", help="JSON or TOML file of other settings: split, checks, features..."),
    ] = None,
    again: Annotated[str | None, typer.Option("--again", help="Use the settings of this dataset.")] = None,
    follow: Annotated[bool, typer.Option("--follow/--detach", help="Stay until the dataset is made.")] = True,
    as_json: Json = False,
) -> None:
    """Make a dataset without training on it; print its id."""
    from trainbus.client import ingestion
    from trainbus.client.data_format import check_local_format
    from trainbus.client.submission import resolve_source

    given = {"source": source and resolve_source(source), "format": data_format, "label_field": label_field}
    data = ingestion.read_settings(settings) if settings is not None else {}
    if again is not None:
        data = ingestion.settings_of(await client.dataset(again))
    data |= {name: value for name, value in given.items() if value is not None}
    request = ingestion.build_ingestion(data)
    check_local_format(request.data.source, request.data.format)
    ingestion_id = await ingestion.request_ingestion(client.connection, request)
    if not follow:
        print(render.as_json({"ingestion_id": ingestion_id}) if as_json else ingestion_id)
        return
    with ingestion_bar(quiet=as_json) as report:
        dataset_id = await ingestion.follow_ingestion(
            client.connection, ingestion_id, lambda event: ingestion.find_made_dataset(client.connection, event), report
        )
    print(render.as_json({"ingestion_id": ingestion_id, "dataset_id": dataset_id}) if as_json else dataset_id)
