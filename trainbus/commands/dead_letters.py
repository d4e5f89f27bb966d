"""``trainbus dead-letters``: list, show, retry and drop messages that could not be handled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from contracts.formats import plural
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import Json, command

if TYPE_CHECKING:
    from trainbus.operate.connection import Connection

app = typer.Typer(
    name="dead-letters",
    no_args_is_help=True,
    help="Messages that a service could not handle: list, show, retry and drop them.",
)
Sequences = Annotated[list[int] | None, typer.Argument(help="Numbers of dead letters, as `ls` lists them.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter, or with --consumer every one of that consumer.")]
Confirmation = Annotated[bool, typer.Option("--yes", help="Delete without asking.")]
Consumer = Annotated[str | None, typer.Option("--consumer", help="Only the dead letters of this consumer.")]


@command(app, on_bus=True)
async def ls(bus: Connection, consumer: Consumer = None, as_json: Json = False) -> None:
    """List dead letters with their reasons, oldest first."""
    from trainbus.operate import dead_letters

    letters = await dead_letters.list_dead_letters(bus, consumer)
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


@command(app, on_bus=True)
async def show(
    bus: Connection,
    sequence: Annotated[int, typer.Argument(help="Number of a dead letter.")],
    as_json: Json = False,
) -> None:
    """Show one dead letter: its reason, its headers and its body."""
    from trainbus.operate import dead_letters

    plain = dead_letters.to_plain(await dead_letters.get_dead_letter(bus, sequence))
    if as_json:
        print(render.as_json(plain))
        return
    headers, body = plain.pop("headers"), plain.pop("body")
    for name, value in plain.items():
        print(f"{name:16}{render.visible(str(value))}")
    for name, value in headers.items():
        print(render.visible(f"{name}: {value}"))
    print(render.visible(body))


@command(app, on_bus=True)
async def retry(bus: Connection, sequences: Sequences = None, every: All = False, consumer: Consumer = None) -> None:
    """Have its own consumer handle each dead letter once more; exit 1 if one fails again."""
    from trainbus.operate import dead_letters

    kept: list[str] = []
    for sequence in await _choose(bus, sequences, consumer, every=every):
        try:
            await dead_letters.retry_dead_letter(bus, sequence)
            print(f"{sequence}: handled")
        except TrainbusError as error:
            kept.append(str(error))
    if kept:
        raise TrainbusError("\n".join(kept))


@command(app, on_bus=True)
async def drop(
    bus: Connection,
    sequences: Sequences = None,
    yes: Confirmation = False,
    every: All = False,
    consumer: Consumer = None,
) -> None:
    """Delete dead letters for good."""
    from trainbus.operate import dead_letters

    chosen = await _choose(bus, sequences, consumer, every=every)
    if not yes:
        typer.confirm(f"Delete {plural(len(chosen), 'dead letter')} for good?", abort=True)
    for sequence in chosen:
        await dead_letters.drop_dead_letter(bus, sequence)
        print(f"{sequence}: dropped")


async def _choose(bus: Connection, sequences: list[int] | None, consumer: str | None, *, every: bool) -> list[int]:
    """Return the numbers that were given, or those of all dead letters, the oldest first."""
    from trainbus.operate import dead_letters

    if bool(sequences) == every or (consumer is not None and not every):
        raise UsageError("give the numbers of dead letters, or --all, which --consumer narrows")
    if sequences:
        return sequences
    return [letter.sequence for letter in await dead_letters.list_dead_letters(bus, consumer)]
