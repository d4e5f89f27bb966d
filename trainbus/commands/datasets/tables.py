"""``trainbus datasets ls|show``."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from contracts import subjects, topology
from contracts.datasets import SPLITS, Manifest, shard_uri
from contracts.events.dataset import DatasetProgress
from contracts.spec.data import Split
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection, connect
from trainbus.client.datasets import (
    LoadedDataset,
    fetch_index,
    find_dataset,
    iterate_records,
    load_dataset,
    read_history,
)
from trainbus.client.errors import UsageError
from trainbus.client.object_store import open_object_store
from trainbus.commands import render
from trainbus.datasets.history import DatasetRecord, History, Ingestion

#: Seconds after which progress is out of date: the ingestion stopped without a fact about its end.
MAX_PROGRESS_AGE_S = 60.0
#: Rows of a table; JSON has them all.
MAX_ROWS = 40
MAX_FAILED_ROWS = 5
#: Terminal width that the whole table of datasets needs.
WIDE = 100


# -- ls --------------------------------------------------------------------------


async def print_datasets(address: StackAddress, *, as_json: bool) -> None:
    """Print the datasets, the ingestions in progress, and those that failed."""
    async with connect(address) as connection:
        history = await read_history(connection)
        working = await _read_progress(connection, history)
    pending = [each for each in history.ingestions.values() if each.dataset_id is None]
    if as_json:
        found = [summarize_dataset(known) for known in history.datasets.values()]
        print(render.as_json(found + [summarize_ingestion(each) for each in pending]))
        return
    if not (history.datasets or pending or working):
        print("no datasets yet: a run with `--data s3://...` makes one")
        return
    console = render.console()
    if history.datasets:
        console.print(_table(history, wide=console.width >= WIDE))
    for event in working:
        console.print(_progress(event), soft_wrap=True)
    at_work = {event.ingestion_id for event in working}
    for each in pending:
        if not each.failed and each.ingestion_id not in at_work and each.found is not None:
            console.print(f"[yellow]being sharded[/] {each.ingestion_id}: {render.escape(each.found.data.source)}")
    failed = [each for each in pending if each.failed]
    for each in failed[-MAX_FAILED_ROWS:]:
        console.print(f"[bold red]failed[/] {each.ingestion_id}: {render.escape(each.failed)}", soft_wrap=True)
    if len(failed) > MAX_FAILED_ROWS:
        console.print(f"[dim]and {len(failed) - MAX_FAILED_ROWS} more that failed before: --json has them all[/]")


async def _read_progress(connection: Connection, history: History) -> list[DatasetProgress]:
    """Return the newest progress of each ingestion or sharding that has not ended."""
    newest: dict[str, DatasetProgress] = {}
    for message in await connection.read(subjects.dataset_progress(), stream=topology.PROGRESS):
        newest[message.event.ingestion_id] = message.event
    return [
        event
        for event in newest.values()
        if time.time() - event.time < MAX_PROGRESS_AGE_S
        and ((known := history.ingestions.get(event.ingestion_id)) is None or known.state == "sharding")
    ]


def _progress(event: DatasetProgress) -> str:
    of = f" of {event.total:,} ({event.done / event.total:.0%})" if event.total else ""
    rate = f", {event.records_per_s:,.0f}/s" if event.records_per_s else ""
    left = f", {render.span(event.eta_s)} left" if event.eta_s is not None else ""
    return f"[yellow]{event.phase}[/] {event.ingestion_id}: {event.done:,}{of}{rate}{left}"


def _table(history: History, *, wide: bool) -> Table:
    """Return a table of datasets; a narrow one leaves out columns that ``show`` has."""
    numbers = ("records", "train/val/test", "bad", "shards", "size", "runs", "made")
    columns = ("dataset", "source", "format", *numbers)
    shown = [name for name in columns if wide or name not in ("format", "bad", "shards", "runs")]
    table = render.table(*shown, right=numbers)
    for known in history.datasets.values():
        row = _row(known)
        table.add_row(*(row[name] for name in shown))
    return table


def _row(known: DatasetRecord) -> dict[str, str]:
    found = next((each.found for each in known.ingestions if each.found), None)
    record = known.record
    counts = record.split_counts if record else found.split_counts if found else {}
    bad = sum(kind.count for kind in found.quarantined) if found else 0
    return {
        "dataset": known.dataset_id[:12],
        "source": render.escape(known.source),
        "format": found.data.format if found else "",
        "records": f"{sum(counts.values()):,}" if counts else "",
        "train/val/test": "/".join(f"{counts.get(split, 0):,}" for split in SPLITS) if counts else "",
        "bad": f"{bad:,}" if bad else "",
        "shards": str(record.shard_count) if record else "",
        "size": render.size(record.size_bytes) if record else "",
        "runs": str(len(known.runs)),
        "made": render.ago(record.created_at, render.utc_now()) if record else "",
    }


def summarize_dataset(known: DatasetRecord) -> dict[str, Any]:
    record = known.record
    found = next((each.found for each in known.ingestions if each.found), None)
    return {
        "dataset_id": known.dataset_id,
        "state": "sharded",
        "source": known.source,
        "format": found.data.format if found else None,
        "manifest_uri": known.manifest_uri,
        "row_count": record.row_count if record else None,
        "split_counts": record.split_counts if record else None,
        "shard_count": record.shard_count if record else None,
        "size_bytes": record.size_bytes if record else None,
        "classes": record.classes if record else (),
        "created_at": record.created_at if record else None,
        "feature_store_version": record.feature_store_version if record else None,
        "split_config_hash": record.split_config_hash if record else None,
        "quarantined": {kind.code: kind.count for kind in found.quarantined} if found else {},
        "ingestions": [each.ingestion_id for each in known.ingestions],
        "runs": [use.run_id for use in known.runs],
    }


def summarize_ingestion(each: Ingestion) -> dict[str, Any]:
    found = each.found
    return {
        "dataset_id": each.dataset_id,
        "state": each.state,
        "ingestion_id": each.ingestion_id,
        "at": each.at,
        "reason": each.failed,
        "source": found.data.source if found else None,
        "format": found.data.format if found else None,
        "fingerprint": found.fingerprint if found else None,
        "settings": found.data.model_dump(mode="json", exclude_defaults=True) if found else None,
        "accepted": found.accepted if found else None,
        "left_out": found.left_out if found else None,
        "split_counts": found.split_counts if found else None,
        "quarantined": {kind.code: kind.count for kind in found.quarantined} if found else {},
        "quarantine_uri": found.quarantine_uri if found else None,
    }


# -- show ------------------------------------------------------------------------


async def open_dataset(address: StackAddress, name: str) -> DatasetRecord:
    async with connect(address) as connection:
        return find_dataset(await read_history(connection), name, address)


async def print_dataset(address: StackAddress, name: str, *, classes: bool, as_json: bool) -> None:
    """Print what a dataset is made of."""
    known = await open_dataset(address, name)
    async with open_object_store(address) as objects:
        loaded = await load_dataset(objects, known)
        counts: Counter[tuple[str, str]] = Counter()
        if classes:
            with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
                path = Path(folder) / "index.jsonl"
                await fetch_index(objects, loaded, path)
                counts.update((each["split"], each["label"] or "") for each in iterate_records(path))
    manifest = loaded.manifest
    if as_json:
        by_class = {
            split: {label: n for (each, label), n in sorted(counts.items()) if each == split} for split in SPLITS
        }
        more = {"class_counts": by_class} if classes else {}
        print(render.as_json({**summarize_dataset(known), "manifest": manifest, **more}))
        return
    _print_summary(loaded)
    _print_splits(manifest)
    if counts:
        _print_classes(counts)
    if manifest.statistics:
        _print_statistics(manifest)


def _print_summary(loaded: LoadedDataset) -> None:
    known, manifest = loaded.known, loaded.manifest
    found = next((each for each in known.ingestions if each.found), None)
    classes = ", ".join(manifest.classes[:12]) + (", ..." if len(manifest.classes) > 12 else "")
    rows = {
        "dataset": known.dataset_id,
        "source": f"{manifest.source} ({manifest.format})",
        "made": f"{known.record.created_at:%Y-%m-%d %H:%M:%S} UTC" if known.record else "",
        "ingestion": ingestion_line(found) if found else f"fingerprint {manifest.fingerprint[:12]}",
        "quarantine": (found.found.quarantine_uri or "") if found and found.found else "",
        "split": split_line(manifest.split),
        "classes": f"{len(manifest.classes):,}: {classes}" if manifest.classes else "",
        "token": f"{manifest.token_bytes} bytes" if manifest.token_bytes else "",
        "manifest": known.manifest_uri,
        "runs": ", ".join(f"{use.name or use.run_id} ({use.state})" for use in known.runs[-5:])
        + (f" and {len(known.runs) - 5} before" if len(known.runs) > 5 else ""),
    }
    console = render.console()
    for name, value in rows.items():
        if value:
            console.print(f"[dim]{name:<10}[/] {render.escape(value)}", soft_wrap=True)


def ingestion_line(ingestion: Ingestion) -> str:
    found = ingestion.found
    if found is None:
        return ingestion.ingestion_id
    line = f"{ingestion.ingestion_id}, {found.accepted:,} records accepted"
    if found.left_out:
        line += f", {found.left_out:,} left out"
    if ingestion.quarantined:
        codes = ", ".join(f"{kind.count:,} {kind.code}" for kind in found.quarantined)
        line += f", {ingestion.quarantined:,} in quarantine ({codes})"
    return line


def split_line(split: Split) -> str:
    """Return a split's settings in words."""
    if split.by == "time":
        borders = [
            f"{name} from {at:%Y-%m-%d %H:%M}" for name, at in
            (("validation", split.validation_from), ("test", split.test_from)) if at is not None
        ]  # fmt: skip
        embargo = f", embargo {render.span(split.embargo_s)}" if split.embargo_s else ""
        return f"by time ({split.time_field}): {', '.join(borders)}{embargo}"
    by = f"group ({split.group_field})" if split.by == "group" else split.by
    shares = "/".join(f"{getattr(split, name):g}" for name in SPLITS)
    return f"by {by}, {shares}{', the same in each class' if split.stratify else ''}, seed {split.seed}"


