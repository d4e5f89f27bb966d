"""The switches that make the same kernels give the same bits."""

from __future__ import annotations

import os

import torch


def enable_determinism() -> None:
    """Choose deterministic kernels for the whole process; what has none raises when it is called."""
    # cuBLAS reads this when it is first used, and gives no promise without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Reading uninitialised memory is a bug of the model that filling it would only make repeatable, at a price.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
