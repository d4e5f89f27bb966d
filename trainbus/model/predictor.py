"""What answers in a model process, whatever made the model: samples in, named tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from contracts.model_process import BYTES, Tensor, pack_bytes

DATATYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}


class InputError(Exception):
    """The samples cannot be predicted; each problem has its row, its field ('' where unknown) and a text.

    That of a missing field has the fields that are ``present`` besides.
    """

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("; ".join(str(each["text"]) for each in problems))
        self.problems = problems


class Predictor(Protocol):
    """A loaded model."""

    #: The names of its classes; () where it has none.
    classes: tuple[str, ...]
    #: The columns of a row that a request need not have.
    targets: tuple[str, ...]

    def predict(self, samples: Sequence[Mapping[str, bytes]]) -> tuple[Tensor, ...]:
        """Return the outputs for some samples, each with one row a sample.

        Raises:
            InputError: a sample cannot be decoded, or the samples do not fit together.
            Exception: what the model raises.
        """


def to_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor, an array or a list of texts as a named tensor; a type that the protocol lacks becomes FP32."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, (str, bytes)) for each in value):
        elements = [each.encode() if isinstance(each, str) else each for each in value]
        return Tensor(name, BYTES, (len(elements),), pack_bytes(elements))
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    tensor = tensor.detach().cpu()
    if tensor.dtype not in DATATYPES:
        tensor = tensor.float()
    content = tensor.contiguous().numpy()
    if content.dtype.byteorder == ">":
        content = content.astype(content.dtype.newbyteorder("<"))
    return Tensor(name, DATATYPES[tensor.dtype], tuple(tensor.shape), content.tobytes())
