"""Every event there is, by its CloudEvents type."""

from contracts.base import Event, Fact, Request
from contracts.events import capacity, checkpoint, dataset, model, node, request, run, study, train


def _concrete(cls: type[Event]) -> list[type[Event]]:
    own = [cls] if "type" in cls.__dict__ else []
    return own + [found for sub in cls.__subclasses__() for found in _concrete(sub)]


BY_TYPE: dict[str, type[Event]] = {cls.type: cls for cls in _concrete(Event)}
#: The same by their types without the version: "trainbus.run.placed".
BY_NAME: dict[str, type[Event]] = {name.rpartition(".")[0]: cls for name, cls in BY_TYPE.items()}
REQUESTS: tuple[type[Request], ...] = tuple(c for c in BY_TYPE.values() if issubclass(c, Request))
FACTS: tuple[type[Fact], ...] = tuple(c for c in BY_TYPE.values() if issubclass(c, Fact))

__all__ = [
    "BY_NAME",
    "BY_TYPE",
    "FACTS",
    "REQUESTS",
    "capacity",
    "checkpoint",
    "dataset",
    "model",
    "node",
    "request",
    "run",
    "study",
    "train",
]
