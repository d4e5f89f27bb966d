"""Optimizer state by parameter name: tensors for safetensors, the rest for JSON.

Keyed by name instead of by position, so that it is readable without the code and fits every
strategy and world size that loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainbus.trainer.readable_tensor import ReadableTensor

#: A live tensor, or one of a saved state.
AnyTensor = TypeVar("AnyTensor", bound=Tensor | ReadableTensor)


class StateMismatch(Exception):
    """A checkpoint does not fit the model or the optimizer; the text names the tensor."""


@dataclass(slots=True)
class OptimizerState(Generic[AnyTensor]):
    #: ``<parameter>/<key>`` -> tensor, for example ``conv.weight/exp_avg``.
    tensors: dict[str, AnyTensor] = field(default_factory=dict)
    #: What is no tensor, by parameter and key.
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Hyperparameters of each group, with the names of its parameters under ``params``.
    groups: list[dict[str, Any]] = field(default_factory=list)


def parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def group_names(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Return the names of each group's trained parameters; frozen ones have no state."""
    names = parameter_names(model)
    return [
        [names[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
        for group in optimizer.param_groups
    ]


def pack_groups(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return each group's hyperparameters, plain, beside the names of its parameters."""
    packed = []
    for group, members in zip(groups, names, strict=True):
        hyper = {key: plain(value) for key, value in group.items() if key != "params"}
        packed.append({**hyper, "params": list(members)})
    return packed


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: a scalar tensor becomes a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def pack(optimizer: Optimizer, model: nn.Module) -> OptimizerState[Tensor]:
    """Return the optimizer's live state by name, not copied."""
    names = parameter_names(model)
    groups = pack_groups(optimizer.param_groups, group_names(optimizer, model))
    state: OptimizerState[Tensor] = OptimizerState(groups=groups)
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in values.items():
            if isinstance(value, Tensor):
                state.tensors[f"{name}/{key}"] = value.detach()
            else:
                state.values.setdefault(name, {})[key] = value
    return state


def check_groups(state: OptimizerState[Any], names: Sequence[Sequence[str]]) -> None:
    """Raise ``StateMismatch`` unless the checkpoint's groups hold the same parameters.

    Older checkpoints also list frozen parameters, which have no state.
    """
    stateful = {name_and_key.rpartition("/")[0] for name_and_key in state.tensors} | state.values.keys()
    if len(state.groups) != len(names):
        raise StateMismatch(f"the checkpoint has {len(state.groups)} parameter groups, the optimizer {len(names)}")
    for index, (group, members) in enumerate(zip(state.groups, names, strict=True)):
        differ = (set(group["params"]) & (stateful | set(members))) ^ set(members)
        if differ:
            raise StateMismatch(f"parameter group {index} differs at {sorted(differ)[0]!r}")


def restore_groups(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Put saved hyperparameters into the optimizer's groups, in place, since a schedule holds on to them."""
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            if key == "params":
                continue
            present = group.get(key)
            if isinstance(present, Tensor):
                present.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(present, tuple) else value


def read_whole(saved: ReadableTensor, parameter: Tensor) -> Tensor:
    """Return a saved tensor of the parameter's state on the parameter's device."""
    # Adam keeps its step count on the host unless it is fused or capturable; it moves it there itself if so.
    return saved.read().to(parameter.device if saved.shape else torch.device("cpu"))


def unpack(
    state: OptimizerState[ReadableTensor],
    optimizer: Optimizer,
    model: nn.Module,
    read: Callable[[ReadableTensor, Tensor], Tensor] = read_whole,
) -> None:
    """Put a saved state into a fresh optimizer over the same parameters.

    Args:
        read: returns what this rank holds of a saved tensor of a parameter's state.
    """
    check_groups(state, group_names(optimizer, model))
    by_name = dict(model.named_parameters())
    for name_and_key, saved in state.tensors.items():
        shape = by_name[name_and_key.rpartition("/")[0]].shape
        if saved.shape and saved.shape != shape and saved.shape.numel() == shape.numel():
            raise StateMismatch(f"optimizer state {name_and_key!r} has shape {tuple(saved.shape)}")
    for name_and_key, saved in state.tensors.items():
        name, _, key = name_and_key.rpartition("/")
        optimizer.state[by_name[name]][key] = read(saved, by_name[name])
    for name, values in state.values.items():
        optimizer.state[by_name[name]].update(values)
    restore_groups(optimizer.param_groups, state.groups)
