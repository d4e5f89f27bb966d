"""``trainbus replay``: the gateway's read model, or an MLflow, made anew from the log."""

from __future__ import annotations

import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, run

if TYPE_CHECKING:
    from services.tracking.replay import ReplaySummary
    from trainbus.client.address import StackAddress

app = typer.Typer()


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
        _rebuild_read_model(start, choose_data_dir(data_dir, stack), as_json=as_json)
    elif start is not None or data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus replay {context.invoked_subcommand} ...`")


def _rebuild_read_model(start: str | None, data_dir: Path | None, *, as_json: bool) -> None:
    from services.gateway.rebuild import rebuild
    from trainbus.client.address import find_address

    address = find_address(data_dir)
    settings = address.settings()
    if address.data_dir is not None:
        settings = settings.model_copy(update={"data_dir": address.data_dir / "gateway"})
    sequence: int | None = None
    moment: datetime | None = None
    if start is not None:
        try:
            sequence, moment = (int(start), None) if start.isdigit() else (None, datetime.fromisoformat(start))
        except ValueError as error:
            raise UsageError(f"--from {start!r} is neither a sequence number nor an ISO 8601 time") from error
    done = run(rebuild(settings, from_sequence=sequence, from_time=moment))
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

    summary = run(_replay(find_address(choose_data_dir(data_dir, stack)), into, artifacts))
    if as_json:
        found = {"runs": summary.runs, "promotions": summary.promotions, "problems": list(summary.problems)}
        print(render.as_json({**found, "into": into}))
    else:
        render.console().print(f"{summary.runs} runs and {summary.promotions} promotions are in {render.escape(into)}")
        for problem in summary.problems:
            render.console().print(f"  left out: {render.escape(problem)}")
    if summary.problems:
        raise typer.Exit(1)


async def _replay(address: StackAddress, into: str, artifacts: str | None) -> ReplaySummary:
    from services.kit.bus import Bus
    from services.tracking.replay import replay_tracking
    from services.tracking.settings import TrackingSettings

    if "://" not in into and not into.startswith("sqlite:"):
        raise TrainbusError(f"--into {into!r} is no address: give http://HOST:PORT or sqlite:////FOLDER/mlflow.db")
    if artifacts is None and into.startswith("sqlite:///"):
        artifacts = (Path(into.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri()
    with tempfile.TemporaryDirectory(prefix="trainbus-replay-") as scratch:
        own = {"mlflow_tracking_uri": into, "mlflow_artifact_location": artifacts, "data_dir": Path(scratch)}
        settings = TrackingSettings(**address.settings().model_dump() | own)
        bus = Bus("replay", settings)
        await bus.connect()
        try:
            return await replay_tracking(bus, settings)
        finally:
            await bus.close()
