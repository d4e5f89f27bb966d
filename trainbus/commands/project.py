"""``trainbus init`` and ``trainbus task``: the stub of a project, and all that its Task may define."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from trainbus.client.errors import NotFoundError
from trainbus.commands import render

app = typer.Typer()
PANEL = "Runs"
INDENT = " " * 4
TEXT_WIDTH = 100


@app.command(rich_help_panel=PANEL)
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to write into; it is made if it is not there.")] = Path(),
    kind: Annotated[
        str, typer.Option("--kind", help="classification (images), regression (tables), text, or script.")
    ] = "classification",
) -> None:
    """Write the stub of a project: a Task or script that trains as it is, to be changed; no file is overwritten."""
    from trainbus.client.project_stub import write_stub

    stub = write_stub(folder, kind)
    for name in stub.files:
        print(f"wrote {render.visible(str(folder / name))}")
    print(f"\nChange {stub.kind.change.replace('`', '')}. Then, with `trainbus up -d` running:\n")
    print(f"{INDENT}{render.visible(stub.submit)}\n")
    print(f"DATA is {stub.kind.data}. `trainbus task` lists all that a Task may define.")


@app.command(rich_help_panel=PANEL)
def task(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A method or attribute; default: all.")] = None,
) -> None:
    """List all that a Task may define, or explain one of them with an example."""
    from trainbus.client.task_reference import read_task_members

    members = read_task_members()
    if name is None:
        for each in members:
            print(each.signature)
            print(textwrap.indent(each.summary, INDENT))
        print("\n`trainbus task NAME` explains one, with an example. `trainbus init` writes a Task to begin with.")
        return
    found = {each.name: each for each in members}.get(name.removesuffix("()"))
    if found is None:
        raise NotFoundError(f"a Task has no {name!r}; it may define {', '.join(each.name for each in members)}")
    texts = [textwrap.fill(each, TEXT_WIDTH) for each in (found.summary, *found.details.split("\n\n")) if each]
    print("\n\n".join([found.signature, *texts, textwrap.indent(found.example, INDENT)]))
