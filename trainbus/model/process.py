"""The process of one version of a model: loads the folder, answers predictions, and batches those that wait.

``contracts/model_process.py`` has the protocol. While a batch is computed, further requests arrive in the socket and
make the next batch. The process ends when the socket closes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from contracts.model_process import (
    BYTES,
    MODEL_LAUNCH_VARIABLE,
    Frame,
    FrameReader,
    ModelLaunch,
    Tensor,
    decode_predict,
    encode_answer,
    encode_frame,
    encode_started,
    pack_bytes,
)
from trainbus.model.missing_field import find_missing_field
from trainbus.model.saved_model import load_model_and_task
from trainbus.task import CLASS_FIELD, ROW_FIELD, Task, TaskError, describe

#: Bytes that are read from the socket at a time.
READ_BYTES = 2**20
#: Longest text of an error in a reply.
MAX_ERROR_CHARS = 2000
#: Columns that are examined for being labels.
MAX_LABEL_COLUMNS = 100
#: What of ``Task.predict`` is an answer; the rest is for evaluation.
ANSWERED = ("prediction", "probabilities")
DATATYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
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


@dataclass(slots=True)
class PredictRequest:
    """A request that waits for its batch."""

    request_id: int
    samples: list[dict[str, bytes]]
    arrived_at: float


class Predictor:
    """A loaded model and its Task: samples in, named tensors out."""

    def __init__(self, model: nn.Module, task: Task, device: torch.device, code: Path | None = None) -> None:
        self._model, self._task, self._device, self._code = model.to(device).eval(), task, device, code

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self._task.classes)

    @classmethod
    def load(cls, launch: ModelLaunch) -> Predictor:
        """Load the model of a folder.

        Raises:
            TaskError: it cannot be loaded or served.
        """
        model, task = load_model_and_task(launch.folder)
        if type(task).serve is Task.serve and type(task).predict is Task.predict:
            raise TaskError(
                f"{type(task).__name__} cannot be served: give it predict(self, model, batch), or serve(self, model, "
                "batch) that returns tensors by name"
            )
        name = launch.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        return cls(model, task, torch.device(name), (launch.folder / "code").resolve())

    def predict(self, samples: Sequence[Mapping[str, bytes]]) -> tuple[Tensor, ...]:
        """Return the outputs for some samples, each with one row a sample.

        Raises:
            InputError: a sample cannot be decoded, or the samples do not fit together.
            Exception: what the model raises.
        """
        examples, problems = [], []
        for row, sample in enumerate(samples):
            try:
                examples.append(self._task.decode(_with_label(sample)))
            except Exception as error:
                problems.append(self._describe_problem(row, sample, error))
        if problems:
            raise InputError(problems)
        try:
            batch = self._task.collate(examples)
        except Exception as error:
            text = f"the rows do not fit into one batch: {describe(error, self._code)}"
            raise InputError([{"row": 0, "field": "", "text": text}]) from error
        with torch.inference_mode():
            answer = self._answer(_move(batch, self._device))
        outputs = tuple(_to_tensor(name, value) for name, value in answer.items())
        for each in outputs:
            if not each.shape or each.shape[0] != len(samples):
                raise TaskError(
                    f"{type(self._task).__name__}: the output {each.name!r} has shape {list(each.shape)}: its first "
                    f"dimension must be the {len(samples)} samples of the batch"
                )
        return outputs

    def find_labels(self, samples: Sequence[Mapping[str, bytes]]) -> list[str]:
        """Return the columns that say what is true and do not change what is predicted; [] where that is unknown.

        Each column gets the values of other samples in turn. Of a label the target changes, the prediction does not.
        """
        rows = [json.loads(sample[ROW_FIELD]) for sample in samples if ROW_FIELD in sample]
        if len(rows) < 2 or len(rows) < len(samples) or type(self._task).predict is Task.predict:
            return []
        names = [name for name in rows[0] if all(name in row for row in rows)][:MAX_LABEL_COLUMNS]
        try:
            before = self._predict_pair(samples, rows)
        except Exception:
            return []
        labels = []
        for name in names:
            moved = [{**row, name: rows[number - 1][name]} for number, row in enumerate(rows)]
            if all(row[name] == other[name] for row, other in zip(rows, moved, strict=True)):
                continue
            try:
                after = self._predict_pair(samples, moved)
            except Exception:
                continue
            if before[0] == after[0] and before[1] != after[1]:
                labels.append(name)
        return labels

    def _predict_pair(
        self, samples: Sequence[Mapping[str, bytes]], rows: Sequence[Mapping[str, Any]]
    ) -> tuple[bytes, bytes]:
        """Return the bytes of the predictions and of the targets for samples with these rows."""
        changed = [{**sample, ROW_FIELD: json.dumps(row).encode()} for sample, row in zip(samples, rows, strict=True)]
        batch = self._task.collate([self._task.decode(_with_label(sample)) for sample in changed])
        with torch.inference_mode():
            found = self._task.predict(self._model, _move(batch, self._device))
        if isinstance(found, Mapping):
            found = (found.get("probabilities", found["prediction"]), found["target"])
        assert found is not None
        predicted, target = (_to_tensor("", each).data for each in found)
        return predicted, target

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        found = self._task.serve(self._model, batch)
        if isinstance(found, Mapping):
            return found
        if found is not None:
            return {"prediction": found}
        predicted = self._task.predict(self._model, batch)
        columns = predicted if isinstance(predicted, Mapping) else {"prediction": predicted and predicted[0]}
        answer = {name: columns[name] for name in ANSWERED if columns.get(name) is not None}
        if "prediction" not in answer:
            raise TaskError(
                f"{type(self._task).__name__}.predict() gives no prediction: give it serve(self, model, batch), which "
                "returns tensors by name"
            )
        classes, chosen = self._task.classes, answer["prediction"]
        if classes and isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
            answer["class"] = [classes[int(each)] for each in chosen.tolist()]
        return answer

    def _describe_problem(self, row: int, sample: Mapping[str, bytes], error: Exception) -> dict[str, Any]:
        present = list(json.loads(sample[ROW_FIELD])) if ROW_FIELD in sample else list(sample)
        if (name := find_missing_field(error, present)) is not None:
            return {"row": row, "field": name, "text": f"the field {name!r} is missing", "present": present}
        fields = [name for name in sample if name != CLASS_FIELD]
        field = fields[0] if len(fields) == 1 and fields[0] != ROW_FIELD else ""
        return {"row": row, "field": field, "text": f"cannot be decoded: {describe(error, self._code)}"}


def _with_label(sample: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the sample with a label where it has none: ``decode`` of a training sample reads one."""
    return {CLASS_FIELD: b"0", **sample}


