"""What chooses kernels beside torch itself: libraries, their switches, and choices that are made by timing.

A kernel that was the fastest in a trial may be another one tomorrow, with other last bits: such a run is not exact,
whatever the environment.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any

import torch
from torch import nn

#: Packages with kernels, or with a decoder, of their own.
PACKAGES = (
    "accelerate",
    "albumentations",
    "av",
    "bitsandbytes",
    "deepspeed",
    "diffusers",
    "flash-attn",
    "flash-attn-3",
    "liger-kernel",
    "opencv-python",
    "opencv-python-headless",
    "peft",
    "pillow",
    "pillow-simd",
    "scikit-image",
    "timm",
    "torchao",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "transformer-engine",
    "transformers",
    "triton",
    "xformers",
)
#: Variables with these beginnings choose kernels; those with these ends name files or what is logged.
PREFIXES = (
    "CUBLAS",
    "CUDNN_",
    "FLASH_ATTENTION_",
    "NVTE_",
    "PYTORCH_TUNABLEOP_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "XFORMERS_",
)
IRRELEVANT_ENDS = ("_DIR", "_PATH", "_FILENAME", "_VERBOSE", "_DEBUG", "_LOG")
ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
#: Inductor's settings that try kernels and take the fastest.
TIMED_SETTINGS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
#: Inductor's settings that change the last bits.
INDUCTOR_SETTINGS = (*TIMED_SETTINGS, "deterministic", "emulate_precision_casts", "fallback_random", "use_fast_math")


def describe(device: torch.device) -> dict[str, str]:
    """Return the versions of the libraries and the switches that are set, by name."""
    found = {f"package.{name}": version for name in PACKAGES if (version := _version(name))}
    found |= {
        f"env.{name}": value
        for name, value in os.environ.items()
        if name.startswith(PREFIXES) and not name.endswith(IRRELEVANT_ENDS)
    }
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        changed = [name for name in INDUCTOR_SETTINGS if getattr(inductor, name, False)]
        found |= {f"inductor.{name}": "True" for name in changed}
    found["attention"] = " ".join(
        f"{name}={getattr(torch.backends.cuda, f'{name}_sdp_enabled')()}" for name in ATTENTION_KERNELS
    )
    if device.type == "cuda":
        found["blas"] = str(torch.backends.cuda.preferred_blas_library())
        found["tunableop"] = f"enabled={_uses_tunableop()} tuning={_tunes()}"
    return found


def find_timed(model: nn.Module, device: torch.device) -> tuple[str, ...]:
    """Return what chooses kernels by timing in this process, each with how to switch it off."""
    found = []
    on_gpu = device.type == "cuda"
    if on_gpu and torch.backends.cudnn.benchmark:
        found.append("torch.backends.cudnn.benchmark is on")
    if on_gpu and _uses_tunableop() and _tunes():
        found.append("TunableOp tunes (PYTORCH_TUNABLEOP_TUNING=0 keeps what it has found)")
    compiled = [_compiler_config(module) for module in model.modules() if _is_compiled(module)]
    if any(config.get(name) for config in compiled for name in TIMED_SETTINGS):
        found.append("torch.compile autotunes (mode 'default' does not)")
    elif compiled and on_gpu and not any(config.get("deterministic") for config in compiled):
        found.append("Inductor times its reductions (torch._inductor.config.deterministic = True keeps it from that)")
    return tuple(found)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "dynamo_ctx") or getattr(module, "_compiled_call_impl", None) is not None


def _compiler_config(module: nn.Module) -> dict[str, Any]:
    """Return Inductor's settings for a compiled module: its own, else those of the process."""
    context = getattr(module, "dynamo_ctx", None)
    config = getattr(context, "compiler_config", None)
    if isinstance(config, dict):
        return config
    inductor = sys.modules.get("torch._inductor.config")
    return {name: getattr(inductor, name, False) for name in INDUCTOR_SETTINGS}


def _uses_tunableop() -> bool:
    return torch.cuda.tunable.is_enabled()


def _tunes() -> bool:
    return torch.cuda.tunable.tuning_is_enabled()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
