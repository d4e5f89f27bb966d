"""Switches torch to deterministic kernels."""

from __future__ import annotations

import os

import torch


def enable_determinism() -> None:
    """Choose deterministic kernels for the whole process; what has none raises when it is called."""
    # cuBLAS reads this at its first use, and is not deterministic without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory would only make a bug of the model repeatable, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
