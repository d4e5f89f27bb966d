"""What serving must know beyond the common settings."""

from __future__ import annotations

from pydantic import Field

from services.kit.settings import Settings
from services.serving.core.watch import WatchLimits


class ServingSettings(Settings):
    """Where serving answers, how it runs models, and when it takes a version back."""

    serving_host: str = "127.0.0.1"
    #: Port of the HTTP interface; 0 takes a free one.
    serving_port: int = Field(8090, ge=0, le=65535)
    #: Models that are served; empty: every one that has a champion.
    serving_models: tuple[str, ...] = ()

    #: Samples that a process predicts together, at most, and how long an incomplete batch waits for further requests.
    serving_max_batch: int = Field(32, ge=1)
    serving_max_delay_s: float = Field(0.0, ge=0, le=1)
    #: Threads for arithmetic of each process, and its device (auto: the first GPU where there is one). Of several,
    #: separated by commas (``cuda:0,cuda:1``), a process gets the one that has the fewest.
    serving_threads: int = Field(1, ge=1)
    serving_device: str = "auto"
    #: Open requests of the server, above which further ones are answered 503; and the seconds that a request may wait
    #: before its model's process begins with it.
    serving_max_queue: int = Field(512, ge=1)
    serving_max_wait_s: float = Field(1.0, gt=0)
    #: Bytes of a request's body.
    serving_max_body_bytes: int = Field(64 * 2**20, ge=1)

    #: Bytes of the packages that models were trained with, seconds to install those of one, and whether packages that
    #: have no wheel are built.
    serving_packages_max_bytes: int = Field(32 * 2**30, ge=0)
    serving_packages_timeout_s: float = Field(1800.0, gt=0)
    serving_packages_build: bool = True

    #: Seconds for a process to load its model, and to compute a batch. A process that is later is killed.
    serving_load_timeout_s: float = Field(120.0, gt=0)
    serving_timeout_s: float = Field(10.0, gt=0)
    #: Resident bytes by which a process may grow beyond those after loading; then another one takes its place.
    serving_max_growth_bytes: int = Field(512 * 2**20, gt=0)

    #: Samples of the evaluation that a new version must answer as it did there, and the tolerance for numbers.
    serving_golden_samples: int = Field(32, ge=0)
    serving_golden_tolerance: float = Field(1e-3, ge=0)

    #: Before a new version takes over it may answer a share of the requests (canary), or see copies of a share whose
    #: answers nobody gets (shadow), for so many seconds. 0: it takes over at once.
    serving_canary_share: float = Field(0.0, ge=0, le=1)
    serving_shadow_share: float = Field(0.0, ge=0, le=1)
    serving_rollout_s: float = Field(60.0, gt=0)
    #: Seconds after the flip during which the version before comes back if the new one does worse.
    serving_watch_s: float = Field(120.0, ge=0)
    serving_max_error_share: float = Field(0.02, ge=0, le=1)
    serving_max_latency_ratio: float = Field(3.0, ge=1)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of model processes, by name."""
        return tuple(filter(None, (name.strip() for name in self.serving_device.split(",")))) or ("auto",)

    @property
    def watch_limits(self) -> WatchLimits:
        """The limits of a version that answers users."""
        return WatchLimits(
            max_error_share=self.serving_max_error_share,
            max_latency_ratio=self.serving_max_latency_ratio,
            max_batch=self.serving_max_batch,
            max_growth_bytes=self.serving_max_growth_bytes,
        )
