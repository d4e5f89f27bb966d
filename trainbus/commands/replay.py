"""``trainbus replay``: the gateway's read model, or an MLflow, made anew from the log."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from trainbus.client.errors import UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, run_quietly

app = typer.Typer(name="replay")


@app.callback(invoke_without_command=True)
def replay(
    context: typer.Context,
    start: Annotated[
        str | None, typer.Option("--from", help="A sequence number of FACTS, or an ISO 8601 time.")
    ] = None,
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Rebuild the gateway's read model from the log."""
    if context.invoked_subcommand is None:
        _print_rebuilt(start, choose_data_dir(data_dir, stack), as_json=as_json)
    elif start is not None or data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus replay {context.invoked_subcommand} ...`")


def _print_rebuilt(start: str | None, data_dir: Path | None, *, as_json: bool) -> None:
    from trainbus.client.address import find_address
    from trainbus.operate.read_model import rebuild_read_model

    address = find_address(data_dir)
    sequence: int | None = None
    moment: datetime | None = None
    if start is not None:
        try:
            sequence, moment = (int(start), None) if start.isdigit() else (None, datetime.fromisoformat(start))
        except ValueError as error:
            raise UsageError(f"--from {start!r} is neither a sequence number nor an ISO 8601 time") from error
    done = run_quietly(rebuild_read_model(address, from_sequence=sequence, from_time=moment))
    if as_json:
        print(render.as_json(done))
    else:
        print(
            f"the gateway's read model: {done.runs} runs from {done.to_sequence} facts in {done.seconds:.2f} s, "
            f"read from sequence {done.from_sequence} on"
        )


@app.command("tracking")
def replay_tracking(
    into: Annotated[
        str, typer.Option("--into", metavar="URI", help="An MLflow: http://HOST:PORT or sqlite:////FOLDER/mlflow.db.")
    ],
    artifacts: Annotated[
        str | None, typer.Option("--artifacts", metavar="URI", help="Where its files go, unless the server decides it.")
    ] = None,
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Write every run, model and alias of the log into an empty MLflow, as the tracking service would have."""
    from trainbus.client.address import find_address
    from trainbus.operate.tracking_copy import write_tracking

    summary = run_quietly(write_tracking(find_address(choose_data_dir(data_dir, stack)), into, artifacts))
    if as_json:
        found = {"runs": summary.runs, "promotions": summary.promotions, "problems": list(summary.problems)}
        print(render.as_json({**found, "into": into}))
    else:
        render.console().print(f"{summary.runs} runs and {summary.promotions} promotions are in {render.escape(into)}")
        for problem in summary.problems:
            render.console().print(f"  left out: {render.escape(problem)}")
    if summary.problems:
        raise typer.Exit(1)
