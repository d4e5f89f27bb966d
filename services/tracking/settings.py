"""The tracking service's settings."""

from __future__ import annotations

from pydantic import Field

from services.kit.settings import Settings


class TrackingSettings(Settings):
    """Where MLflow is, and how much is put into it."""

    #: ``http://...`` for a server; none: ``mlflow.db`` in the data folder, written by this service itself.
    mlflow_tracking_uri: str | None = None
    #: Where new experiments keep their files; none: the data folder, or what the server is set to.
    mlflow_artifact_location: str | None = None
    #: Seconds between two readings of the metrics of running commands.
    live_interval_s: float = Field(3.0, gt=0)
    #: Artifacts up to this size are copied into MLflow; larger ones are linked.
    artifact_max_bytes: int = Field(16 * 2**20, ge=0)
    #: A promoted model up to this size is copied into MLflow, so that ``mlflow.pyfunc.load_model`` finds it there.
    model_max_bytes: int = Field(10 * 2**30, ge=0)
    #: Seconds between two comparisons of MLflow's aliases with the facts, and whether those that somebody has moved in
    #: MLflow are moved back; otherwise they are reported alone.
    alias_check_interval_s: float = Field(60.0, gt=0)
    repair_aliases: bool = True
    #: Seconds between tries while MLflow is away: from the first doubling up to the second.
    retry_first_s: float = Field(0.2, gt=0)
    retry_max_s: float = Field(10.0, gt=0)

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_tracking_uri or f"sqlite:///{self.data_dir.resolve() / 'mlflow.db'}"

    @property
    def artifact_location(self) -> str | None:
        if self.mlflow_artifact_location is None and self.tracking_uri.startswith("sqlite:"):
            return (self.data_dir.resolve() / "mlflow-artifacts").as_uri()
        return self.mlflow_artifact_location
