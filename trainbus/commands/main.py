"""The ``trainbus`` command. A command is imported when it is called, and what it needs when it runs: all are quick."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from trainbus.client.errors import TrainbusError
from trainbus.commands import render
from trainbus.commands.catalogue import CatalogueGroup

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
OUR_PACKAGES = ("contracts", "services", "trainbus")

app = typer.Typer(
    name="trainbus",
    cls=CatalogueGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"trainbus {importlib.metadata.version('trainbus')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train models on your own GPUs: submit, follow, explain, restore. Start with `trainbus up`."""


def main() -> None:
    """Run a command; an error becomes a message on stderr and an exit code."""
    try:
        app()
    except TrainbusError as error:
        print(f"trainbus: {render.visible(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OUR_PACKAGES:
            raise
        print(
            f"trainbus: this command needs {error.name}, which the client alone does not bring: "
            "pip install 'trainbus[all]'",
            file=sys.stderr,
        )
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.
        sys.stderr.close()
        sys.exit(EXIT_FAILED)
    except json.JSONDecodeError as error:
        print(f"trainbus: a file of the stack is damaged: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"trainbus: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
