"""The environment of a rank: what decides the last bits of its arithmetic, beside the task and its data.

Two processes with equal environments compute the same bits from the same numbers. Where environments differ (machine
type, torch version, number of threads) the results are as good but not the same, and the run reports it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from contracts.events.checkpoint import Exactness
from contracts.exactness import TIMED
from contracts.ranks import PACKAGES_DIR_VARIABLE
from trainbus.trainer import kernel_choice

#: Variables that choose kernels or decide how a sum is split among threads.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def enable_determinism() -> None:
    """Choose deterministic kernels for the whole process; what has none raises when it is called."""
    # cuBLAS reads this at its first use, and is not deterministic without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling uninitialised memory would only make a bug of the model repeatable, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def describe(
    device: torch.device, machine: Mapping[str, str] | None = None, model: nn.Module | None = None
) -> dict[str, str]:
    """Return everything that is known to decide the last bits on ``device``, by name.

    ``machine`` is what the agent knows of the node. Call it after the settings of this process are made.
    """
    found = {f"machine.{name}": value for name, value in (machine or {}).items()}
    found |= {f"env.{name}": os.environ[name] for name in VARIABLES if name in os.environ}
    found |= {
        "device": device.type,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
        "torch": torch.__version__,
        # Compiler, flags and libraries: two builds of one version need not agree.
        "torch.build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "torch.threads": str(torch.get_num_threads()),
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch.mkldnn": str(torch.backends.mkldnn.enabled),
        "torch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.default_dtype": str(torch.get_default_dtype()),
    }
    if packages_dir := os.environ.get(PACKAGES_DIR_VARIABLE):
        found["packages"] = os.path.basename(packages_dir)[:16]
    found |= kernel_choice.describe(device)
    if timed := kernel_choice.find_timed(model, device) if model is not None else ():
        found[TIMED] = "; ".join(timed)
    if device.type == "cuda":
        found |= _cuda(device)
    return found


def _cuda(device: torch.device) -> dict[str, str]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "cuda": str(torch.version.cuda),
        "cuda.driver": str(torch._C._cuda_getDriverVersion()),  # type: ignore[attr-defined]
        "cuda.device": torch.cuda.get_device_name(device),
        "cuda.capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda.multiprocessors": str(torch.cuda.get_device_properties(device).multi_processor_count),
        "cudnn": str(cudnn.version()),  # type: ignore[no-untyped-call]
        "cudnn.settings": f"enabled={cudnn.enabled} benchmark={cudnn.benchmark} deterministic={cudnn.deterministic}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "tf32": f"matmul={matmul.allow_tf32} cudnn={cudnn.allow_tf32}",
        "reduced_precision": (
            f"fp16={matmul.allow_fp16_reduced_precision_reduction} bf16={matmul.allow_bf16_reduced_precision_reduction}"
        ),
    }


def digest(environment: Mapping[str, str]) -> str:
    """Return the hash of an environment: equal hashes, equal bits."""
    return hashlib.sha256(json.dumps(dict(environment), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def classify_exactness(
    logical_ranks: int | None,
    digests: Collection[str],
    parent: Mapping[str, Any] | None,
    run_id: str | None,
    *,
    is_timed: bool = False,
) -> Exactness:
    """Return whether the state will equal, to the bit, that of undisturbed training.

    Args:
        digests: the environments of all ranks of this generation.
        parent: the ``about`` of the checkpoint that is resumed; None from scratch.
        run_id: of this run. A run that begins with the checkpoint of another run is exact, in any environment, if that
            checkpoint is.
        is_timed: kernels are chosen by timing.
    """
    if logical_ranks is None or is_timed or len(set(digests)) != 1:
        return "samples-exact"
    if parent is None:
        return "exact"
    moved = parent.get("run_id") == run_id and parent.get("environment_digest") not in digests
    return "exact" if parent.get("exactness") == "exact" and not moved else "samples-exact"
