"""What a node's agent must be told."""

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
    #: None: as many as there are GPUs, or CPU cores on a machine without.
    slots: int | None = Field(None, ge=0, le=4096)
    #: ``cpu`` leaves GPUs alone.
    accelerator: Literal["auto", "cpu"] = "auto"
    #: Where the ranks of other nodes reach the ranks of this one.
    address: str = "127.0.0.1"
    #: Where the node is and what it is: ``cluster``, ``zone``, ``switch``, ``pool`` and ``capacity`` (on-demand or
    #: spot) mean something to the scheduler, others can be named by ``gang.together`` and by maintenance windows.
    labels: dict[str, str] = Field(default_factory=dict)
    #: Processors for runs that say how many they need; None: all that this process may use, 0: they are not counted.
    cpus: float | None = Field(None, ge=0)
    #: Where the control daemon of CUDA MPS listens; None: where CUDA looks for it, if there is one; '' : there is none.
    mps_pipe_dir: str | None = None
    #: Keep a process with torch imported from which ranks are forked in milliseconds.
    warm: bool = True

    #: Seconds after which ranks that hear nothing of an agent end themselves.
    orphan_timeout_s: float = Field(30.0, gt=0)
    #: Seconds between two looks at journals and logs; a rank's doorbell comes sooner.
    follow_interval_s: float = Field(0.2, gt=0)
    #: Seconds between two measurements of the node for each run.
    system_interval_s: float = Field(5.0, gt=0)
    #: Seconds from SIGTERM to SIGKILL.
    kill_after_s: float = Field(1.0, ge=0)
    #: Seconds that the other nodes wait for the address of rank 0.
    rendezvous_timeout_s: float = Field(180.0, gt=0)
    #: Seconds that a run which ended by itself waits for its last checkpoint to be committed.
    commit_timeout_s: float = Field(15.0, ge=0)

    #: Where ranks leave state that outlives them, on a file system in memory. None: below /dev/shm where there is
    #: one; '' : nowhere.
    memory_dir: str | None = None
    #: Bytes that may lie there; what was left longest ago goes first.
    memory_max_bytes: int = Field(16 * GIB, ge=0)
    #: Seconds that ranks which lost a peer may take to leave their state behind.
    survivor_save_s: float = Field(10.0, ge=0)

    #: Where machines of a cloud learn that they will be taken away: link-local, the same in all of them.
    metadata_url: str = "http://169.254.169.254"
    #: Seconds between two questions whether they will.
    notice_interval_s: float = Field(1.0, gt=0)
    #: Written by a pod's preStop hook: the seconds until the pod is killed, or nothing.
    prestop_file: Path = Path("/tmp/trainbus-prestop")
    #: Seconds of a notice that are left to everything but the run: to say it, and to end.
    notice_margin_s: float = Field(2.0, ge=0)

    #: Where code, checkpoints and shards are kept for the runs of this node: the fastest disk that it has. None:
    #: ``cache`` in ``data_dir``.
    cache_dir: Path | None = None
    cache_max_bytes: int = Field(64 * GIB, ge=0)
    #: A folder shared by nodes in which shards are looked for before the store, and left if it can be written.
    cache_warm_dir: Path | None = None
    #: Where the cache cannot hold all that its runs will read: shards come no earlier than so many seconds before they
    #: are needed. More rides out longer stalls of the store, less fetches less again.
    cache_ahead_s: float = Field(60.0, gt=0)
    #: Seconds without a byte of a shard after which another connection is tried.
    cache_stall_s: float = Field(2.0, gt=0)
    #: Folders of ended runs that are kept for a look at their logs.
    keep_finished: int = Field(5, ge=0)
    package_max_bytes: int = Field(2 * GIB, gt=0)
    package_max_files: int = Field(20_000, gt=0)

    @field_validator("labels")
    @classmethod
    def _labels(cls, labels: dict[str, str]) -> dict[str, str]:
        if labels.get("capacity", "on-demand") not in ("on-demand", "spot"):
            raise ValueError(f"the label capacity is on-demand or spot, not {labels['capacity']!r}")
        return labels
