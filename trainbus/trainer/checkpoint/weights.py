"""Finds what the weights of a model are loaded from: all of a checkpoint's, or those to begin another training with.

Everything is checked against the model, whose tensors may be on meta, before the first byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from trainbus.trainer.checkpoint.files import check_safe
from trainbus.trainer.checkpoint.reader import open_tensors
from trainbus.trainer.checkpoint.tensor_file import RequireRange
from trainbus.trainer.optimizer_state import AnyTensor, StateMismatch, parameter_names
from trainbus.trainer.readable_tensor import ReadableTensor

#: What tensors of a model are loaded from, by their names in ``model.state_dict()``, in its order.
Weights = dict[str, ReadableTensor]
#: Returns these for a model. Tensors without a name keep their initial values.
WeightSource = Callable[[nn.Module], Weights]

#: How many tensors the error names.
MAX_LISTED = 10
#: Read before they are copied into the model: all of a small one at once.
BATCH_BYTES = 16 * 2**20


def load_model(folder: Path, model: nn.Module, *, averaged: bool = False) -> None:
    """Load the checkpoint's weights into ``model``; see ``find_weights``."""
    load_weights(find_weights(folder, model, averaged=averaged), model)


def find_weights(
    folder: Path, model: nn.Module, *, averaged: bool = False, require: RequireRange | None = None
) -> Weights:
    """Find the checkpoint's weights and buffers for ``model``.

    Args:
        averaged: the moving average's where it has one.
        require: see ``open_tensor_file``.

    Raises:
        StateMismatch: a tensor is missing, unknown, or of another shape or type; the text names it.
    """
    check_safe(folder)
    weights = match_weights(open_tensors(folder, "model", require), model)
    return weights | _find_averages(folder, model, require=require) if averaged else weights


def match_weights(saved: Mapping[str, ReadableTensor], model: nn.Module) -> Weights:
    """Return whole saved tensors for a model that has exactly these; see ``find_weights``."""
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
    return {name: saved[name] for name in wanted}


def find_initial_weights(folder: Path, model: nn.Module, exclude: Sequence[str] = ()) -> Weights:
    """Find the checkpoint's weights and buffers for ``model``, the moving average's where it has one.

    What ``exclude`` names (``head.*``) stays as the model has it, wherever it is. All else must be in both, in one
    shape; floating-point values are converted to the model's type.

    Raises:
        StateMismatch: the text names each tensor that does not fit, and what to exclude.
    """
    check_safe(folder)
    saved = open_tensors(folder, "model")
    wanted = model.state_dict()
    _check_patterns(exclude, [*wanted, *saved])
    present = _without(wanted, exclude)
    found = _without(saved, exclude)
    if problems := _problems(found, present):
        raise StateMismatch(_explain(problems, [*wanted, *saved], exclude))
    return {name: found[name] for name in present} | _find_averages(folder, model, exclude)


def load_weights(weights: Weights, model: nn.Module) -> None:
    """Copy weights into a model whose parameters are whole, with memory for few of them at a time."""
    batch: dict[str, Tensor] = {}
    size_bytes = 0
    with torch.no_grad():
        for name, saved in weights.items():
            batch[name] = saved.read()
            size_bytes += batch[name].nbytes
            if size_bytes >= BATCH_BYTES:
                model.load_state_dict(batch, strict=False)
                batch, size_bytes = {}, 0
        model.load_state_dict(batch, strict=False)


def load_except(weights: Weights, model: nn.Module, is_left_out: Callable[[Tensor], bool]) -> dict[int, ReadableTensor]:
    """Load the tensors of ``model`` that are not left out; return what the others are loaded from, by their ids.

    By their ids, as a tied one has more than one name.
    """
    present = model.state_dict(keep_vars=True)
    left_out = {name: saved for name, saved in weights.items() if is_left_out(present[name])}
    load_weights({name: saved for name, saved in weights.items() if name not in left_out}, model)
    return {id(present[name]): saved for name, saved in left_out.items()}


def _find_averages(
    folder: Path, model: nn.Module, exclude: Sequence[str] = (), require: RequireRange | None = None
) -> Weights:
    averages = _without(open_tensors(folder, "ema", require), exclude)
    # A tied weight has more names in the model's state than it has averages.
    names = parameter_names(model)
    tied = {name: names[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: averages[first] for name, first in tied.items() if first in averages}


def _without(tensors: Mapping[str, AnyTensor], exclude: Sequence[str]) -> dict[str, AnyTensor]:
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


def _problems(saved: Mapping[str, ReadableTensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what does not fit, by name."""
    found = {}
    for name, present in wanted.items():
        if name not in saved:
            found[name] = f"{name!r} {_like(present)} is in the model alone"
            continue
        tensor = saved[name]
        convertible = tensor.dtype.is_floating_point and present.dtype.is_floating_point
        if tensor.shape != present.shape or (tensor.dtype != present.dtype and not convertible):
            found[name] = f"{name!r} is {_like(tensor)} in the checkpoint, {_like(present)} in the model"
    for name, tensor in saved.items():
        if name not in wanted:
            found[name] = f"{name!r} {_like(tensor)} is in the checkpoint alone"
    return found


def _like(tensor: Tensor | ReadableTensor) -> str:
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
