"""``trainbus replay``: a projection of the log, made anew."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, run

if TYPE_CHECKING:
    from services.tracking.replay import ReplaySummary
    from trainbus.client.address import StackAddress

app = typer.Typer(no_args_is_help=True, help="Make a projection of the log anew.")


@app.callback()
def _group() -> None:
    """Keep ``tracking`` a command of its own: typer would merge a single one into the group."""


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
