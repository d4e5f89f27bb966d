"""What each section of the table needs: its rows, and the sizes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Row(NamedTuple):
    """A line of the table. ``ok``: whether the target is met; None without a target."""

    figure: str
    measured: str
    target: str = ""
    ok: bool | None = None


KILLED, PREEMPTED, FROM_TWO, TO_TWO = DISTURBANCES = (
    "killed",
    "preempted",
    "re-sliced from 2 ranks on one GPU",
    "re-sliced to 2 ranks on one GPU",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each section does: on a GPU in ten minutes, in miniature in one."""

    is_mini: bool
    #: Steps of a run that is disturbed, and its precisions by task.
    steps: int
    precisions: dict[str, tuple[str, ...]]
    #: How the runs of each task are disturbed.
    disturbances: dict[str, tuple[str, ...]]
    #: Width and layers of the models whose step is timed, the tokens of a sequence, sequences a step, steps.
    models: tuple[tuple[int, int], ...]
    context: int
    batch: int
    timed_steps: int
    #: Of the state whose checkpoints are timed.
    state_megabytes: int
    checkpoints: int


MINI = Sizes(
    is_mini=True,
    steps=40,
    precisions={"CNN": ("fp32",), "GPT": ("bf16",), "LoRA": ("fp32",)},
    # Each disturbance once, where a minute has to do.
    disturbances={"CNN": (KILLED, FROM_TWO), "GPT": (PREEMPTED, TO_TWO), "LoRA": (KILLED,)},
    models=((64, 2),),
    context=32,
    batch=2,
    timed_steps=5,
    state_megabytes=12,
    checkpoints=2,
)
FULL = Sizes(
    is_mini=False,
    steps=400,
    precisions=dict.fromkeys(("CNN", "GPT", "LoRA"), ("fp32", "bf16")),
    disturbances=dict.fromkeys(("CNN", "GPT", "LoRA"), DISTURBANCES),
    models=((768, 12), (2048, 24)),
    context=1024,
    batch=4,
    timed_steps=20,
    state_megabytes=1500,
    checkpoints=8,
)


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the device has done the work."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
