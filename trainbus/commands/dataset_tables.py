"""Tables and texts about datasets, their differences and their lineage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.tree import Tree

from contracts.datasets import SPLITS, Manifest
from contracts.events.dataset import DatasetIngested, DatasetProgress
from contracts.spec.data import Split
from trainbus.client.datasets import LoadedDataset
from trainbus.commands import render
from trainbus.commands.render import escape
from trainbus.datasets.diff import KINDS, Difference, Kind
from trainbus.datasets.history import DatasetRecord, Ingestion, TrainingUse

#: Rows of a table; JSON has them all.
MAX_ROWS = 40
MAX_FAILED_ROWS = 5
#: Terminal width that the whole table of datasets needs.
WIDE = 100


# -- ls --------------------------------------------------------------------------


def list_to_plain(datasets: Iterable[DatasetRecord], unfinished: Iterable[Ingestion]) -> list[dict[str, Any]]:
    """Return every dataset, and every ingestion without one, as JSON."""
    return [*map(summarize_dataset, datasets), *map(summarize_ingestion, unfinished)]


def print_list(
    datasets: Sequence[DatasetRecord], unfinished: Sequence[Ingestion], working: Sequence[DatasetProgress]
) -> None:
    """Print the datasets, the ingestions in progress, and those that failed."""
    if not (datasets or unfinished or working):
        print("no datasets yet: a run with `--data s3://...` makes one")
        return
    console = render.console()
    if datasets:
        console.print(_render_datasets(datasets, wide=console.width >= WIDE))
    for event in working:
        console.print(_format_progress(event), soft_wrap=True)
    at_work = {event.ingestion_id for event in working}
    for each in unfinished:
        if not each.failed and each.ingestion_id not in at_work and each.found is not None:
            console.print(f"[yellow]being sharded[/] {each.ingestion_id}: {escape(each.found.data.source)}")
    failed = [each for each in unfinished if each.failed]
    for each in failed[-MAX_FAILED_ROWS:]:
        console.print(f"[bold red]failed[/] {each.ingestion_id}: {escape(each.failed)}", soft_wrap=True)
    if len(failed) > MAX_FAILED_ROWS:
        console.print(f"[dim]and {len(failed) - MAX_FAILED_ROWS} more that failed before: --json has them all[/]")


def _format_progress(event: DatasetProgress) -> str:
    of = f" of {event.total:,} ({event.done / event.total:.0%})" if event.total else ""
    rate = f", {event.records_per_s:,.0f}/s" if event.records_per_s else ""
    left = f", {render.span(event.eta_s)} left" if event.eta_s is not None else ""
    return f"[yellow]{event.phase}[/] {event.ingestion_id}: {event.done:,}{of}{rate}{left}"


def _render_datasets(datasets: Iterable[DatasetRecord], *, wide: bool) -> Table:
    """Return a table of datasets; a narrow one leaves out columns that ``show`` has."""
    numbers = ("records", "train/val/test", "bad", "shards", "size", "runs", "made")
    columns = ("dataset", "source", "format", *numbers)
    shown = [name for name in columns if wide or name not in ("format", "bad", "shards", "runs")]
    table = render.table(*shown, right=numbers)
    for known in datasets:
        row = _row(known)
        table.add_row(*(row[name] for name in shown))
    return table


def _row(known: DatasetRecord) -> dict[str, str]:
    record = known.record
    counts = record.split_counts if record else {}
    bad = sum(known.quarantined.values())
    return {
        "dataset": known.dataset_id[:12],
        "source": escape(known.source),
        "format": known.format or "",
        "records": f"{sum(counts.values()):,}" if counts else "",
        "train/val/test": "/".join(f"{counts.get(split, 0):,}" for split in SPLITS) if counts else "",
        "bad": f"{bad:,}" if bad else "",
        "shards": str(record.shard_count) if record else "",
        "size": render.size(record.size_bytes) if record else "",
        "runs": str(known.run_count),
        "made": render.ago(record.created_at, render.utc_now()) if record else "",
    }


def summarize_dataset(known: DatasetRecord) -> dict[str, Any]:
    record = known.record
    return {
        "dataset_id": known.dataset_id,
        "state": "sharded",
        "source": known.source,
        "format": known.format,
        "manifest_uri": known.manifest_uri,
        "row_count": record.row_count if record else None,
        "split_counts": record.split_counts if record else None,
        "shard_count": record.shard_count if record else None,
        "size_bytes": record.size_bytes if record else None,
        "classes": record.classes if record else (),
        "created_at": record.created_at if record else None,
        "feature_store_version": record.feature_store_version if record else None,
        "split_config_hash": record.split_config_hash if record else None,
        "quarantined": known.quarantined,
        "run_count": known.run_count,
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


def dataset_to_plain(loaded: LoadedDataset, counts: Counter[tuple[str, str]] | None) -> dict[str, Any]:
    """Return a dataset as JSON."""
    ingestions = [each.ingestion_id for each in loaded.known.ingestions]
    runs = [use.run_id for use in loaded.known.runs]
    plain = {**summarize_dataset(loaded.known), "ingestions": ingestions, "runs": runs, "manifest": loaded.manifest}
    if counts is None:
        return plain
    by_class = {split: {label: n for (each, label), n in sorted(counts.items()) if each == split} for split in SPLITS}
    return {**plain, "class_counts": by_class}


def print_dataset(loaded: LoadedDataset, counts: Counter[tuple[str, str]] | None) -> None:
    """Print what a dataset is made of."""
    _print_summary(loaded)
    _print_splits(loaded.manifest)
    if counts:
        _print_classes(counts)
    if loaded.manifest.statistics:
        _print_statistics(loaded.manifest)


def _print_summary(loaded: LoadedDataset) -> None:
    known, manifest = loaded.known, loaded.manifest
    found = known.first_ingestion
    classes = ", ".join(manifest.classes[:12]) + (", ..." if len(manifest.classes) > 12 else "")
    rows = {
        "dataset": known.dataset_id,
        "source": f"{manifest.source} ({manifest.format})",
        "made": f"{known.record.created_at:%Y-%m-%d %H:%M:%S} UTC" if known.record else "",
        "ingestion": _format_ingestion(found) if found else f"fingerprint {manifest.fingerprint[:12]}",
        "quarantine": (found.found.quarantine_uri or "") if found and found.found else "",
        "split": _format_split(manifest.split),
        "classes": f"{len(manifest.classes):,}: {classes}" if manifest.classes else "",
        "token": f"{manifest.token_bytes} bytes" if manifest.token_bytes else "",
        "manifest": known.manifest_uri,
        "runs": ", ".join(f"{use.name or use.run_id} ({use.state})" for use in known.runs[-5:])
        + (f" and {known.run_count - 5} before" if known.run_count > 5 else ""),
    }
    render.print_fields({name: escape(value) for name, value in rows.items()})


def _format_ingestion(ingestion: Ingestion) -> str:
    if ingestion.found is None:
        return ingestion.ingestion_id
    return f"{ingestion.ingestion_id}, {format_ingested(ingestion.found)}"


def format_ingested(found: DatasetIngested) -> str:
    """Return how many records an ingestion accepted, left out and quarantined."""
    line = f"{found.accepted:,} records accepted"
    if found.left_out:
        line += f", {found.left_out:,} left out"
    if found.quarantined:
        codes = ", ".join(f"{kind.count:,} {kind.code}" for kind in found.quarantined)
        line += f", {sum(kind.count for kind in found.quarantined):,} in quarantine ({codes})"
    return line


def _format_split(split: Split) -> str:
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
        table.add_row(escape(label) or "[dim](none)[/]", *(f"{counts[split, label]:,}" for split in SPLITS))
    render.console().print(table)
    _print_rest(len(labels), "classes")


def _print_statistics(manifest: Manifest) -> None:
    numbers = ("count", "nulls", "mean", "std", "min", "max")
    table = render.table("field", *numbers, right=numbers, title="train split")
    for name, field in list(manifest.statistics.items())[:MAX_ROWS]:
        values = (field.mean, field.std, field.min, field.max)
        table.add_row(escape(name), f"{field.count:,}", f"{field.nulls:,}", *(f"{value:.6g}" for value in values))
    render.console().print(table)
    _print_rest(len(manifest.statistics), "fields")


def _print_rest(count: int, what: str) -> None:
    if count > MAX_ROWS:
        render.console().print(f"[dim]and {count - MAX_ROWS:,} more {what}: --json has them all[/]")


# -- diff ------------------------------------------------------------------------


def difference_to_plain(
    old: LoadedDataset, new: LoadedDataset, found: Difference, settings: list[str]
) -> dict[str, Any]:
    """Return a difference as JSON."""
    return {
        "before": old.known.dataset_id,
        "after": new.known.dataset_id,
        "same": found.same,
        "settings": settings,
        **{kind: _count_changes(found, kind) for kind in KINDS},
        "moves": [{"from": a, "to": b, "records": n} for (a, b), n in sorted(found.moves.items())],
        "relabels": [{"from": a, "to": b, "records": n} for (a, b), n in sorted(found.relabels.items())],
    }


def _count_changes(found: Difference, kind: Kind) -> dict[str, Any]:
    by_class = [{"split": s, "class": c, "records": n} for (s, c), n in sorted(found.by_class[kind].items())]
    return {"records": found.count(kind), "by_class": by_class, "examples": found.examples[kind]}


def list_settings_changes(old: Manifest, new: Manifest) -> list[str]:
    """Return the settings that differ between two datasets, each in a sentence."""
    changes = []
    if old.source != new.source:
        changes.append(f"source {old.source} -> {new.source}")
    if old.format != new.format:
        changes.append(f"format {old.format} -> {new.format}")
    if old.split != new.split:
        changes.append(f"split {_format_split(old.split)} -> {_format_split(new.split)}")
    if gone := sorted(set(old.classes) - set(new.classes)):
        changes.append(f"classes gone: {', '.join(gone[:20])}")
    if come := sorted(set(new.classes) - set(old.classes)):
        changes.append(f"classes new: {', '.join(come[:20])}")
    return changes


def format_totals(found: Difference) -> str:
    """Return how many records changed, by kind."""
    return ", ".join(f"{found.count(kind):,} {kind}" for kind in KINDS if found.count(kind))


def print_difference(old: LoadedDataset, new: LoadedDataset, found: Difference, settings: list[str]) -> None:
    """Print what changed between two datasets."""
    console = render.console()
    for sign, loaded in (("-", old), ("+", new)):
        total = sum(split.samples for split in loaded.manifest.splits.values())
        console.print(f"{sign} {loaded.known.dataset_id[:12]}  {total:,} records  {escape(loaded.manifest.source)}")
    for line in settings:
        console.print(f"  {escape(line)}", soft_wrap=True)
    console.print(f"  {found.same:,} records are the same")
    if not found.total:
        return
    kinds = [kind for kind in KINDS if found.count(kind)]
    made = render.table("split", "class", *kinds, right=kinds)
    keys = sorted({key for kind in KINDS for key in found.by_class[kind]})
    for split, label in keys[:MAX_ROWS]:
        counts = (found.by_class[kind][split, label] for kind in kinds)
        made.add_row(split, escape(label) or "[dim](none)[/]", *(f"{n:,}" if n else "" for n in counts))
    console.print(made)
    _print_rest(len(keys), "rows")
    for name, pairs in (("moved", found.moves), ("relabelled", found.relabels)):
        for (a, b), n in pairs.most_common(10):
            console.print(f"{name} {escape(a or '(none)')} -> {escape(b or '(none)')}: {n:,}")
    for kind in KINDS:
        if found.examples[kind]:
            console.print(f"[dim]{kind}, such as {escape(', '.join(found.examples[kind]))}[/]", soft_wrap=True)


# -- lineage ---------------------------------------------------------------------


def lineage_to_plain(known: DatasetRecord) -> dict[str, Any]:
    """Return a dataset with its ingestions, its runs and their models as JSON."""
    ingestions = [summarize_ingestion(each) for each in known.ingestions]
    return {**summarize_dataset(known), "ingestions": ingestions, "runs": known.runs}


def render_lineage(known: DatasetRecord) -> Tree:
    """Return the source of a dataset, its ingestions, its runs and their models."""
    root = branch = Tree(f"[bold]{escape(known.source or '(the log no longer has its source)')}[/]")
    for first, again in _group_by_input(known.ingestions):
        branch = root.add(f"ingestion {escape(_format_ingestion(first))}")
        if first.found is not None:
            settings = first.found.data.model_dump(mode="json", exclude_defaults=True, exclude={"source"})
            branch.add(f"[dim]fingerprint {first.found.fingerprint[:16]}; {escape(_format_settings(settings))}[/]")
            if first.found.quarantine_uri is not None:
                branch.add(f"[dim]quarantine {first.found.quarantine_uri}[/]")
        if again:
            branch.add(f"[dim]requested again as {', '.join(each.ingestion_id for each in again)}[/]")
    record = known.record
    size = f", {record.row_count:,} samples, {render.size(record.size_bytes)}" if record else ""
    at = f", {record.created_at:%Y-%m-%d %H:%M} UTC" if record else ""
    made = branch.add(f"dataset [bold]{known.dataset_id[:12]}[/]{size}{at}")
    for use in known.runs:
        _add_run(made, use)
    if not known.runs:
        made.add("[dim]no run has used it[/]")
    return root


def _group_by_input(ingestions: list[Ingestion]) -> list[tuple[Ingestion, list[Ingestion]]]:
    """Return the first ingestion of each input, with the later ones of the same input."""
    found: dict[str, list[Ingestion]] = {}
    for each in ingestions:
        found.setdefault(each.found.fingerprint if each.found else each.ingestion_id, []).append(each)
    return [(first, again) for first, *again in found.values()]


def _add_run(tree: Tree, use: TrainingUse) -> None:
    kind = "evaluation" if use.kind == "evaluate" else "run"
    branch = tree.add(f"{kind} {use.run_id} {escape(use.name)} {render.state(use.state)}")
    if use.init_from is not None:
        branch.add(f"[dim]weights from {escape(use.init_from)}[/]")
    for each in use.champions:
        metrics = ", ".join(f"{escape(name)} {value:.4g}" for name, value in sorted(each.metrics.items())[:3])
        since = "champion since" if each.reigns else "was promoted"
        branch.add(
            f"model [bold]{each.model}[/] version {each.version}, {since} {each.at:%Y-%m-%d %H:%M} UTC  {metrics}"
        )


def _format_settings(settings: dict[str, Any]) -> str:
    def format_value(value: Any) -> str:
        return f"({_format_settings(value)})" if isinstance(value, dict) else str(value)

    return ", ".join(f"{name} {format_value(value)}" for name, value in settings.items())
