"""Which modules FSDP2 shards one at a time: each is gathered for its own passes, and the rest with the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from trainbus.task import Task, TaskError

#: Containers that nothing calls, so that no call of them could gather weights.
UNCALLED = (nn.ModuleList, nn.ModuleDict)


def find_fsdp_units(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the units that the task names, or else the model's repeated blocks; inner units before outer ones.

    Raises:
        TaskError: the task names something that is no module of the model, or that shares a weight with another unit.
    """
    named = task.fsdp_units(model)
    found = list(_repeated_blocks(model) if named is None else named)
    known = list(model.modules())
    foreign = [type(unit).__name__ for unit in found if not any(unit is module for module in known)]
    if foreign:
        raise TaskError(f"{type(task).__name__}.fsdp_units() names {foreign[0]}, which is no module of the model")
    shared = _find_shared(model, found)
    if shared and named is not None:
        name = next(name for name, module in model.named_modules() if module in shared)
        raise TaskError(
            f"{type(task).__name__}.fsdp_units(): {name!r} shares a weight with what is outside of it: "
            "name a module that holds both, or leave it out"
        )
    units = {
        unit for unit in found if unit is not model and unit not in shared and any(True for _ in unit.parameters())
    }
    return [module for module in reversed(known) if module in units]


def _repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of the outermost containers; a block that a container repeats with its weights is not one."""
    children = [child for child in model._modules.values() if child is not None]
    repeated = _find_repeated(model, children)
    times = Counter(map(id, children))
    for child in model.children():
        if id(child) not in repeated or isinstance(child, UNCALLED):
            yield from _repeated_blocks(child)
        elif times[id(child)] == 1:
            yield child


def _find_repeated(module: nn.Module, children: Sequence[nn.Module]) -> set[int]:
    """Return the ids of what a container repeats: everything in a list, else what has parts and a class in common."""
    if isinstance(module, nn.ModuleList):
        return set(map(id, children))
    if not isinstance(module, (nn.ModuleDict, nn.Sequential)):
        return set()
    composite = [child for child in children if next(child.children(), None) is not None]
    classes = Counter(map(type, composite))
    return {id(child) for child in composite if classes[type(child)] > 1}


def _find_shared(model: nn.Module, units: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the units that have a weight in common with another unit or with the rest of the model."""
    chosen = set(units)
    holders: dict[int, set[nn.Module]] = {}

    def visit(module: nn.Module, unit: nn.Module) -> None:
        unit = module if module in chosen else unit
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, model)
    return {unit for found in holders.values() if len(found) > 1 for unit in found if unit is not model}
