"""``trainbus dead-letters``: list, show, retry and drop messages that could not be handled."""

from __future__ import annotations

from typing import Annotated

import typer

from trainbus.commands.options import DataDir, Json, with_client

app = typer.Typer(
    no_args_is_help=True,
    help="Messages that a service could not handle: list, show, retry and drop them.",
)
Sequences = Annotated[list[int], typer.Argument(help="Numbers of dead letters, as `ls` lists them.")]
Consumer = Annotated[str | None, typer.Option("--consumer", help="Only the dead letters of this consumer.")]


@app.command()
def ls(consumer: Consumer = None, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List dead letters with their reasons, oldest first."""
    from trainbus.commands.dead_letters.tables import print_dead_letters

    with_client(data_dir, lambda client: print_dead_letters(client, consumer, as_json=as_json))


@app.command()
def show(
    sequence: Annotated[int, typer.Argument(help="Number of a dead letter.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter: its reason, its headers and its body."""
    from trainbus.commands.dead_letters.tables import print_dead_letter

    with_client(data_dir, lambda client: print_dead_letter(client, sequence, as_json=as_json))


@app.command()
def retry(sequences: Sequences, data_dir: DataDir = None) -> None:
    """Have its own consumer handle each dead letter once more; exit 1 at the first that fails again."""
    from trainbus.commands.dead_letters.change import retry_dead_letters

    with_client(data_dir, lambda client: retry_dead_letters(client, sequences))


@app.command()
def drop(
    sequences: Sequences,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Delete dead letters for good."""
    from trainbus.commands.dead_letters.change import drop_dead_letters

    if not yes:
        typer.confirm(f"Delete {len(sequences)} dead letters for good?", abort=True)
    with_client(data_dir, lambda client: drop_dead_letters(client, sequences))
