"""The names of the files that hold the tensors of a Task's checkpoint (docs/checkpoints.md)."""

from __future__ import annotations

import re
from typing import Literal, get_args

TensorKind = Literal["model", "optimizer", "ema"]
TENSOR_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
_NAME = re.compile(rf"({'|'.join(TENSOR_KINDS)})-(\d+)\.safetensors")


def tensors_file(kind: str, rank: int) -> str:
    """Return the name of the file with a rank's tensors of one of ``TENSOR_KINDS``."""
    return f"{kind}-{rank}.safetensors"


def parse_tensors_file(name: str) -> tuple[str, int] | None:
    """Return the kind and the rank of which a file has tensors; None if it is no such file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))
