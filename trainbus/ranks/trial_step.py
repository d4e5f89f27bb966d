"""One training step of a Task on two copies of one sample: wrong shapes cost seconds, and no attempt on a node.

What fails here is a fault of the Task only where it would fail on every node: where a package, a device, memory or the
prepared dataset is missing here, the step is not judged. Nor is one that fails after the Task has read statistics that
are estimated: other numbers, or other names, may not fail.
"""

from __future__ import annotations

import base64
import difflib
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from contracts.datasets import FieldStatistics
from contracts.known_errors import find_known_error
from trainbus.data.workers import describe_fields
from trainbus.ranks.estimated_statistics import estimate_statistics
from trainbus.task import Task, TaskError, describe
from trainbus.trainer.chained_optimizer import make_optimizer

T = TypeVar("T")
#: Steps for which the schedule is made, where the request names none.
SCHEDULE_STEPS = 1000
#: Errors that another machine may not have.
OF_THIS_MACHINE = ("backend", "CUDA", "cuda", "NVIDIA", "Triton", "bytes")
#: Names of other libraries -> the method that does it here.
FOREIGN_NAMES = {
    "build_model": "model",
    "collate_fn": "collate",
    "compute_loss": "loss",
    "compute_metrics": "metrics",
    "configure_model": "model",
    "configure_optimizers": "optimizer",
    "criterion": "loss",
    "lr_scheduler": "schedule",
    "training_step": "loss",
    "transform": "augment",
    "validation_step": "metrics",
}
#: The share of the free memory that the trial may take.
MAX_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TrialData:
    """Samples, of which the first is tried, and what the dataset says of all; None: that is not known here."""

    samples: Sequence[Mapping[str, bytes]]
    #: Why there are no samples.
    absence: str
    classes: tuple[str, ...] | None
    statistics: Mapping[str, FieldStatistics] | None

    @classmethod
    def from_plain(cls, given: Mapping[str, Any]) -> TrialData:
        """Return it as the client sends it."""
        classes, statistics = given["classes"], given["statistics"]
        if statistics is not None:
            statistics = {name: FieldStatistics.model_validate(each) for name, each in statistics.items()}
        return cls(
            [{name: base64.b64decode(value) for name, value in sample.items()} for sample in given["samples"]],
            given["absence"],
            None if classes is None else tuple(classes),
            statistics,
        )


class StepSkipped(BaseException):
    """Something is missing here, and the step cannot be judged. No ``except Exception`` of the user's code hides it."""


def find_misnamed_methods(task: Task) -> list[str]:
    """Return a sentence for each method that trainbus does not call, and whose name is nearly that of one it calls."""
    ours = {name for name, value in vars(Task).items() if callable(value) and not name.startswith("_")}
    classes = type(task).__mro__[: type(task).__mro__.index(Task)]
    own = {name for each in classes for name, value in vars(each).items() if callable(value) and name[0] != "_"}
    found = []
    for name in sorted(own - ours):
        near = FOREIGN_NAMES.get(name) or next(iter(difflib.get_close_matches(name, ours, 1, 0.8)), None)
        if near is not None and near not in own:
            found.append(f"{type(task).__name__}.{name}() is not called by trainbus: did you mean {near}()?")
    return found


def try_step(task: Task, data: TrialData, training: Mapping[str, Any], code: Path) -> dict[str, str]:
    """Return ``{"problem": ...}``, ``{"skipped": ...}`` with what could not be judged here, or ``{}``.

    Args:
        data: without a sample, model, optimizer and schedule are made, and nothing is computed. Without classes, a Task
            that asks for them is not judged.
        training: of the request: ``precision``, of which bf16 and fp16 are computed as bf16, and ``max_steps``.
    """
    _forbid_network()
    _limit_memory()
    trial = _Trial(task, code)
    estimated = _set_dataset(task, data)
    try:
        problem = _run_step(trial, data.samples, training)
    except _ProblemFound as found:
        if estimated.is_used:
            return {"skipped": f"{found}, with {estimated.text}; those of all data may differ, so it is not judged"}
        problem = str(found)
    except StepSkipped as skipped:
        return {"skipped": str(skipped)}
    if problem:
        return {"problem": problem}
    if not data.samples:
        return {"skipped": f"{data.absence}, so no step was tried"}
    return {"skipped": f"one step was tried with {estimated.text}"} if estimated.is_used else {}


def _run_step(trial: _Trial, samples: Sequence[Mapping[str, bytes]], training: Mapping[str, Any]) -> str:
    """Try one step, as far as there is a sample; return what the Task returned wrongly, or ''.

    Raises:
        _ProblemFound, StepSkipped: as the calls of the Task do.
    """
    task = trial.task
    batch: Any = trial.make_batch(samples[0]) if samples else None
    model: Any = trial.call("model", task.model)
    if not isinstance(model, torch.nn.Module):  # the user's code may return anything
        return f"{trial.name}.model() returned {type(model).__name__}, and no nn.Module"
    optimizer = trial.call("optimizer", lambda: make_optimizer(task, model))
    total_steps = training.get("max_steps") or SCHEDULE_STEPS
    trial.call("schedule", lambda: task.schedule(optimizer, total_steps))
    if not samples:
        return ""
    model.train()
    with torch.autocast("cpu", torch.bfloat16, enabled=training.get("precision") in ("bf16", "fp16")):
        loss: Any = trial.call("loss", lambda: task.loss(model, batch))
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        return f"{trial.name}.loss() returned {found}: return a scalar tensor, the mean over the batch"
    trial.call("loss", loss.backward)
    return ""


