"""Commands from a run to a model: fetch its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.commands import render
from trainbus.commands.options import Json, command

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer()
PANEL = "Runs"


@command(app, rich_help_panel=PANEL)
async def fetch(
    client: AsyncClient,
    target: Annotated[
        str, typer.Argument(help="RUN (its best checkpoint, else its last), RUN@STEP, or models:/NAME@champion.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="Where to put the files; a new or empty folder. Default: named for the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a run's model and artifacts as plain files, and print how to load them."""
    fetched = await client.fetch_model(target, folder)
    commit = None if fetched.stored is None else fetched.stored.commit
    if as_json:
        found = {
            "run_id": fetched.run_id,
            "folder": str(fetched.folder),
            "step": commit and commit.checkpoint.step,
            "epoch": commit and commit.checkpoint.epoch,
            "metrics": commit.metrics if commit else {},
            "mark": fetched.mark,
            "files": [str(path.relative_to(fetched.folder)) for path in fetched.paths],
            "lines": fetched.lines,
        }
        print(render.as_json(found))
        return
    what = "artifacts"
    if commit is not None:
        mark = f"{fetched.mark} checkpoint" if fetched.mark else "checkpoint"
        metrics = f" ({render.numbers(commit.metrics)})" if commit.metrics else ""
        what = f"{mark}, step {commit.checkpoint.step}{metrics}"
    size = render.size(fetched.size_bytes)
    render.console().print(f"{fetched.run_id}: {what}", soft_wrap=True)
    print(f"{len(fetched.paths)} files, {size}, verified: {fetched.folder}\n\n  " + "\n  ".join(fetched.lines))
