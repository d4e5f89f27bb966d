"""Which module defines which command: it is imported when the command is called, all of them only to list them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

#: The modules of this folder with an ``app``, each with its commands in the order of the help.
COMMANDS_BY_MODULE = {
    "stack": ("up", "stacks", "down", "service", "demo", "doctor", "ui"),
    "project": ("init", "task"),
    "runs": ("submit", "attach", "wait", "ps", "show", "why", "logs", "events", "cancel", "reproduce"),
    "results": ("fetch", "resume", "compare"),
    "report": ("report",),
    "trace": ("trace",),
    "lake": ("put", "ls"),
    "cluster": ("nodes", "simulate", "drain", "undrain"),
    "tune": ("tune",),
    "checkpoints": ("checkpoints",),
    "datasets": ("datasets",),
    "models": ("models",),
    "scheduler": ("scheduler",),
    "policy": ("policy",),
    "dead_letters": ("dead-letters",),
    "replay": ("replay",),
}
#: The part of the help in which a group of commands stands; a command names its own.
PANELS = {
    "tune": "Runs",
    "checkpoints": "Runs",
    "datasets": "Data",
    "models": "Runs",
    "scheduler": "Cluster",
    "policy": "Cluster",
    "dead_letters": "Cluster",
    "replay": "Cluster",
}


def load_commands(module: str) -> dict[str, Any]:
    """Import a module of this folder and return its commands by their names."""
    holder = typer.Typer()
    holder.add_typer(import_module(f"trainbus.commands.{module}").app, rich_help_panel=PANELS.get(module))
    return dict(typer.main.get_group(holder).commands)


class Catalogue(MutableMapping[str, Any]):
    """All commands by their names, in the order of the help; one is imported when it is looked up."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in COMMANDS_BY_MODULE.items() for name in names}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded |= load_commands(self._modules[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        self._loaded.pop(name, None)
        del self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class CatalogueGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Catalogue()
