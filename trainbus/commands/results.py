"""Commands on what runs came to: fetch a result, go on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.options import Json, Run, command, parse_param

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


@command(app, rich_help_panel=PANEL)
async def resume(
    client: AsyncClient,
    name: Run,
    start: Annotated[str, typer.Option("--from", help="The checkpoint to go on from: best, last or a step.")] = "last",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs in all, those of the run included.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps in all, those of the run included.")] = None,
    param: Annotated[list[str] | None, typer.Option(help="key=value to change; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Go on from a run's checkpoint in a new run: for longer, or with other params."""
    params = dict(map(parse_param, param or ()))
    resumed = await client.resume(name, start=start, epochs=epochs, max_steps=max_steps, params=params)
    if as_json:
        print(render.as_json(resumed))
    else:
        print(f"{resumed.run_id}  {resumed.name}: from step {resumed.step} of {resumed.parent_run_id}")
        print(f"{resumed.note}")
        print(f"{resumed.answer or 'requested; the scheduler has not answered yet'}")
    if resumed.answer and resumed.answer.startswith("rejected"):
        raise TrainbusError(f"the request was {resumed.answer}")