def _move(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _move(each, device) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_move(each, device) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def _to_tensor(name: str, value: Any) -> Tensor:
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


class PredictionLoop:
    """Reads requests from the socket, predicts them in batches, and replies. One thread."""

    def __init__(self, link: socket.socket, predictor: Predictor, max_batch: int, max_delay_s: float) -> None:
        self._link, self._predictor, self._max_batch, self._max_delay_s = link, predictor, max_batch, max_delay_s
        self._frames = FrameReader()
        self._waiting: deque[PredictRequest] = deque()
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)

    def run(self) -> None:
        """Serve until the other side closes the socket."""
        while self._receive(self._patience_s()):
            if self._waiting and self._patience_s() <= 0:
                self._predict_batch(self._take_batch())

    def _patience_s(self) -> float:
        """Return for how long to wait for further requests; 0 where a batch is due."""
        if not self._waiting:
            return 3600.0
        if sum(len(each.samples) for each in self._waiting) >= self._max_batch:
            return 0.0
        return max(0.0, self._waiting[0].arrived_at + self._max_delay_s - time.monotonic())

    def _receive(self, patience_s: float) -> bool:
        """Read what there is, after waiting for something; False at the end of the connection."""
        ready = self._poll.poll(patience_s * 1000)
        while ready:
            data = self._link.recv(READ_BYTES)
            if not data:
                return False
            for frame in self._frames.feed(data):
                self._handle(frame)
            ready = self._poll.poll(0)
        return True

    def _handle(self, frame: Frame) -> None:
        match frame.op:
            case "predict":
                self._waiting.append(PredictRequest(frame.header["id"], decode_predict(frame), time.monotonic()))
            case "find_labels":
                self._link.sendall(encode_started([frame.header["id"]]))
                labels = self._predictor.find_labels(decode_predict(frame))
                self._link.sendall(encode_frame({"op": "labels", "id": frame.header["id"], "names": labels}))
            case "ping":
                while self._waiting:
                    self._predict_batch(self._take_batch())
                self._link.sendall(encode_frame({"op": "pong", "id": frame.header["id"]}))

    def _take_batch(self) -> list[PredictRequest]:
        """Return whole requests, up to the largest batch; a larger request is a batch of its own."""
        batch = [self._waiting.popleft()]
        size = len(batch[0].samples)
        while self._waiting and size + len(self._waiting[0].samples) <= self._max_batch:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].samples)
        return batch

    def _predict_batch(self, batch: Sequence[PredictRequest]) -> None:
        self._link.sendall(encode_started([request.request_id for request in batch]))
        try:
            outputs = self._predictor.predict([sample for request in batch for sample in request.samples])
        except Exception as error:
            if len(batch) > 1:
                # One request must not fail the others.
                for request in batch:
                    self._predict_batch([request])
                return
            self._link.sendall(_encode_failure(batch[0].request_id, error))
            return
        counts = [len(request.samples) for request in batch]
        parts = [output.split(counts) for output in outputs]
        for number, request in enumerate(batch):
            self._link.sendall(encode_answer(request.request_id, [part[number] for part in parts]))


def _encode_failure(request_id: int, error: Exception) -> bytes:
    if isinstance(error, InputError):
        return encode_frame({"op": "refused", "id": request_id, "problems": list(error.problems)})
    traceback.print_exception(error)
    return encode_frame({"op": "error", "id": request_id, "error": describe(error)[:MAX_ERROR_CHARS]})


def _end_with_link(link: socket.socket) -> None:
    """End this process when the other side has closed the socket, also while the model computes or hangs."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> NoReturn:
    launch = ModelLaunch.model_validate_json(os.environ[MODEL_LAUNCH_VARIABLE])
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(launch.socket))
    threading.Thread(target=_end_with_link, args=(link,), daemon=True).start()
    torch.set_num_threads(launch.threads)
    try:
        predictor = Predictor.load(launch)
    except BaseException as error:  # a SystemExit of the user's module, too
        traceback.print_exc()
        link.sendall(encode_frame({"op": "failed", "error": describe(error)[:MAX_ERROR_CHARS]}))
        os._exit(1)
    link.sendall(encode_frame({"op": "ready", "pid": os.getpid(), "classes": list(predictor.classes)}))
    PredictionLoop(link, predictor, launch.max_batch, launch.max_delay_s).run()
    os._exit(0)


if __name__ == "__main__":
    main()
