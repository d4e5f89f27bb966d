"""What the gateway must know beyond the common settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from services.kit.settings import Settings


class GatewaySettings(Settings):
    """Where the HTTP interface listens, and where the read model is kept."""

    gateway_host: str = "127.0.0.1"
    #: Port of the HTTP interface; 0 takes a free one.
    gateway_port: int = Field(8080, ge=0, le=65535)
    #: SQLAlchemy URL (``postgresql+asyncpg://...``). None: a SQLite file in ``data_dir``.
    gateway_database_url: SecretStr | None = None
    #: Where nats-server answers ``/jsz`` (its ``http_port``). None: how full its store is, is not exported.
    nats_monitor_url: str | None = Field(None, pattern="^https?://")
    #: Where browsers reach MLflow's pages (``http://...``). None: where ``trainbus ui`` serves them.
    mlflow_url: str | None = Field(None, pattern="^https?://")

    @property
    def mlflow_url_file(self) -> Path:
        """Return the file in which ``trainbus ui`` leaves the address of MLflow's pages while it serves them."""
        return self.data_dir / "mlflow-url"

    @property
    def database_url(self) -> str:
        if self.gateway_database_url is None:
            return f"sqlite+aiosqlite:///{self.data_dir / 'gateway.sqlite'}"
        url = self.gateway_database_url.get_secret_value()
        # The driver must be an asynchronous one; the usual spelling of the URL names none.
        for scheme in ("postgresql://", "postgres://"):
            if url.startswith(scheme):
                return "postgresql+asyncpg://" + url.removeprefix(scheme)
        return url
