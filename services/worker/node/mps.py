"""The control daemon of CUDA MPS, which lets processes share a GPU at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: Where CUDA looks for the daemon without CUDA_MPS_PIPE_DIRECTORY.
DEFAULT_PIPE_DIR = "/tmp/nvidia-mps"


def find_mps_pipe(setting: str | None, environment: Mapping[str, str]) -> str:
    """Return the folder in which a daemon listens now, '' if none does.

    ``setting``: the folder; None: where CUDA looks; '': MPS is not used.
    """
    folder = environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIR) if setting is None else setting
    return folder if folder and Path(folder, "control").exists() else ""
