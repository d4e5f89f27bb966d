"""Commands about a stack: start, stop, check and show it."""

from __future__ import annotations

from typing import Annotated

import typer

from trainbus.client.address import find_address
from trainbus.client.errors import UsageError
from trainbus.commands.options import DataDir, Json, run

app = typer.Typer()
PANEL = "Stack"
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


@app.command(rich_help_panel=PANEL)
def up(
    nodes: Annotated[int, typer.Option(min=0, max=64, help="Worker nodes.")] = 2,
    slots: Annotated[int, typer.Option(min=1, max=64, help="CPU slots a node.")] = 2,
    data_dir: DataDir = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave out a service or node, to run it yourself: `trainbus service NAME`."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="The scheduler's policy: a name, or a TOML or JSON file (docs/scheduler.md).")
    ] = None,
    autoscale: Annotated[
        list[str] | None,
        typer.Option("--autoscale", help="POOL=MAX: up to MAX more nodes, started and stopped as runs need them."),
    ] = None,
    idle_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which an idle node of a pool stops; default 600.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; `trainbus down` stops it.")
    ] = False,
) -> None:
    """Start the embedded stack on this machine: NATS, S3, every service and a few worker nodes."""
    from trainbus.commands.stack.up import start_stack

    start_stack(
        data_dir,
        nodes=nodes,
        slots=slots,
        without=tuple(without or ()),
        detach=detach,
        policy=policy,
        autoscale=tuple(autoscale or ()),
        idle_s=idle_s,
    )


@app.command(rich_help_panel=PANEL)
def down(data_dir: DataDir = None) -> None:
    """Stop the embedded stack in order; the data stays."""
    from trainbus.commands.stack.up import stop_running_stack

    stop_running_stack(data_dir)


@app.command(rich_help_panel=PANEL)
def service(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICE_NAMES)}.")],
    data_dir: DataDir = None,
) -> None:
    """Run one service: on the NATS and S3 that TRAINBUS_* name, else in the embedded stack that left it out."""
    if name not in SERVICE_NAMES:
        raise UsageError(f"there is no service {name!r}; there are {', '.join(SERVICE_NAMES)}")
    from trainbus.commands.stack.up import join_stack
    from trainbus.embedded.process import run_service

    join_stack(name, data_dir)
    raise typer.Exit(run_service(name))


@app.command(rich_help_panel=PANEL)
def demo(
    data_dir: DataDir = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack running until Ctrl-C when the demo is over.")
    ] = False,
    running: Annotated[
        bool, typer.Option("--running", help="Use the running stack, embedded or named by TRAINBUS_*.")
    ] = False,
) -> None:
    """Train on real handwritten digits, end to end: preempt, shrink, grow, evaluate, promote."""
    from trainbus.commands.demo.main import run_demo, run_demo_on_running_stack

    raise typer.Exit(run_demo_on_running_stack(data_dir) if running else run_demo(data_dir, keep=keep))


@app.command(rich_help_panel=PANEL)
def doctor(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check what this machine lacks and what does not answer, and print the remedy."""
    from trainbus.commands.stack.doctor import print_results

    raise typer.Exit(print_results(data_dir, as_json=as_json))


@app.command(rich_help_panel=PANEL)
def ui(
    data_dir: DataDir = None,
    port: Annotated[int, typer.Option(help="Port for MLflow's page.")] = 5000,
) -> None:
    """Serve MLflow's pages on the embedded stack's runs, and print the address of the gateway's page."""
    from trainbus.commands.stack.up import serve_mlflow

    raise typer.Exit(serve_mlflow(data_dir, port))


@app.command(rich_help_panel=PANEL)
def replay(
    start: Annotated[
        str | None, typer.Option("--from", help="A sequence number of FACTS, or an ISO 8601 time.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Rebuild the gateway's read model from the log."""
    from trainbus.commands.stack.replay import rebuild_read_model

    run(rebuild_read_model(find_address(data_dir), start, as_json=as_json))
