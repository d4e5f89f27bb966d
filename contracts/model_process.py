"""The protocol between serving and the process that runs one version of a model.

Serving listens on a Unix socket, starts the process with a ``ModelLaunch`` in TRAINBUS_MODEL_LAUNCH, and the process
connects. Both send frames: the length of the header and of the body (``<II``), the header as JSON, the body.

- ``ready`` (process -> serving): the model is loaded. ``targets`` names the columns that a request need not have.
  ``failed``: it cannot be; ``error`` has the reason, and ``is_host_error`` is true where that is the machine's and not
  the model's: no memory, no disk space.
- ``predict`` (serving -> process): samples as ``Task.decode`` takes them, with an ``id``. The reply has the same one:
  ``answer`` with tensors, ``refused`` with the problems of the samples, or ``error`` with what the model raised.
- ``started`` (process -> serving): the computation of a batch begins; ``ids`` are its requests. Each part of a batch
  that is divided after a failure has its own. So serving counts a timeout from the start of the work, and knows which
  requests were computed when a process ended.
- ``ping`` (serving -> process): the reply is ``pong``, once the predictions before it are done.
"""

from __future__ import annotations

import errno
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MODEL_LAUNCH_VARIABLE = "TRAINBUS_MODEL_LAUNCH"
MODEL_PROCESS_MODULE = "trainbus.model.process"
#: Where the folder of a fetched model has an MLflow model; a folder without it has a Task's.
MLFLOW_FOLDER = "mlflow"
#: The input of an MLflow model that takes one tensor, or one column, without a name.
UNNAMED_INPUT = "input"
#: A sample of a dataset: its fields by extension.
Sample = Mapping[str, bytes]
#: Bytes of one element by the datatype's name in the Open Inference Protocol; BYTES has elements of any length.
ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
}
BYTES = "BYTES"
#: Errors of a machine without disk space, files, memory or a sound disk.
HOST_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EAGAIN})
_LENGTHS = struct.Struct("<II")
_ELEMENT = struct.Struct("<I")


class ModelLaunch(BaseModel):
    """What a model process is started with."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    folder: Path
    socket: Path
    #: Samples that are predicted together, at most.
    max_batch: int = Field(32, ge=1)
    #: Seconds for which an incomplete batch waits for further requests.
    max_delay_s: float = Field(0.0, ge=0)
    threads: int = Field(1, ge=1)
    #: auto: the first GPU where there is one.
    device: str = "auto"


def is_host_error(error: BaseException) -> bool:
    """Return whether an error says that the machine lacks something, whatever the model is."""
    if isinstance(error, OSError):
        return error.errno in HOST_ERRNOS
    # torch's, of a GPU, is a RuntimeError.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as bytes: little-endian, row by row; of BYTES each element after its length as uint32."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def rows(self) -> int:
        """The size of its first dimension."""
        return self.shape[0] if self.shape else 1

    def split(self, counts: Sequence[int]) -> list[Tensor]:
        """Return consecutive parts with these numbers of rows."""
        parts, start = [], 0
        if self.datatype == BYTES:
            elements, width = unpack_bytes(self.data), math.prod(self.shape[1:])
            for count in counts:
                part = pack_bytes(elements[start * width : (start + count) * width])
                parts.append(Tensor(self.name, BYTES, (count, *self.shape[1:]), part))
                start += count
            return parts
        width = ELEMENT_BYTES[self.datatype] * math.prod(self.shape[1:])
        for count in counts:
            part = self.data[start * width : (start + count) * width]
            parts.append(Tensor(self.name, self.datatype, (count, *self.shape[1:]), part))
            start += count
        return parts


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of either side."""

    header: dict[str, Any]
    body: bytes = b""

    @property
    def op(self) -> str:
        return str(self.header.get("op", ""))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole now."""
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            header_bytes, body_bytes = _LENGTHS.unpack_from(self._buffer)
            end = _LENGTHS.size + header_bytes + body_bytes
            if len(self._buffer) < end:
                return
            middle = _LENGTHS.size + header_bytes
            header, body = json.loads(self._buffer[_LENGTHS.size : middle]), bytes(self._buffer[middle:end])
            del self._buffer[:end]
            yield Frame(header, body)


def encode_frame(header: Mapping[str, Any], *body: bytes) -> bytes:
    """Return the bytes of a frame."""
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(head), sum(map(len, body))), head, *body))


def encode_predict(request_id: int, samples: Sequence[Sample]) -> bytes:
    """Return the frame that asks for a prediction."""
    layout = [[[name, len(content)] for name, content in sample.items()] for sample in samples]
    contents = [content for sample in samples for content in sample.values()]
    return encode_frame({"op": "predict", "id": request_id, "samples": layout}, *contents)


def encode_started(request_ids: Sequence[int]) -> bytes:
    """Return the frame that says that the computation of these requests begins."""
    return encode_frame({"op": "started", "ids": list(request_ids)})


def decode_predict(frame: Frame) -> list[dict[str, bytes]]:
    """Return the samples of a ``predict`` frame."""
    samples, start = [], 0
    for layout in frame.header["samples"]:
        sample = {}
        for name, size in layout:
            sample[name] = frame.body[start : start + size]
            start += size
        samples.append(sample)
    return samples


def encode_answer(request_id: int, outputs: Sequence[Tensor]) -> bytes:
    """Return the frame that answers with tensors."""
    layout = [[each.name, each.datatype, list(each.shape), len(each.data)] for each in outputs]
    header = {"op": "answer", "id": request_id, "outputs": layout}
    return encode_frame(header, *(each.data for each in outputs))


def decode_answer(frame: Frame) -> tuple[Tensor, ...]:
    """Return the tensors of an ``answer`` frame."""
    outputs, start = [], 0
    for name, datatype, shape, size in frame.header["outputs"]:
        outputs.append(Tensor(name, datatype, tuple(shape), frame.body[start : start + size]))
        start += size
    return tuple(outputs)


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """Return the elements of a BYTES tensor, each after its length."""
    return b"".join(part for each in elements for part in (_ELEMENT.pack(len(each)), each))


def unpack_bytes(data: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor.

    Raises:
        ValueError: the lengths do not add up to the data.
    """
    elements, start = [], 0
    while start < len(data):
        if start + _ELEMENT.size > len(data):
            raise ValueError("the data ends within the length of an element")
        (size,) = _ELEMENT.unpack_from(data, start)
        start += _ELEMENT.size
        if start + size > len(data):
            raise ValueError("the data ends within an element")
        elements.append(data[start : start + size])
        start += size
    return elements
