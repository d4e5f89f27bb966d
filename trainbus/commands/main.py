"""The ``trainbus`` command. Every command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from trainbus.client.errors import FAILED, USAGE, CliError
from trainbus.commands import checkpoints, simulate
from trainbus.commands.datasets import app as datasets
from trainbus.commands.scheduler import app as scheduler

app = typer.Typer(
    name="trainbus",
    help="Train models on GPUs of your own: submit, follow, explain, restore. Start with `trainbus up`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(datasets.app, name="datasets")
app.add_typer(scheduler.app, name="scheduler")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's id, the unique start of one, or its name.")]
SERVICE_NAMES = (
    "ingestion",
    "sharding",
    "scheduler",
    "worker",
    "checkpoint",
    "tracking",
    "evaluation",
    "gateway",
    "autoscaler",
)


def _address(data_dir: Path | None) -> Any:
    from trainbus.client.address import find

    return find(data_dir)


def _run(work: Coroutine[Any, Any, None]) -> None:
    import asyncio

    asyncio.run(work)


# -- the stack -------------------------------------------------------------------


@app.command(rich_help_panel="Stack")
def up(
    nodes: Annotated[int, typer.Option(min=0, max=64, help="Worker nodes.")] = 2,
    slots: Annotated[int, typer.Option(min=1, max=64, help="CPU slots a node.")] = 2,
    data_dir: DataDir = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave a service or node out, to run it yourself: `trainbus service NAME`."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="The scheduler's policy: a name, or a TOML or JSON file (docs/scheduler.md).")
    ] = None,
    autoscale: Annotated[
        list[str] | None,
        typer.Option("--autoscale", help="POOL=MAX: up to MAX more nodes that come and go as runs need them."),
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which an idle node of a pool goes; default 600.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; `trainbus down` stops it.")
    ] = False,
) -> None:
    """Start the embedded stack: NATS, S3, every service and a few worker nodes, on this machine."""
    from trainbus.commands.stack import up

    up(
        data_dir,
        nodes=nodes,
        slots=slots,
        without=tuple(without or ()),
        detach=detach,
        policy=policy,
        autoscale=tuple(autoscale or ()),
        idle_s=idle_s,
    )


@app.command(rich_help_panel="Stack")
def down(data_dir: DataDir = None) -> None:
    """Stop the embedded stack, in order; the data stays."""
    from trainbus.commands.stack import down

    down(data_dir)


@app.command(rich_help_panel="Stack")
def service(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICE_NAMES)}.")],
    data_dir: DataDir = None,
) -> None:
    """Run one service: against the NATS and S3 that TRAINBUS_* names, else in its place in the embedded stack."""
    if name not in SERVICE_NAMES:
        raise CliError(f"there is no service {name!r}; there are {', '.join(SERVICE_NAMES)}", USAGE)
    from trainbus.commands.stack import take_place
    from trainbus.embedded.process import run_service

    take_place(name, data_dir)
    raise typer.Exit(run_service(name))


@app.command(rich_help_panel="Stack")
def demo(
    data_dir: DataDir = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack running until Ctrl-C when the demo is over.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Use the stack that runs already, embedded or named by TRAINBUS_*.")
    ] = False,
) -> None:
    """Train on real handwritten digits, end to end: preempt, shrink, grow, evaluate, promote."""
    from trainbus.commands.demo import main as demo

    raise typer.Exit(demo.main_on_running(data_dir) if running else demo.main(data_dir, keep=keep))


@app.command(rich_help_panel="Stack")
def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Say what is missing on this machine, or does not answer, and how to get it."""
    from trainbus.commands.doctor import doctor

    raise typer.Exit(doctor(data_dir, as_json=as_json))


@app.command(rich_help_panel="Stack")
def ui(
    data_dir: DataDir = None,
    port: Annotated[int, typer.Option(help="Port for MLflow's page.")] = 5000,
) -> None:
    """Open MLflow's pages on the embedded stack's runs, and say where the gateway's page is."""
    from trainbus.commands.stack import ui

    raise typer.Exit(ui(data_dir, port))


