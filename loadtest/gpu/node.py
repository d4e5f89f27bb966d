"""What an agent sees of the GPUs: their names, their check, pinned memory."""

from __future__ import annotations

import asyncio

import torch

from loadtest.gpu.common import Row, device
from services.worker.node.gpu_check import GpuCheck, UnfitDeviceError
from services.worker.node.inventory import find_gpus
from trainbus.trainer.checkpoint.staging import StagingBuffers


def measure() -> list[Row]:
    gpus = find_gpus()
    rows = [Row("GPUs by NVML", ", ".join(f"{gpu.name} {gpu.mig_profile}".strip() for gpu in gpus) or "none")]
    if device().type == "cuda":
        named = torch.cuda.get_device_name(0)
        rows.append(Row("the first one by CUDA", named, gpus[0].name if gpus else "by NVML", named == gpus[0].name))
        try:
            asyncio.run(GpuCheck(gpus).check(range(len(gpus))))
            rows.append(Row("check before a run", "passed", "passed", True))
        except UnfitDeviceError as error:
            rows.append(Row("check before a run", str(error), "passed", False))
        staging = StagingBuffers(pinned=True)
        staging.lay_out({"model-0.safetensors": {"weight": torch.ones(1000, device=device())}})
        is_pinned = staging.images["model-0.safetensors"].views["weight"].is_pinned()
        rows.append(Row("staging memory", "pinned" if is_pinned else "pageable", "pinned", is_pinned))
    return rows
