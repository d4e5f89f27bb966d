"""``trainbus dead-letters``: list, show, retry and drop messages that could not be handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainbus.commands import render
from trainbus.commands.options import Json, command

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer(
    no_args_is_help=True,
    help="Messages that a service could not handle: list, show, retry and drop them.",
)
Sequences = Annotated[list[int], typer.Argument(help="Numbers of dead letters, as `ls` lists them.")]
Confirmation = Annotated[bool, typer.Option("--yes", help="Delete without asking.")]
Consumer = Annotated[str | None, typer.Option("--consumer", help="Only the dead letters of this consumer.")]


@command(app)
async def ls(client: AsyncClient, consumer: Consumer = None, as_json: Json = False) -> None:
    """List dead letters with their reasons, oldest first."""
    from trainbus.client import dead_letters

    letters = await dead_letters.list_dead_letters(client.connection, consumer)
    if as_json:
        print(render.as_json(list(map(dead_letters.to_plain, letters))))
        return
    if not letters:
        print("there are no dead letters")
        return
    table = render.table("number", "age", "consumer", "subject", "reason", right=("number", "age"))
    for letter in letters:
        age = render.ago(letter.at, render.utc_now())
        subject, reason = render.escape(letter.message.subject), render.escape(letter.reason)
        table.add_row(str(letter.sequence), age, letter.consumer, subject, reason)
    render.console().print(table)


@command(app)
async def show(
    client: AsyncClient,
    sequence: Annotated[int, typer.Argument(help="Number of a dead letter.")],
    as_json: Json = False,
) -> None:
    """Show one dead letter: its reason, its headers and its body."""
    from trainbus.client import dead_letters

    plain = dead_letters.to_plain(await dead_letters.get_dead_letter(client.connection, sequence))
    if as_json:
        print(render.as_json(plain))
        return
    headers, body = plain.pop("headers"), plain.pop("body")
    for name, value in plain.items():
        print(f"{name:16}{render.visible(str(value))}")
    for name, value in headers.items():
        print(render.visible(f"{name}: {value}"))
    print(render.visible(body))


@command(app)
async def retry(client: AsyncClient, sequences: Sequences) -> None:
    """Have its own consumer handle each dead letter once more; exit 1 at the first that fails again."""
    from trainbus.client import dead_letters

    for sequence in sequences:
        await dead_letters.retry_dead_letter(client.connection, sequence)
        print(f"{sequence}: handled")


@command(app)
async def drop(client: AsyncClient, sequences: Sequences, yes: Confirmation = False) -> None:
    """Delete dead letters for good."""
    from trainbus.client import dead_letters

    if not yes:
        typer.confirm(f"Delete {len(sequences)} dead letters for good?", abort=True)
    for sequence in sequences:
        await dead_letters.drop_dead_letter(client.connection, sequence)
        print(f"{sequence}: dropped")