@app.command(rich_help_panel="Stack")
def replay(
    start: Annotated[
        str | None, typer.Option("--from", help="A sequence number of FACTS, or an ISO 8601 time.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Drive the gateway's read model again from the log."""
    from trainbus.client import submission as acting

    _run(acting.replay(_address(data_dir), start, as_json=as_json))


# -- runs ------------------------------------------------------------------------


@app.command(
    rich_help_panel="Runs",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
)
def submit(
    context: typer.Context,
    project: Annotated[
        Path | None, typer.Argument(help="The folder that holds the code; it is packed and uploaded.")
    ] = None,
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
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    max_steps: Annotated[int | None, typer.Option(min=1)] = None,
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
    model: Annotated[str | None, typer.Option(help="The registered model the result competes for.")] = None,
    experiment: Annotated[str | None, typer.Option()] = None,
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            help="Begin with the weights of a checkpoint: RUN, RUN@STEP, models:/NAME@champion, or a manifest's s3://.",
        ),
    ] = None,
    init_exclude: Annotated[
        list[str] | None,
        typer.Option("--init-exclude", help="Tensors that begin anew instead, for example 'head.*'; repeatable."),
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
    """Pack a project, upload it and ask for it to be trained: `trainbus submit ./project task:MyTask`."""
    import shlex

    from trainbus.client import submission as acting

    if context.args:
        raise CliError(
            f"unexpected {' '.join(context.args)!r}: quote the whole command, --command 'python train.py'", USAGE
        )
    if project is None and request is None:
        raise CliError("give a project folder and a task (module:Class), or --request FILE", USAGE)
    if project is not None and task is None and command is None and request is None:
        raise CliError("say what to run: a task (module:Class) or --command 'python train.py'", USAGE)
    if task is not None and not acting.TASK.match(task):
        raise CliError(f"task {task!r} is not of the form module:Class", USAGE)
    submission = acting.Submission(
        project=project,
        task=task,
        command=tuple(shlex.split(command)) if command else (),
        request_file=request,
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
        init_exclude=tuple(init_exclude or ()),
        params=tuple(param or ()),
    )
    _run(acting.submit(_address(data_dir), submission, event_id=event_id, follow=follow, as_json=as_json))


@app.command(rich_help_panel="Runs")
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="All that ended, too.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the runs."""
    from trainbus.client import runs as reading

    _run(reading.ps(_address(data_dir), everything=everything, as_json=as_json))


@app.command(rich_help_panel="Runs")
def show(name: Run, data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show one run with its timeline."""
    from trainbus.client import runs as reading

    _run(reading.show(_address(data_dir), name, as_json=as_json))


@app.command(rich_help_panel="Runs")
def why(
    name: Run,
    at: Annotated[
        str | None, typer.Option("--at", help="As things stood then: 2026-11-20T14:00 (UTC), 14:00 or '2 h ago'.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Say why a run is in the state it is in, or was at a time in the past."""
    if at is not None:
        from trainbus.commands.why_at import why_at

        _run(why_at(_address(data_dir), name, at, as_json=as_json))
        return
    from trainbus.client import runs as reading

    _run(reading.why(_address(data_dir), name, as_json=as_json))


@app.command(rich_help_panel="Runs")
def logs(
    name: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends; exit 1 if it fails.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Print a run's output."""
    from trainbus.client import runs as reading

    _run(reading.logs(_address(data_dir), name, follow=follow))


@app.command(rich_help_panel="Runs")
def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    run: Annotated[str | None, typer.Option("--run", help="One run's events alone.")] = None,
    start: Annotated[int | None, typer.Option("--from", min=1, help="From this sequence number on.")] = None,
    tail: Annotated[int, typer.Option(min=0, help="Without --run and --from: the last so many.")] = 50,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One CloudEvent (JSON) a line.")] = False,
) -> None:
    """Print the log of facts."""
    from trainbus.client import runs as reading

    _run(reading.events(_address(data_dir), follow=follow, run_name=run, start=start, tail=tail, as_json=as_json))


@app.command(rich_help_panel="Runs")
def cancel(
    name: Run,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "cancelled by request",
    data_dir: DataDir = None,
) -> None:
    """Stop a run for good. Its checkpoints stay."""
    from trainbus.client import submission as acting

    _run(acting.cancel(_address(data_dir), name, reason))


@app.command(rich_help_panel="Runs")
def reproduce(
    name: Run,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="Start from the run's checkpoint of this step.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots for it; default: as the run asked for.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train a run again and compare its states to the bit; exit 0 if all are the same, 1 if not, 2 if it cannot be."""
    import asyncio

    from trainbus.commands.reproduce import reproduce

    raise typer.Exit(asyncio.run(reproduce(_address(data_dir), name, start_step=start, slots=slots, as_json=as_json)))


# -- everything else --------------------------------------------------------------


@app.command(rich_help_panel="Cluster")
def nodes(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the nodes and what runs on them."""
    from trainbus.client import runs as reading

    _run(reading.nodes(_address(data_dir), as_json=as_json))


app.command(rich_help_panel="Cluster")(simulate.simulate)


@app.command(rich_help_panel="Cluster")
def drain(
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "drained by request",
    data_dir: DataDir = None,
) -> None:
    """Take a node out of use; what runs there goes elsewhere."""
    from trainbus.client import submission as acting

    _run(acting.drain(_address(data_dir), node, reason))


@app.command(rich_help_panel="Cluster")
def models(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the registered models and their champions."""
    from trainbus.client import runs as reading

    _run(reading.models(_address(data_dir), as_json=as_json))


def main() -> None:
    """Entry point: errors become a message and a true exit code."""
    try:
        app()
    except CliError as error:
        from trainbus.commands.render import visible

        print(f"trainbus: {visible(str(error))}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has gone: that is no failure of ours.
        sys.stderr.close()
        sys.exit(FAILED)
    except json.JSONDecodeError as error:
        print(f"trainbus: a file of the stack is damaged: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"trainbus: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