class _ProblemFound(Exception):
    """The Task fails on every node; the text says where."""


class _Trial:
    """Calls the methods of a Task, and tells its faults from what is missing on this machine."""

    def __init__(self, task: Task, code: Path) -> None:
        self.task, self._code, self.name = task, code, type(task).__name__

    def make_batch(self, sample: Mapping[str, bytes]) -> Any:
        """Return a batch of two copies of the sample: one of one has no variance.

        Raises:
            _ProblemFound: it fails. What fails in decoding fails on the node.
            StepSkipped: it needs a package that is not here.
        """
        if self._takes_arrays_alone(sample):
            fields = {name: np.frombuffer(value, dtype=np.uint8) for name, value in sample.items()}
            arrays = {name: np.stack([each, each]) for name, each in fields.items()}
            return self._decode("decode_batch", sample, lambda: self.task.decode_batch(arrays))
        examples = [self._decode("decode", sample, lambda: self.task.decode(dict(sample))) for _ in range(2)]
        return self.call("collate", lambda: self.task.collate(examples))

    def _takes_arrays_alone(self, sample: Mapping[str, bytes]) -> bool:
        """Return whether the Task has no ``decode`` for such a sample, but ``decode_batch``, which is called then."""
        kind = type(self.task)
        if kind.decode is not Task.decode or kind.decode_batch is Task.decode_batch:
            return False
        try:
            self.task.decode(dict(sample))
        except TaskError:
            return True
        except Exception:
            return False  # it fails again where that is told
        return False

    def _decode(self, method: str, sample: Mapping[str, bytes], function: Callable[[], T]) -> T:
        try:
            return function()
        except TaskError as error:
            raise _ProblemFound(str(error)) from error
        except ModuleNotFoundError as error:
            raise StepSkipped(f"{error.name} is not installed here, so no sample was decoded") from error
        except Exception as error:
            traceback.print_exception(error)
            fields = describe_fields(dict(sample)) if isinstance(error, KeyError) else ""
            raise _ProblemFound(f"{describe(error, self._code)}: {self.name}.{method}() failed{fields}") from error

    def call(self, method: str, function: Callable[[], T]) -> T:
        """Return what a method returns.

        Raises:
            _ProblemFound: it fails as it would on every node.
            StepSkipped: it fails, and might not elsewhere.
        """
        try:
            return function()
        except TaskError as error:
            raise _ProblemFound(str(error)) from error
        except Exception as error:
            text = describe(error, self._code)
            known = find_known_error(f"{type(error).__name__}: {error}")
            is_absent = isinstance(error, ImportError) or any(sign in str(error) for sign in OF_THIS_MACHINE)
            if known is None or known.depends_on_slots or is_absent:
                raise StepSkipped(f"{method}() fails on this machine ({text}), so no step was tried") from error
            traceback.print_exception(error)
            raise _ProblemFound(f"{text}: {self.name}.{method}() failed") from error


class _Absent:
    """What only the prepared dataset has: the trial ends when the Task asks for it. The Task may set it itself."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, task: Task | None, owner: type) -> NoReturn:
        raise StepSkipped(f"the Task uses {self._name} of the prepared dataset, so no step was tried")


class _EstimatedStatistics:
    """Statistics of the samples that were read, in the place of those that ingestion computes."""

    def __init__(self, samples: Sequence[Mapping[str, bytes]]) -> None:
        self._samples = samples
        self._statistics: Mapping[str, FieldStatistics] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._statistics)

    @property
    def text(self) -> str:
        count = len(self._samples)
        return "statistics of one sample" if count == 1 else f"statistics of the {count} samples that were read here"

    def __get__(self, task: Task | None, owner: type) -> Mapping[str, FieldStatistics]:
        self._statistics = self._statistics or estimate_statistics(self._samples)
        if not self._statistics:
            raise StepSkipped("the Task uses statistics of the prepared dataset, so no step was tried")
        return self._statistics


def _set_dataset(task: Task, data: TrialData) -> _EstimatedStatistics:
    """Give the Task classes and statistics, as the trainer does, and what stands for all that is not known here.

    Return what stands for the statistics; it is not used where they are known.
    """
    kind, estimated = type(task), _EstimatedStatistics(data.samples)
    stand_ins: dict[str, object] = {}
    if data.classes is None:
        stand_ins["classes"] = _Absent("classes")
    if data.statistics is None:
        stand_ins["statistics"] = estimated
    task.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **stand_ins})
    if data.classes is not None:
        task.classes = data.classes
    if data.statistics is not None:
        task.statistics = data.statistics
    return estimated


def _forbid_network() -> None:
    """Let nothing be downloaded in a check: pretrained weights are the node's business."""

    def connect(*_: object) -> NoReturn:
        raise OSError("the check before the upload has no network")

    socket.socket.connect = socket.socket.connect_ex = connect  # type: ignore[method-assign]


def _limit_memory() -> None:
    """Let a model that is made for a node fail here, and not this machine."""
    try:
        import resource  # neither is everywhere

        import psutil
    except ImportError:
        return
    limit = int(psutil.virtual_memory().available * MAX_MEMORY_SHARE)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
