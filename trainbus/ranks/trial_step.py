"""One training step of a Task on two copies of one sample: wrong shapes cost seconds, and no attempt on a node.

What fails here is a fault of the Task only where it would fail on every node: where a package, a device, memory or the
prepared dataset is missing here, the step is not judged.
"""

from __future__ import annotations

import difflib
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from contracts.known_errors import find_known_error
from trainbus.data.workers import describe_fields
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


def try_step(
    task: Task, sample: Mapping[str, bytes] | None, classes: Sequence[str], training: Mapping[str, Any], code: Path
) -> dict[str, str]:
    """Return ``{"problem": ...}``, ``{"skipped": ...}`` with what could not be judged here, or ``{}``.

    Args:
        sample: fields of a real sample; None: model, optimizer and schedule are made, and nothing is computed.
        classes: those of the dataset, where they are known here; empty: a Task that asks for them is not judged.
        training: of the request: ``precision``, of which bf16 and fp16 are computed as bf16, and ``max_steps``.
    """
    _forbid_network()
    _limit_memory()
    trial = _Trial(task, code)
    try:
        _set_dataset(task, tuple(classes))
        examples = [] if sample is None else trial.decode(sample)
        model: Any = trial.call("model", task.model)
        if not isinstance(model, torch.nn.Module):  # the user's code may return anything
            return {"problem": f"{trial.name}.model() returned {type(model).__name__}, and no nn.Module"}
        optimizer = trial.call("optimizer", lambda: make_optimizer(task, model))
        total_steps = training.get("max_steps") or SCHEDULE_STEPS
        trial.call("schedule", lambda: task.schedule(optimizer, total_steps))
        if not examples:
            return {}
        batch = trial.call("collate", lambda: task.collate(examples))
        model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=training.get("precision") in ("bf16", "fp16")):
            loss: Any = trial.call("loss", lambda: task.loss(model, batch))
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            return {"problem": f"{trial.name}.loss() returned {found}: return a scalar tensor, the mean over the batch"}
        trial.call("loss", loss.backward)
    except _ProblemFound as found_problem:
        return {"problem": str(found_problem)}
    except StepSkipped as skipped:
        return {"skipped": str(skipped)}
    return {}


class _ProblemFound(Exception):
    """The Task fails on every node; the text says where."""


class _Trial:
    """Calls the methods of a Task, and tells its faults from what is missing on this machine."""

    def __init__(self, task: Task, code: Path) -> None:
        self._task, self._code, self.name = task, code, type(task).__name__

    def decode(self, sample: Mapping[str, bytes]) -> list[Any]:
        """Return the sample, decoded twice: a batch of one has no variance. Whatever fails, fails on the node.

        Raises:
            _ProblemFound: it fails.
            StepSkipped: it needs a package that is not here.
        """
        try:
            return [self._task.decode(dict(sample)) for _ in range(2)]
        except TaskError as error:
            raise _ProblemFound(str(error)) from error
        except ModuleNotFoundError as error:
            raise StepSkipped(f"{error.name} is not installed here, so no sample was decoded") from error
        except Exception as error:
            traceback.print_exception(error)
            fields = describe_fields(dict(sample)) if isinstance(error, KeyError) else ""
            raise _ProblemFound(f"{describe(error, self._code)}: {self.name}.decode() failed{fields}") from error

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


def _set_dataset(task: Task, classes: tuple[str, ...]) -> None:
    """Give the Task the classes of the dataset, as the trainer does, and what stands for all that is not known here."""
    kind = type(task)
    absent = {name: _Absent(name) for name in (("statistics",) if classes else ("classes", "statistics"))}
    task.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **absent})
    if classes:
        task.classes = classes


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
