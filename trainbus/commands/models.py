"""``trainbus models``: list and show registered models; promote, roll back, approve, stage; set gates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts import subjects
from contracts.texts import describe
from trainbus.client.errors import NotFoundError, UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, Run, StackName, choose_data_dir, command, user_name, with_client

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient
    from trainbus.client.models import ModelRecord, ModelVersion

app = typer.Typer(
    name="models",
    help="Models: list and show them, promote, roll back, approve, stage, and set their gates.",
)


def _check_name(name: str) -> str:
    from trainbus.client.models import check_model

    return check_model(name)


Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the registered model.", callback=_check_name)]
Reason = Annotated[str, typer.Option(help="Why; it is written into the log.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, stack: StackName = None, as_json: Json = False) -> None:
    """Models: list and show them, promote, roll back, approve, stage, and set their gates."""
    if context.invoked_subcommand is None:
        # What this command printed before it had subcommands.
        with_client(
            choose_data_dir(data_dir, stack), lambda client: _list(client, as_json=as_json, only_champions=True)
        )
    elif data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus models {context.invoked_subcommand} ...`")


@command(app)
async def ls(client: AsyncClient, as_json: Json = False) -> None:
    """List the models: champions, aliases, and candidates whose promotion waits for somebody."""
    await _list(client, as_json=as_json)


async def _list(client: AsyncClient, *, as_json: bool, only_champions: bool = False) -> None:
    from trainbus.client.models import list_models

    if as_json and only_champions:
        print(render.as_json(await client.models()))
        return
    found = await list_models(client.connection)
    if as_json:
        print(render.as_json([record.to_plain() for record in found]))
    elif not found:
        print("no champions yet: a run with `evaluation` competes for one")
    else:
        print_models(found)
        if client.address.serving_url:
            print(f"they answer at {client.address.serving_url} (POST /predict/MODEL; /docs has their fields)")


def print_models(found: Sequence[ModelRecord]) -> None:
    """Print a table of models, and under it what is not served and who waits."""
    columns = ("model", "version", "run", "metrics", "aliases", "since", "served")
    table = render.table(*columns, right=("version", "since", "served"))
    now = render.utc_now()
    for record in found:
        champion = record.champion
        table.add_row(
            record.model,
            str(champion.version) if champion else "",
            champion.run_id if champion else "",
            _metrics(champion) if champion else "",
            render.escape(_aliases(record)),
            render.ago(champion.promoted_at, now) if champion else "",
            "-" if record.served_version is None else f"v{record.served_version}",
        )
    render.console().print(table)
    for record in found:
        if record.serving_problem:
            render.console().print(
                f"[yellow]{record.model}:[/] {render.escape(record.serving_problem)}", soft_wrap=True
            )
        _print_pending(record)


def _aliases(record: ModelRecord) -> str:
    champion = [] if record.champion is None else [("champion", record.champion.version)]
    return ", ".join(f"{alias}=v{version}" for alias, version in [*champion, *sorted(record.aliases.items())])


def _metrics(version: ModelVersion) -> str:
    """Return what the evaluation measured; without one, what the training reported, marked as that."""
    if version.metrics or not version.training_metrics:
        return render.numbers(version.metrics)
    return f"{render.numbers(version.training_metrics)} [dim](training)[/]"


def _print_pending(record: ModelRecord) -> None:
    for each in record.pending:
        run_id = each.run_id
        step = f"trainbus models approve {record.model} {run_id}"
        if each.awaits == "reproduction":
            step = f"trainbus reproduce {run_id}"
        render.console().print(
            f"[yellow]{run_id} awaits {each.awaits}[/] for {record.model}: `{step}` "
            f"(its report: `trainbus report {run_id}`)",
            soft_wrap=True,
        )


@command(app)
async def show(client: AsyncClient, name: Name, as_json: Json = False) -> None:
    """Show a model: every version, its gates, its aliases and who waits."""
    from trainbus.client.models import find_model

    record = await find_model(client.connection, name)
    if as_json:
        print(render.as_json(record.to_plain()))
        return
    table = render.table("version", "run", "metrics", "reason", "since", right=("version", "since"))
    now, champion = render.utc_now(), record.champion
    for each in reversed(record.versions):
        marks = [alias for alias, version in record.aliases.items() if version == each.version]
        label = ", ".join((["champion"] if each is champion else []) + sorted(marks))
        table.add_row(
            f"{each.version}" + (f" [green]{render.escape(label)}[/]" if label else ""),
            each.run_id,
            _metrics(each),
            render.escape(each.describe_reason()),
            render.ago(each.promoted_at, now),
        )
    render.console().print(table)
    print_served(record)
    _print_gates(record)
    _print_pending(record)


def print_served(record: ModelRecord) -> None:
    """Print which version answers, and why that is not the champion, where it is another one."""
    if record.served_version is None and not record.serving_problem:
        return
    served = "no version" if record.served_version is None else f"version {record.served_version}"
    reason = f"; [yellow]{render.escape(record.serving_problem)}[/]" if record.serving_problem else ""
    render.console().print(f"{served} answers{reason}", soft_wrap=True)


def _print_gates(record: ModelRecord) -> None:
    from trainbus.commands import toml_writer

    plain = record.gates.model_dump(mode="json", exclude_defaults=True)
    if plain:
        print(f"gates (version {record.configuration}):")
        print("".join(f"  {line}\n" if line else "" for line in toml_writer.dumps(plain).splitlines()), end="")
    else:
        print(f"no gates of its own; a run's `evaluation` decides (`trainbus models gates {record.model} --set ...`)")


@command(app)
async def promote(
    client: AsyncClient, model: Name, run: Run, reason: Reason = "promoted by request", as_json: Json = False
) -> None:
    """Make a run's result the champion, whatever the gates found."""
    from contracts.events.train import PromoteRequested

    run_id = await client.find_run(run)
    known = await _find_model(client, model)
    if known is not None and known.champion is not None and known.champion.run_id == run_id:
        raise UsageError(f"run {run_id} is the champion of {model} already (version {known.champion.version})")
    await _request(client, PromoteRequested(model=model, run_id=run_id, reason=reason), model, as_json)


