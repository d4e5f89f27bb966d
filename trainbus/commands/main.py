"""The ``trainbus`` command. Every command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Annotated

import typer

from trainbus.client.errors import TrainbusError
from trainbus.commands import (
    checkpoints,
    cluster,
    datasets,
    dead_letters,
    lake,
    models,
    policy,
    render,
    replay,
    report,
    results,
    runs,
    scheduler,
    stack,
    trace,
    tune,
)

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
OUR_PACKAGES = ("contracts", "services", "trainbus")

app = typer.Typer(
    name="trainbus",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group in (stack, runs, results, report, trace, lake, cluster):
    app.add_typer(group.app)
app.add_typer(tune.app, name="tune", rich_help_panel="Runs")
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel="Runs")
app.add_typer(datasets.app, name="datasets", rich_help_panel="Data")
app.add_typer(models.app, name="models", rich_help_panel="Runs")
app.add_typer(scheduler.app, name="scheduler", rich_help_panel="Cluster")
app.add_typer(policy.app, name="policy", rich_help_panel="Cluster")
app.add_typer(dead_letters.app, name="dead-letters", rich_help_panel="Cluster")
app.add_typer(replay.app, name="replay", rich_help_panel="Cluster")


def _print_version(wanted: bool) -> None:
    if wanted:
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
