"""Every command and every flag of the command line is the one that is recorded in ``commands.txt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trainbus.client.client import AsyncClient, Client
from trainbus.commands.main import app

RECORD = Path(__file__).with_name("commands.txt")


def list_commands(group: Any, path: str = "") -> Iterator[str]:
    """Yield one line for each command: its flags, and its arguments in capitals."""
    for name, command in sorted(group.commands.items()):
        options = [" ".join([*each.opts, *each.secondary_opts]) for each in command.params if each.opts[0][:1] == "-"]
        arguments = [each.name.upper() for each in command.params if each.opts[0][:1] != "-"]
        yield " ".join([f"{path}{name}:", *arguments, *sorted(options)])
        yield from list_commands(command, f"{path}{name} ") if hasattr(command, "commands") else ()


def test_commands_and_flags_are_those_of_the_record() -> None:
    assert "\n".join(list_commands(typer.main.get_command(app))) == RECORD.read_text().strip()


@pytest.mark.parametrize("name", [name for name in vars(AsyncClient) if not name.startswith("_")])
def test_the_sync_client_has_every_method_of_the_async_one(name: str) -> None:
    if name != "connection":
        assert getattr(Client, name).__doc__
