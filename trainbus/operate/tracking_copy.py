"""An MLflow of the log: written as the tracking service would have written it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from services.kit.bus import Bus
from services.tracking.replay import ReplaySummary, replay_tracking
from services.tracking.settings import TrackingSettings
from trainbus.client.address import StackAddress
from trainbus.client.errors import TrainbusError
from trainbus.operate.stack_settings import read_settings


async def write_tracking(address: StackAddress, into: str, artifacts: str | None) -> ReplaySummary:
    """Write every run, model and alias of the log into the empty MLflow at ``into``, its files into ``artifacts``.

    Raises:
        TrainbusError: ``into`` is no address of an MLflow.
    """
    if "://" not in into and not into.startswith("sqlite:"):
        raise TrainbusError(f"--into {into!r} is no address: give http://HOST:PORT or sqlite:////FOLDER/mlflow.db")
    if artifacts is None and into.startswith("sqlite:///"):
        artifacts = (Path(into.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri()
    with tempfile.TemporaryDirectory(prefix="trainbus-replay-") as scratch:
        own = {"mlflow_tracking_uri": into, "mlflow_artifact_location": artifacts, "data_dir": Path(scratch)}
        settings = TrackingSettings(**read_settings(address).model_dump() | own)
        bus = Bus("replay", settings)
        await bus.connect()
        try:
            return await replay_tracking(bus, settings)
        finally:
            await bus.close()