@command(app)
async def rollback(
    client: AsyncClient, model: Name, reason: Reason = "rolled back by request", as_json: Json = False
) -> None:
    """Make the champion before the present one champion again."""
    from contracts.events.train import RollbackRequested

    await _request(client, RollbackRequested(model=model, reason=reason), model, as_json)


@command(app)
async def approve(
    client: AsyncClient,
    model: Name,
    run: Run,
    decline: Annotated[bool, typer.Option("--decline", help="Decline it: the run is not promoted.")] = False,
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Approve a candidate that waits for it, or decline it."""
    from contracts.events.train import ApproveRequested

    run_id = await client.find_run(run)
    request = ApproveRequested(model=model, run_id=run_id, approved=not decline, reason=reason, user=user_name())
    await _request(client, request, model, as_json)


@command(app)
async def stage(
    client: AsyncClient,
    model: Name,
    alias: Annotated[str, typer.Argument(help="The alias: staging, canary, ...")],
    version: Annotated[
        int | None, typer.Argument(min=1, help="The version that it names from now on; default: the champion.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias.")] = False,
    reason: Reason = "staged by request",
    as_json: Json = False,
) -> None:
    """Let an alias name a version of a model, or remove the alias."""
    from contracts.events.train import StageRequested
    from trainbus.client.models import find_model

    if remove and version is not None:
        raise UsageError("give either a version or --remove")
    if not remove and version is None:
        version = (await find_model(client.connection, model)).find("champion").version
    fields: dict[str, Any] = {"model": model, "alias": alias, "version": version, "reason": reason, "user": user_name()}
    await _request(client, _validated(StageRequested, fields), model, as_json)


@command(app)
async def gates(
    client: AsyncClient,
    model: Name,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE|FILE.toml", help="Change a gate, or set all from a file; repeatable."),
    ] = None,
    unset: Annotated[list[str] | None, typer.Option(help="Remove a gate; repeatable.")] = None,
    reason: Reason = "configured by request",
    as_json: Json = False,
) -> None:
    """Show a model's gates, or change them: `--set confidence=0.95 --set slices.class.max_regression=0.02`."""
    from contracts.events.train import ConfigureRequested
    from trainbus.client.models import ModelRecord, change_gates, find_unmeasured

    record = await _find_model(client, model) or ModelRecord(model)
    if changes or unset:
        made = change_gates(record.gates, changes or (), unset or ())
        for text in find_unmeasured(made, record.champion.metrics) if record.champion else ():
            print(text, file=sys.stderr)
        request = ConfigureRequested(
            model=model,
            gates=made,
            replaces=record.configuration,
            reason=reason,
            user=user_name(),
        )
        fact = await _request(client, request, model, as_json=False, quiet=True)
        record.gates, record.configuration = fact.gates, fact.version
    if as_json:
        plain = record.to_plain()
        print(render.as_json({name: plain[name] for name in ("model", "gates", "configuration")}))
    else:
        _print_gates(record)


async def _request(client: AsyncClient, request: Any, model: str, as_json: bool, quiet: bool = False) -> Any:
    """Publish a request, wait for what becomes of it, and print that."""
    from trainbus.client.requests import publish_and_wait

    fact = await publish_and_wait(client.connection, request, subjects.model(model), "evaluation service")
    if as_json:
        print(render.as_json(fact))
    elif not quiet:
        print(f"{model}: {render.visible(describe(fact))}")
    return fact


async def _find_model(client: AsyncClient, name: str) -> ModelRecord | None:
    """Return a model, None if nothing is known of it yet."""
    from trainbus.client.models import find_model

    with suppress(NotFoundError):
        return await find_model(client.connection, name)
    return None


def _validated(request: Any, fields: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from contracts.problems import describe_problems, join_problems

    try:
        return request(**fields)
    except ValidationError as error:
        raise UsageError(join_problems(describe_problems(error, fields))) from error