def _print_splits(manifest: Manifest) -> None:
    total = sum(split.samples for split in manifest.splits.values())
    numbers = ("samples", "share", "shards", "size")
    table = render.table("split", *numbers, right=numbers)
    for name in SPLITS:
        split = manifest.splits[name]
        size = sum(shard.size_bytes for shard in split.shards)
        share = f"{split.samples / total:.1%}" if total else ""
        table.add_row(name, f"{split.samples:,}", share, str(len(split.shards)), render.size(size))
    render.console().print(table)


def _print_classes(counts: Counter[tuple[str, str]]) -> None:
    table = render.table("class", *SPLITS, right=SPLITS)
    labels = sorted({label for _, label in counts})
    for label in labels[:MAX_ROWS]:
        table.add_row(render.escape(label) or "[dim](none)[/]", *(f"{counts[split, label]:,}" for split in SPLITS))
    render.console().print(table)
    print_rest(len(labels), "classes")


def _print_statistics(manifest: Manifest) -> None:
    numbers = ("count", "nulls", "mean", "std", "min", "max")
    table = render.table("field", *numbers, right=numbers, title="train split")
    for name, field in list(manifest.statistics.items())[:MAX_ROWS]:
        values = (field.mean, field.std, field.min, field.max)
        table.add_row(
            render.escape(name), f"{field.count:,}", f"{field.nulls:,}", *(f"{value:.6g}" for value in values)
        )
    render.console().print(table)
    print_rest(len(manifest.statistics), "fields")


def print_rest(count: int, what: str) -> None:
    if count > MAX_ROWS:
        render.console().print(f"[dim]and {count - MAX_ROWS:,} more {what}: --json has them all[/]")


async def print_urls(address: StackAddress, name: str, split: str | None, *, as_json: bool) -> None:
    """Print the shards' addresses, one per line, in the order of the manifest."""
    if split is not None and split not in SPLITS:
        raise UsageError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
    known = await open_dataset(address, name)
    async with open_object_store(address) as objects:
        loaded = await load_dataset(objects, known)
    found = [
        shard_uri(loaded.bucket, shard.sha256)
        for each in ([split] if split else SPLITS)
        for shard in loaded.manifest.splits[each].shards
    ]
    print(render.as_json(found) if as_json else "\n".join(found))
