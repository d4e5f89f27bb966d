"""The settings of a node's agent."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from contracts.base import TOKEN_PATTERN, token
from services.kit.settings import Settings

GIB = 2**30


class WorkerSettings(Settings):
    """Settings of one node. ``data_dir`` is the node's own: two agents must not share one."""

    node_id: str = Field(default_factory=lambda: token(socket.gethostname()), pattern=TOKEN_PATTERN)
    #: Slots that the node offers. None: one for each GPU, or for each CPU core on a machine without GPUs.
    slots: int | None = Field(None, ge=0, le=4096)
    #: ``cpu``: offer CPU slots even if there are GPUs.
    accelerator: Literal["auto", "cpu"] = "auto"
    #: The address or name at which ranks of other nodes reach the ranks of this one. None: the machine's address on the
    #: route to the bus.
    address: str | None = None
    #: The scheduler reads ``cluster``, ``zone``, ``switch``, ``pool`` and ``capacity`` (on-demand or spot);
    #: ``gang.together`` and maintenance windows can name any label.
    labels: dict[str, str] = Field(default_factory=dict)
    #: Processors for runs that request some. None: all that this process may use; 0: they are not counted.
    cpus: float | None = Field(None, ge=0)
    #: Folder in which the control daemon of CUDA MPS listens. None: where CUDA looks for it; '': MPS is not used.
    mps_pipe_dir: str | None = None
    #: Run a warm server: a process that has imported torch, and forks ranks in milliseconds.
    warm: bool = True

    #: Seconds after which the node is lost if it has not renewed its lease. Its ranks are stopped and killed at fixed
    #: shares of it (``launch/lease_term.py``), so that the bus may be away for half of it without any effect.
    lease_ttl_s: float = Field(60.0, gt=0.2)
    #: Seconds between two reads of journals and logs; a rank's doorbell causes one at once.
    follow_interval_s: float = Field(0.2, gt=0)
    #: Seconds between two measurements of the node for each run.
    system_interval_s: float = Field(5.0, gt=0)
    #: Seconds from SIGTERM to SIGKILL.
    kill_after_s: float = Field(1.0, ge=0)
    #: Seconds that the other nodes wait for the address of rank 0.
    rendezvous_timeout_s: float = Field(180.0, gt=0)
    #: Seconds that a run which has finished waits for its last checkpoint to be committed.
    commit_timeout_s: float = Field(15.0, ge=0)

    #: Folder in memory in which ranks save state that survives them. None: below /dev/shm, if there is one; '': none.
    memory_dir: str | None = None
    #: Bytes of that state; the oldest is evicted first, and what does not fit is saved on disk. None: a quarter of the
    #: node's memory, at most 16 GiB.
    memory_max_bytes: int | None = Field(None, ge=0)
    #: Seconds that ranks which lost a peer may take to save their state.
    survivor_save_s: float = Field(10.0, ge=0)

    #: The metadata server of a cloud's machines, which announces that a machine will be taken away.
    metadata_url: str = "http://169.254.169.254"
    #: Seconds between two requests to it.
    notice_interval_s: float = Field(1.0, gt=0)
    #: File that a pod's preStop hook writes: the seconds until the pod is killed, or nothing.
    prestop_file: Path = Path("/tmp/trainbus-prestop")

    #: Seconds between two looks at a script's output folder, and for which a file must not change to count as complete
    #: whichever process has it open.
    output_interval_s: float = Field(2.0, gt=0)
    #: Seconds between two copies that the script did not ask for: a twentieth of the time that it has run, and at most
    #: these. So much of its work does the loss of a node cost.
    output_max_interval_s: float = Field(60.0, gt=0)
    output_settle_s: float = Field(1.0, ge=0)
    #: A larger output folder, or one of more files, is not kept; the run goes on.
    output_max_bytes: int = Field(200 * GIB, ge=0)
    output_max_files: int = Field(100_000, gt=0)

    #: Folder of the cache for code, checkpoints and shards: on the fastest disk. None: ``cache`` in ``data_dir``.
    cache_dir: Path | None = None
    cache_max_bytes: int = Field(64 * GIB, ge=0)
    #: A folder shared by nodes: shards are read from it before the store, and written to it if it is writable.
    cache_warm_dir: Path | None = None
    #: How soon a shard must be needed to displace one that is needed later. A larger value survives longer stalls of
    #: the store; a smaller one fetches fewer shards twice.
    cache_ahead_s: float = Field(60.0, gt=0)
    #: Seconds without a byte of a shard after which another connection is opened.
    cache_stall_s: float = Field(2.0, gt=0)
    #: Folders of ended runs that stay on the node, for their logs.
    keep_finished: int = Field(5, ge=0)
    #: Bytes of the packages that projects ask for, with the installer's cache; the oldest in use goes first.
    packages_max_bytes: int = Field(32 * GIB, ge=0)
    #: Seconds to resolve or install the packages of one project.
    packages_timeout_s: float = Field(1800.0, gt=0)
    #: Build packages that have no wheel: their code runs on the node, with the settings of its package index.
    packages_build: bool = True
    package_max_bytes: int = Field(2 * GIB, gt=0)
    package_max_files: int = Field(20_000, gt=0)

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        if labels.get("capacity", "on-demand") not in ("on-demand", "spot"):
            raise ValueError(f"the label capacity is on-demand or spot, not {labels['capacity']!r}")
        return labels
