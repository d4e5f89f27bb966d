"""Settings shared by all services, from the environment (``TRAINBUS_*``) or a ``.env`` file."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What a service must know about the world. Subclass it for a service's own settings."""

    model_config = SettingsConfigDict(env_prefix="TRAINBUS_", env_file=".env", extra="ignore", frozen=True)

    #: Comma-separated NATS servers.
    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str | None = None
    nats_password: SecretStr | None = None
    #: 1 embedded, 3 in a cluster.
    nats_replicas: int = Field(1, ge=1, le=5)
    #: Where the service answers /health, /ready and /metrics; port 0 takes a free one, -1 none.
    http_host: str = "127.0.0.1"
    http_port: int = Field(0, ge=-1, le=65535)

    s3_endpoint: str | None = "http://127.0.0.1:8333"
    s3_access_key: str | None = None
    s3_secret_key: SecretStr | None = None
    s3_region: str = "us-east-1"
    bucket_lake: str = "lake"
    bucket_datasets: str = "datasets"
    bucket_models: str = "models"
    bucket_code: str = "code"

    #: Local folder for what a service keeps on disk (caches, working files).
    data_dir: Path = Path(".trainbus")
    #: Name of this instance, unique among the instances of its service.
    instance: str = Field(default_factory=socket.gethostname)

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    #: OTLP/HTTP endpoint for traces; none: tracing costs nothing.
    otlp_endpoint: str | None = None

    #: Seconds after which a holder that has not renewed its lease is taken for dead.
    lease_ttl_s: float = Field(3.0, gt=0.2)

    #: A consumer stops, and its service is not ready, rather than dead-letter more than this many messages in a row,
    #: or more than this share of its last ``dead_letter_window`` messages.
    dead_letter_max_consecutive: int = Field(20, ge=1)
    dead_letter_max_share: float = Field(0.3, gt=0, le=1)
    dead_letter_window: int = Field(200, ge=1)

    #: Fault injection for tests: every fact is published twice and every message is handled twice.
    inject_duplicates: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return these settings, completed from the environment where a service has more than all share."""
        return settings if isinstance(settings, cls) else cls(**settings.model_dump())

    @property
    def nats_servers(self) -> list[str]:
        return [url.strip() for url in self.nats_url.split(",") if url.strip()]
