"""Commands about runs: submit, list, explain, follow and cancel them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainbus.client.errors import UsageError
from trainbus.commands.options import DataDir, Json, Run, parse_param, with_client

app = typer.Typer()
PANEL = "Runs"


@app.command(
    rich_help_panel=PANEL,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
)
def submit(
    context: typer.Context,
    project: Annotated[Path | None, typer.Argument(help="The folder with the code; it is packed and uploaded.")] = None,
    task: Annotated[str | None, typer.Argument(help="What to train, module:Class. Or give --command.")] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", help="Run this in the project instead of a Task, for example 'python train.py'."),
    ] = None,
    request: Annotated[
        Path | None, typer.Option("--request", help="Body of a train.requested (JSON); options override it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the folder's.")] = None,
    slots: Annotated[str | None, typer.Option(help="Slots it can use: 2, or 1..4.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data; default: 1.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps after which training ends.")] = None,
    logical_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Exact mode: the same bits on any number of processes up to this; 12 divides well."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="s3://bucket/prefix or (embedded) a folder to ingest, or a dataset id.")
    ] = None,
    data_format: Annotated[
        str | None, typer.Option("--format", help="images, jsonl, parquet, text, tokens, binary, webdataset or mds.")
    ] = None,
    priority: Annotated[int | None, typer.Option(min=-1000, max=1000, help="Higher goes first.")] = None,
    model: Annotated[str | None, typer.Option(help="The registered model that the result competes for.")] = None,
    experiment: Annotated[str | None, typer.Option(help="The experiment in MLflow.")] = None,
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            help="Start with a checkpoint's weights: RUN, RUN@STEP, models:/NAME@champion, or a manifest's s3://.",
        ),
    ] = None,
    init_exclude: Annotated[
        list[str] | None,
        typer.Option("--init-exclude", help="Tensors to initialise afresh instead, for example 'head.*'; repeatable."),
    ] = None,
    param: Annotated[list[str] | None, typer.Option("--param", help="key=value for the Task; repeatable.")] = None,
    event_id: Annotated[
        str | None, typer.Option("--id", help="Event id: the same id is the same run, however often sent.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Stay until the run ends; exit 1 if it fails.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Pack a project, upload it and request its training: `trainbus submit ./project task:MyTask`."""
    from trainbus.commands.runs.submit import submit_run

    if context.args:
        raise UsageError(f"unexpected {' '.join(context.args)!r}: quote the whole command, --command 'python train.py'")
    with_client(
        data_dir,
        lambda client: submit_run(
            client,
            follow=follow,
            as_json=as_json,
            project=project,
            task=task,
            command=command,
            request=request,
            name=name,
            slots=slots,
            epochs=epochs,
            max_steps=max_steps,
            logical_ranks=logical_ranks,
            data=data,
            data_format=data_format,
            priority=priority,
            model=model,
            experiment=experiment,
            init_from=init_from,
            init_exclude=init_exclude or (),
            params=dict(map(parse_param, param or ())),
            event_id=event_id,
        ),
    )


@app.command(rich_help_panel=PANEL)
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also all runs that ended.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the runs: those that have not ended and the newest 20 that have."""
    from trainbus.commands.runs.tables import print_runs

    with_client(data_dir, lambda client: print_runs(client, everything=everything, as_json=as_json))


@app.command(rich_help_panel=PANEL)
def show(name: Run, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one run with its timeline."""
    from trainbus.commands.runs.tables import print_run

    with_client(data_dir, lambda client: print_run(client, name, as_json=as_json))


@app.command(rich_help_panel=PANEL)
def why(
    name: Run,
    at: Annotated[
        str | None, typer.Option("--at", help="At a time in the past: 2026-11-20T14:00 (UTC), 14:00 or '2 h ago'.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Explain why a run is in its state, or was at a time in the past."""
    from trainbus.commands.runs.why import print_past_reason, print_reason

    if at is None:
        with_client(data_dir, lambda client: print_reason(client, name, as_json=as_json))
    else:
        with_client(data_dir, lambda client: print_past_reason(client, name, at, as_json=as_json))


@app.command(rich_help_panel=PANEL)
def logs(
    name: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends; exit 1 if it fails.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Print a run's output."""
    from trainbus.commands.runs.logs import print_logs

    with_client(data_dir, lambda client: print_logs(client, name, follow=follow))


@app.command(rich_help_panel=PANEL)
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come.")] = False,
    of_run: Annotated[str | None, typer.Option("--run", help="Only the events of this run.")] = None,
    start: Annotated[int | None, typer.Option("--from", min=1, help="Start at this sequence number.")] = None,
    tail: Annotated[int, typer.Option(min=0, help="Without --run and --from: the last N events.")] = 50,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent (JSON) per line.")] = False,
) -> None:
    """Print the log of facts."""
    from trainbus.commands.runs.events import print_events

    with_client(
        data_dir,
        lambda client: print_events(client, of_run, follow=follow, start=start, tail=tail, as_json=as_json),
    )


@app.command(rich_help_panel=PANEL)
def cancel(
    name: Run,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "cancelled by request",
    data_dir: DataDir = None,
) -> None:
    """Stop a run for good. Its checkpoints stay."""
    from trainbus.commands.runs.cancel import cancel_run

    with_client(data_dir, lambda client: cancel_run(client, name, reason))


@app.command(rich_help_panel=PANEL)
def reproduce(
    name: Run,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="Start from the run's checkpoint of this step.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots for it; default: as the run requested.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train a run again and compare its states to the bit; exit 0 if all are the same, 1 if not, 2 if it cannot be."""
    from trainbus.commands.runs.reproduce import reproduce_run

    raise typer.Exit(
        with_client(
            data_dir, lambda client: reproduce_run(client, name, start_step=start, slots=slots, as_json=as_json)
        )
    )
