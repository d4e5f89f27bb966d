"""Options and arguments that several commands share, and the bridge from a command to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from trainbus.client.errors import UsageError

if TYPE_CHECKING:
    from trainbus.client.address import StackAddress
    from trainbus.client.client import AsyncClient

T = TypeVar("T")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's id, the unique start of one, or its name.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="RUN (its newest checkpoint), RUN@STEP, models:/NAME@champion, or the s3:// address of a manifest."
    ),
]
Dataset = Annotated[
    str, typer.Argument(help="A dataset's id or the unique start of one; or the id of an ingestion or run.")
]


def find_stack(data_dir: Path | None) -> StackAddress:
    """Return the address of the stack that the options and the environment name."""
    from trainbus.client.address import find_address

    return find_address(data_dir)


def silence_logs() -> None:
    """Keep the services' modules from logging: a command prints its answer only."""
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end."""
    silence_logs()
    return asyncio.run(work)


def with_client(data_dir: Path | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Connect to the stack, run ``work`` with the client and return its result."""
    from trainbus.client.client import AsyncClient

    async def run_connected() -> T:
        async with AsyncClient(data_dir) as client:
            return await work(client)

    return run(run_connected())


def parse_param(text: str) -> tuple[str, Any]:
    """Return name and value of ``lr=0.1``. The value is JSON if it can be, else a string.

    Raises:
        UsageError: there is no ``=`` or no name.
    """
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"--param {text!r}: give it as name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
