"""``trainbus datasets lineage``."""

from __future__ import annotations

from typing import Any

from rich.tree import Tree

from trainbus.client.address import StackAddress
from trainbus.commands import render
from trainbus.commands.datasets.tables import ingestion_line, open_dataset, summarize_dataset, summarize_ingestion
from trainbus.datasets.history import Ingestion, TrainingUse


async def print_lineage(address: StackAddress, name: str, *, as_json: bool) -> None:
    """Print the source of a dataset, its ingestions, its runs and their models."""
    known = await open_dataset(address, name)
    if as_json:
        print(render.as_json({
            **summarize_dataset(known),
            "ingestions": [summarize_ingestion(each) for each in known.ingestions],
            "runs": known.runs,
        }))  # fmt: skip
        return
    root = branch = Tree(f"[bold]{render.escape(known.source or '(the log no longer has its source)')}[/]")
    for first, again in _group_by_input(known.ingestions):
        branch = root.add(f"ingestion {render.escape(ingestion_line(first))}")
        if first.found is not None:
            settings = first.found.data.model_dump(mode="json", exclude_defaults=True, exclude={"source"})
            branch.add(
                f"[dim]fingerprint {first.found.fingerprint[:16]}; {render.escape(_format_settings(settings))}[/]"
            )
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
    render.console().print(root)


def _group_by_input(ingestions: list[Ingestion]) -> list[tuple[Ingestion, list[Ingestion]]]:
    """Return the first ingestion of each input, with the later ones of the same input."""
    found: dict[str, list[Ingestion]] = {}
    for each in ingestions:
        found.setdefault(each.found.fingerprint if each.found else each.ingestion_id, []).append(each)
    return [(first, again) for first, *again in found.values()]


def _add_run(tree: Tree, use: TrainingUse) -> None:
    kind = "evaluation" if use.kind == "evaluate" else "run"
    branch = tree.add(f"{kind} {use.run_id} {render.escape(use.name)} {render.state(use.state)}")
    if use.init_from is not None:
        branch.add(f"[dim]weights from {render.escape(use.init_from)}[/]")
    for each in use.champions:
        metrics = ", ".join(f"{render.escape(name)} {value:.4g}" for name, value in sorted(each.metrics.items())[:3])
        since = "champion since" if each.reigns else "was promoted"
        branch.add(
            f"model [bold]{each.model}[/] version {each.version}, {since} {each.at:%Y-%m-%d %H:%M} UTC  {metrics}"
        )


def _format_settings(settings: dict[str, Any]) -> str:
    def format_value(value: Any) -> str:
        return f"({_format_settings(value)})" if isinstance(value, dict) else str(value)

    return ", ".join(f"{name} {format_value(value)}" for name, value in settings.items())
