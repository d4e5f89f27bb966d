"""Which modules FSDP2 shards one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from trainbus.task import Task, TaskError
from trainbus.trainer.strategies.fsdp_units import find_fsdp_units


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(2, 2), nn.ModuleList([block(), block()]))
    model[1][0][0].weight = model[0].weight  # type: ignore[index]
    return model


def repeated() -> nn.Module:
    once = block()
    return nn.ModuleList([once, once, block()])


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "h": nn.ModuleList([block(), block()])}), ["h.0", "h.1"]),
    "lists in a list": (lambda: nn.ModuleList([nn.ModuleList([block()]), nn.ModuleList([block()])]), ["0.0", "1.0"]),
    "dict": (lambda: nn.ModuleDict({"0": block(), "1": block(), "head": nn.Linear(2, 2)}), ["0", "1"]),
    "sequence of blocks": (lambda: nn.Sequential(nn.Linear(2, 2), block(), block()), ["1", "2"]),
    "sequence in a sequence": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(block(), block())), ["1.0", "1.1"]),
    "layers": (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),
    "weight shared with the root": (tied, ["1.1"]),
    "one block twice": (repeated, ["2"]),
    "without weights": (lambda: nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)]), ["1"]),
}


def names(task: Task, model: nn.Module) -> list[str]:
    units = find_fsdp_units(task, model)
    return [name for name, module in model.named_modules() if module in units]


@pytest.mark.parametrize("kind", MODELS)
def test_repeated_blocks_are_units(kind: str) -> None:
    make, expected = MODELS[kind]
    assert names(Task(), make()) == expected


class Named(Task):
    def fsdp_units(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))]


def test_a_task_names_its_units() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert names(Named(), model) == ["0", "1.0"]
    assert find_fsdp_units(Named(), model) == [model[1][0], model[0]]  # type: ignore[index]
    with pytest.raises(TaskError, match="'0' shares a weight"):
        find_fsdp_units(Named(), tied())

    class Foreign(Task):
        def fsdp_units(self, model: nn.Module) -> list[nn.Module]:
            return [nn.Linear(2, 2)]

    with pytest.raises(TaskError, match="Linear, which is no module of the model"):
        find_fsdp_units(Foreign(), model)
