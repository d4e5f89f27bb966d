"""The process of one version of a model: loads the folder, answers predictions, and batches those that wait.

``contracts/model_process.py`` has the protocol. While a batch is computed, further requests arrive in the socket and
make the next batch. The process ends when the socket closes.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from contracts.model_process import (
    MLFLOW_FOLDER,
    MODEL_LAUNCH_VARIABLE,
    Frame,
    FrameReader,
    ModelLaunch,
    decode_predict,
    encode_answer,
    encode_frame,
    encode_started,
    is_host_error,
)
from trainbus.model.predictor import InputError, Predictor
from trainbus.model.task_predictor import TaskPredictor
from trainbus.task import describe

#: Bytes that are read from the socket at a time.
READ_BYTES = 2**20
#: Longest text of an error in a reply.
MAX_ERROR_CHARS = 2000


@dataclass(slots=True)
class PredictRequest:
    """A request that waits for its batch."""

    request_id: int
    samples: list[dict[str, bytes]]
    arrived_at: float


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


def load_predictor(launch: ModelLaunch) -> Predictor:
    """Return the model of a folder: an MLflow model if it has one, a Task's otherwise.

    Raises:
        Exception: it cannot be loaded or served.
    """
    if (launch.folder / MLFLOW_FOLDER).is_dir():
        from trainbus.model.pyfunc_predictor import PyfuncPredictor

        return PyfuncPredictor.load(launch)
    return TaskPredictor.load(launch)


def main() -> NoReturn:
    launch = ModelLaunch.model_validate_json(os.environ[MODEL_LAUNCH_VARIABLE])
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(launch.socket))
    threading.Thread(target=_end_with_link, args=(link,), daemon=True).start()
    torch.set_num_threads(launch.threads)
    try:
        predictor = load_predictor(launch)
    except BaseException as error:  # a SystemExit of the user's module, too
        traceback.print_exc()
        text = describe(error)[:MAX_ERROR_CHARS]
        link.sendall(encode_frame({"op": "failed", "error": text, "is_host_error": is_host_error(error)}))
        os._exit(1)
    names = {"classes": list(predictor.classes), "targets": list(predictor.targets)}
    link.sendall(encode_frame({"op": "ready", "pid": os.getpid(), **names}))
    PredictionLoop(link, predictor, launch.max_batch, launch.max_delay_s).run()
    os._exit(0)


if __name__ == "__main__":
    main()
