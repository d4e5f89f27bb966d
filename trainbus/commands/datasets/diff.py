"""``trainbus datasets diff``."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from contracts.datasets import Manifest
from services.kit.store.objects import ObjectStore
from trainbus.client.address import StackAddress
from trainbus.client.connection import connect
from trainbus.client.datasets import (
    LoadedDataset,
    fetch_index,
    find_dataset,
    iterate_records,
    load_dataset,
    read_history,
)
from trainbus.client.errors import TrainbusError
from trainbus.client.object_store import open_object_store
from trainbus.commands import render
from trainbus.commands.datasets.tables import MAX_ROWS, print_rest, split_line
from trainbus.datasets.diff import KINDS, Difference, Kind, UnsortedIndex, compare


async def diff_datasets(address: StackAddress, one: str, other: str, *, examples: int, as_json: bool) -> None:
    """Print what changed between two datasets; fail if anything did."""
    async with connect(address) as connection:
        history = await read_history(connection)
    before, after = find_dataset(history, one, address), find_dataset(history, other, address)
    async with open_object_store(address) as objects:
        old, new = await load_dataset(objects, before), await load_dataset(objects, after)
        found = await _compare(objects, old, new, examples)
    settings = _settings_changes(old.manifest, new.manifest)
    differ = bool(found.total or settings)
    if as_json:
        print(render.as_json({
            "before": before.dataset_id, "after": after.dataset_id, "same": found.same, "settings": settings,
            **{kind: _counts(found, kind) for kind in KINDS},
            "moves": [{"from": a, "to": b, "records": n} for (a, b), n in sorted(found.moves.items())],
            "relabels": [{"from": a, "to": b, "records": n} for (a, b), n in sorted(found.relabels.items())],
        }))  # fmt: skip
    else:
        _print_difference(old, new, found, settings)
    if differ:
        raise TrainbusError(f"they differ: {_totals(found) or 'in their settings alone'}")


async def _compare(objects: ObjectStore, old: LoadedDataset, new: LoadedDataset, examples: int) -> Difference:
    with tempfile.TemporaryDirectory(prefix="trainbus-") as folder:
        paths = Path(folder) / "before.jsonl", Path(folder) / "after.jsonl"
        for loaded, path in zip((old, new), paths, strict=True):
            await fetch_index(objects, loaded, path)
        try:
            return await asyncio.to_thread(compare, iterate_records(paths[0]), iterate_records(paths[1]), examples)
        except UnsortedIndex as error:
            raise TrainbusError(f"{error}: the index is damaged; ingest the source again") from error


def _counts(found: Difference, kind: Kind) -> dict[str, Any]:
    by_class = [{"split": s, "class": c, "records": n} for (s, c), n in sorted(found.by_class[kind].items())]
    return {"records": found.count(kind), "by_class": by_class, "examples": found.examples[kind]}


def _settings_changes(old: Manifest, new: Manifest) -> list[str]:
    changes = []
    if old.source != new.source:
        changes.append(f"source {old.source} -> {new.source}")
    if old.format != new.format:
        changes.append(f"format {old.format} -> {new.format}")
    if old.split != new.split:
        changes.append(f"split {split_line(old.split)} -> {split_line(new.split)}")
    if gone := sorted(set(old.classes) - set(new.classes)):
        changes.append(f"classes gone: {', '.join(gone[:20])}")
    if come := sorted(set(new.classes) - set(old.classes)):
        changes.append(f"classes new: {', '.join(come[:20])}")
    return changes


def _totals(found: Difference) -> str:
    return ", ".join(f"{found.count(kind):,} {kind}" for kind in KINDS if found.count(kind))


def _print_difference(old: LoadedDataset, new: LoadedDataset, found: Difference, settings: list[str]) -> None:
    console = render.console()
    for sign, loaded in (("-", old), ("+", new)):
        total = sum(split.samples for split in loaded.manifest.splits.values())
        console.print(
            f"{sign} {loaded.known.dataset_id[:12]}  {total:,} records  {render.escape(loaded.manifest.source)}"
        )
    for line in settings:
        console.print(f"  {render.escape(line)}", soft_wrap=True)
    console.print(f"  {found.same:,} records are the same")
    if not found.total:
        return
    kinds = [kind for kind in KINDS if found.count(kind)]
    made = render.table("split", "class", *kinds, right=kinds)
    keys = sorted({key for kind in KINDS for key in found.by_class[kind]})
    for split, label in keys[:MAX_ROWS]:
        counts = (found.by_class[kind][split, label] for kind in kinds)
        made.add_row(split, render.escape(label) or "[dim](none)[/]", *(f"{n:,}" if n else "" for n in counts))
    console.print(made)
    print_rest(len(keys), "rows")
    for name, pairs in (("moved", found.moves), ("relabelled", found.relabels)):
        for (a, b), n in pairs.most_common(10):
            console.print(f"{name} {render.escape(a or '(none)')} -> {render.escape(b or '(none)')}: {n:,}")
    for kind in KINDS:
        if found.examples[kind]:
            console.print(f"[dim]{kind}, such as {render.escape(', '.join(found.examples[kind]))}[/]", soft_wrap=True)
