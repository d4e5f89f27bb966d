"""Options and arguments that several commands share, and the bridge from a command to the client."""

from __future__ import annotations

import asyncio
import getpass
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from annotated_types import Ge, Le

from trainbus.client.errors import UsageError

if TYPE_CHECKING:
    from trainbus.client.address import StackAddress
    from trainbus.client.client import AsyncClient
    from trainbus.operate.connection import Connection

#: What ``wait`` can wait for, besides the end.
MILESTONES = ("accepted", "placed", "started", "completed", "failed", "cancelled")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[int | None]])

#: The name of ``--data NAME=SOURCE``.
DATASET_NAME = re.compile(r"([A-Za-z0-9_-]{1,60})=")
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
StackName = Annotated[
    str | None,
    typer.Option("--stack", help="Name of a stack that runs on this machine; `trainbus stacks` lists them."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[str, typer.Argument(help="A run's id, the unique start of one, or its name.")]
Rank = Annotated[str, typer.Option("--rank", metavar="N|all", help="Output of this rank, or of all.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="RUN (its newest checkpoint), RUN@best, RUN@STEP, models:/NAME@champion, or a manifest's s3:// address."
    ),
]
Dataset = Annotated[
    str, typer.Argument(help="A dataset's id or the unique start of one; or the id of an ingestion or run.")
]


def user_name() -> str | None:
    """Return the name of the user whose command this is, for the log."""
    try:
        return getpass.getuser()[:200]
    except (KeyError, OSError):
        return None  # a container's user has no name


def choose_data_dir(data_dir: Path | None, stack: str | None) -> Path | None:
    """Return the data folder that ``--data-dir`` or ``--stack`` names, None if neither is given.

    Raises:
        UsageError: both are given, or no stack of this name runs.
    """
    if stack is None:
        return data_dir
    if data_dir is not None:
        raise UsageError("give either --stack or --data-dir")
    from trainbus.client.address import find_named_data_dir

    return find_named_data_dir(stack)


def run_quietly(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; what it uses of the services logs nothing, for a command prints its answer only."""
    with suppress(ModuleNotFoundError):  # the client alone is installed: it has no services
        import structlog

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    return asyncio.run(work)


def with_client(data_dir: Path | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Connect to the stack, run ``work`` with the client and return its result."""
    from trainbus.client.client import AsyncClient

    async def run_connected() -> T:
        async with AsyncClient(data_dir) as client:
            return await work(client)

    return asyncio.run(run_connected())


def with_bus(data_dir: Path | None, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Connect to the stack's NATS, as an operator's tools do, run ``work`` with it and return its result."""
    from trainbus.client.address import find_address

    async def run_connected() -> T:
        async with open_bus(find_address(data_dir)) as bus:
            return await work(bus)

    return run_quietly(run_connected())


def open_bus(address: StackAddress) -> AbstractAsyncContextManager[Connection]:
    """Return a connection to a stack's NATS, to be opened.

    Raises:
        UsageError: only the client is installed here.
    """
    try:
        from trainbus.operate.connection import connect
    except ModuleNotFoundError as error:
        raise UsageError("this command reads the bus itself: pip install 'trainbus[operate]'") from error
    return connect(address)


def command(
    app: typer.Typer,
    name: str | None = None,
    *,
    on_bus: bool = False,
    options: Sequence[inspect.Parameter] = (),
    announce: Callable[..., None] | None = None,
    **settings: Any,
) -> Callable[[F], F]:
    """Register an async function as a command; the function itself stays as it is.

    Its first parameter is the client, which the command connects to the stack of ``--data-dir`` or ``--stack``, or
    ``on_bus`` a connection to its NATS. A number that it returns is the exit code. ``options`` stand for its
    ``**options``. ``announce`` is called with all that is given, before the client is imported: that takes a second on
    a busy machine.
    """
    connected: Callable[..., Any] = with_bus if on_bus else with_client

    def register(function: F) -> F:
        def invoke(*, data_dir: Path | None, stack: str | None, **given: Any) -> None:
            if announce is not None:
                announce(**given)
            if code := connected(choose_data_dir(data_dir, stack), lambda link: function(link, **given)):
                raise typer.Exit(code)

        invoke.__name__, invoke.__doc__ = function.__name__, function.__doc__
        invoke.__annotations__ = {}
        invoke.__signature__ = inspect.Signature(_parameters(function, options))  # type: ignore[attr-defined]
        app.command(name, **settings)(invoke)
        return function

    return register


def _parameters(function: Callable[..., Any], options: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters of the command line: the function's without its client, and those of the stack."""
    hints = get_type_hints(function, localns={"AsyncClient": Any, "Connection": Any}, include_extras=True)
    _, *own = inspect.signature(function).parameters.values()
    found = [
        each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY)
        for each in own
        if each.kind != each.VAR_KEYWORD
    ]
    found += [
        *options,
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in (("data_dir", DataDir), ("stack", StackName))
        ),
    ]
    return sorted(found, key=lambda each: each.name == "as_json")


def flags_of(options: type, flags: Mapping[str, tuple[type, str]]) -> list[inspect.Parameter]:
    """Return the command line's form of a TypedDict, whose fields are annotated with their bounds and help.

    ``flags`` has the type and the flags, parted by spaces, of fields that are not a number or a text under their own
    name.
    """
    found = []
    for name, annotation in get_type_hints(options, include_extras=True).items():
        plain, *notes = get_args(annotation)
        bounds: dict[type, Any] = {type(note): note for note in notes}
        kind, flag = flags.get(name, (int if set(get_args(plain)) == {int, NoneType} else str, ""))
        option = typer.Option(
            *(flag or "--" + name.replace("_", "-")).split(),
            help=bounds[str],
            min=bounds[Ge].ge if Ge in bounds else None,
            max=bounds[Le].le if Le in bounds else None,
        )
        found.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    return found


def parse_rank(text: str) -> int | None:
    """Return the rank of ``0``; None for ``all``.

    Raises:
        UsageError: the text is neither.
    """
    if text == "all":
        return None
    if not text.isdecimal():
        raise UsageError(f"--rank {text!r}: give a number, or all")
    return int(text)


def parse_pair(flag: str, text: str) -> tuple[str, str]:
    """Return name and value of ``name=value``, the value as it is.

    Raises:
        UsageError: there is no ``=`` or no name.
    """
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageError(f"{flag} {text!r}: give it as name=value")
    return name, value


def parse_data(texts: Sequence[str]) -> str | dict[str, str] | None:
    """Return the source of ``--data``, or source by name where each is ``NAME=SOURCE``; None if there is none.

    Raises:
        UsageError: several are given, and one has no name or that of another.
    """
    named = [(text, DATASET_NAME.match(text)) for text in texts]
    if len(texts) == 1 and (named[0][1] is None or Path(texts[0]).exists()):
        return texts[0]
    found: dict[str, str] = {}
    for text, match in named:
        if match is None:
            raise UsageError(
                f"--data {text!r}: of several give each a name, --data train=s3://lake/a --data extra=s3://lake/b"
            )
        if match[1] in found:
            raise UsageError(f"--data {text!r}: there are two with this name")
        found[match[1]] = text[match.end() :]
    return found or None


def parse_param(text: str) -> tuple[str, Any]:
    """Return name and value of ``lr=0.1``. The value is JSON if it can be, else a string.

    Raises:
        UsageError: there is no ``=`` or no name.
    """
    name, value = parse_pair("--param", text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
