"""The reference of the commands: each with its arguments, options and help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from docs.site.markdown import code, prose, table, type_text
from trainbus.commands.main import app

NAME = "trainbus"


def commands() -> str:
    """Return the page of every command."""
    root = typer.main.get_command(app)
    return "\n".join(["# Commands\n", prose(root.help or ""), "", *_sections(NAME, root)])


def _sections(path: str, command: Any) -> Iterator[str]:
    """Yield a section for each command, a group before those that it has."""
    for name, child in getattr(command, "commands", {}).items():
        if child.hidden:
            continue
        called = f"{path} {name}"
        yield f"## {called}\n\n{prose(child.help or '')}\n\n{_usage(called, child)}\n{_parameters(child)}"
        yield from _sections(called, child)


def _usage(called: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    named = [_name(each) if each.required else f"[{_name(each)}]" for each in arguments]
    repeated = [f"{name}..." if each.nargs == -1 else name for name, each in zip(named, arguments, strict=True)]
    rest = ["COMMAND"] if hasattr(command, "commands") else repeated
    return f"```text\n{' '.join([called, '[OPTIONS]', *rest])}\n```\n"


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _parameters(command: Any) -> str:
    rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
    return table(("argument or option", "value", "default", ""), rows) if rows else ""


def _row(parameter: Any) -> tuple[str, str, str, str]:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [_name(parameter)]
    annotation = parameter.type_descriptor.annotation
    is_flag = annotation is bool
    default = parameter.default
    if parameter.required:
        shown = "required"
    elif is_flag or callable(default) or default in (None, (), []):
        shown = ""
    else:
        shown = code(str(getattr(default, "value", default)))
    kind = "flag" if is_flag else code(type_text(annotation))
    return ", ".join(code(name) for name in names), kind, shown, prose(parameter.help or "")
