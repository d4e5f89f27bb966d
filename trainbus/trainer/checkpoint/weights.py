"""Puts the weights of a checkpoint into a model: all of them as they are, or those to begin another training with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from trainbus.trainer.checkpoint.files import check_safe
from trainbus.trainer.checkpoint.reader import load_tensors
from trainbus.trainer.optimizer_state import StateMismatch

#: How many tensors the error names.
MAX_LISTED = 10


def load_model(folder: Path, model: nn.Module, *, averaged: bool = False) -> None:
    """Put the checkpoint's weights and buffers into ``model``; ``averaged``: the moving average's where it has one.

    Raises:
        StateMismatch: a tensor is missing, unknown, or of another shape or type; the text names it.
    """
    check_safe(folder)
    put_model(load_tensors(folder, "model"), model)
    if averaged:
        _load_averages(folder, model)


def put_model(saved: dict[str, Tensor], model: nn.Module) -> None:
    """Copy whole tensors into a model that has exactly these; see ``load_model``."""
    wanted = model.state_dict()
    for name, present in wanted.items():
        if name not in saved:
            raise StateMismatch(f"the model has {name!r}, which the checkpoint lacks: was the task changed?")
        tensor = saved[name]
        if tensor.shape != present.shape or tensor.dtype != present.dtype:
            raise StateMismatch(
                f"{name!r} is {tuple(tensor.shape)} {tensor.dtype} in the checkpoint but "
                f"{tuple(present.shape)} {present.dtype} in the model: do the params differ?"
            )
    for name in saved:
        if name not in wanted:
            raise StateMismatch(f"the checkpoint has {name!r}, which the model lacks: was the task changed?")
    with torch.no_grad():
        model.load_state_dict(saved)


def load_initial_weights(folder: Path, model: nn.Module, exclude: Sequence[str] = ()) -> None:
    """Put the checkpoint's weights and buffers into ``model``, the moving average's where it has one.

    What ``exclude`` names (``head.*``) stays as the model has it, wherever it is. All else must be in both, in one
    shape; floating-point values are converted to the model's type.

    Raises:
        StateMismatch: the text names each tensor that does not fit, and what to exclude.
    """
    check_safe(folder)
    saved = load_tensors(folder, "model")
    wanted = model.state_dict()
    _check_patterns(exclude, [*wanted, *saved])
    present = _without(wanted, exclude)
    found = _without(saved, exclude)
    if problems := _problems(found, present):
        raise StateMismatch(_explain(problems, [*wanted, *saved], exclude))
    with torch.no_grad():
        model.load_state_dict(wanted | found)
    _load_averages(folder, model, exclude)


def _load_averages(folder: Path, model: nn.Module, exclude: Sequence[str] = ()) -> None:
    averages = _without(load_tensors(folder, "ema"), exclude)
    with torch.no_grad():
        # By parameter, since a tied one has more names in the model's state than it has averages.
        for name, parameter in model.named_parameters():
            if name in averages:
                parameter.copy_(averages[name])


def _without(tensors: Mapping[str, Tensor], exclude: Sequence[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not _matches(name, exclude)}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(exclude: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that matches nothing (it is misspelt), and patterns that match everything."""
    modules = ", ".join(sorted({f"{name.partition('.')[0]}.*" if "." in name else name for name in names})[:MAX_LISTED])
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise StateMismatch(
                f"init_exclude {pattern!r} matches no tensor of the checkpoint or of the model: there are {modules}"
            )
    if all(_matches(name, exclude) for name in names):
        raise StateMismatch("init_exclude leaves nothing of the checkpoint: leave init_from out, or exclude less")


def _problems(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what does not fit, by name."""
    found = {}
    for name, present in wanted.items():
        if name not in saved:
            found[name] = f"{name!r} {_like(present)} is in the model alone"
            continue
        tensor = saved[name]
        convertible = tensor.is_floating_point() and present.is_floating_point()
        if tensor.shape != present.shape or (tensor.dtype != present.dtype and not convertible):
            found[name] = f"{name!r} is {_like(tensor)} in the checkpoint, {_like(present)} in the model"
    for name, tensor in saved.items():
        if name not in wanted:
            found[name] = f"{name!r} {_like(tensor)} is in the checkpoint alone"
    return found


def _like(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _explain(problems: Mapping[str, str], names: Sequence[str], exclude: Sequence[str]) -> str:
    listed = "; ".join(list(problems.values())[:MAX_LISTED])
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    patterns = [*exclude, *_suggest_patterns(problems, names)]
    suggestion = ", ".join(f'"{pattern}"' for pattern in patterns[:MAX_LISTED])
    suggestion += ", ..." if len(patterns) > MAX_LISTED else ""
    return (
        f"init_from does not fit the model: {listed}{more}. If these are to keep the model's own values, "
        f"set init_exclude to [{suggestion}]; otherwise build the model as it was built for the checkpoint (params)"
    )


def _suggest_patterns(problems: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return patterns that match only what does not fit: whole modules where none of their tensors fits."""
    fitting = {module for name in names if name not in problems for module in _modules(name)}
    found: dict[str, None] = {}
    for problem in problems:
        whole = next((module for module in _modules(problem) if module not in fitting), None)
        found[problem if whole is None else f"{whole}.*"] = None
    return list(found)


def _modules(name: str) -> list[str]:
    """Return the modules that a tensor is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]
