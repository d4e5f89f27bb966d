"""``trainbus scheduler``: replay its decisions, try other nodes and policies, show the policy in force."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from contracts.texts import plural
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, command, run, with_client
from trainbus.commands.times import parse_duration, parse_time

if TYPE_CHECKING:
    from contracts.scheduling import Policy
    from trainbus.client.client import AsyncClient
    from trainbus.client.fact_log import FactLog

T = TypeVar("T")
#: Seconds for which the scheduler's answer is awaited.
STATE_TIMEOUT_S = 5.0

app = typer.Typer(
    help="The scheduler: its state and policy; replay its decisions, try other nodes and policies, shadow it.",
)
policy_app = typer.Typer(no_args_is_help=True, help="Show the policy in force, list the presets, check a file.")
app.add_typer(policy_app, name="policy")

Log = Annotated[
    Path | None,
    typer.Option("--log", help="Read a file (JSONL, as `trainbus simulate --events` writes it) instead of the bus."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A field of the policy: order.skip=true; repeatable.")
]


def _with_log(path: Path | None, data_dir: Path | None, work: Callable[[FactLog], Awaitable[T]]) -> T:
    """Run ``work`` with the log in a file, or without one with the log of the stack."""
    from trainbus.client.fact_log import BusLog, FileLog

    async def read_file() -> T:
        assert path is not None
        return await work(FileLog(path))

    async def read_bus(client: AsyncClient) -> T:
        return await work(await BusLog.open(client.connection))

    return run(read_file()) if path is not None else with_client(data_dir, read_bus)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, stack: StackName = None, as_json: Json = False) -> None:
    """The scheduler: its state and policy; replay its decisions, try other nodes and policies, shadow it."""
    if context.invoked_subcommand is None:
        with_client(choose_data_dir(data_dir, stack), lambda client: _print_state(client, as_json=as_json))
    elif data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus scheduler {context.invoked_subcommand} ...`")


async def _print_state(client: AsyncClient, *, as_json: bool) -> None:
    """Print who leads, by which policy, what waits, and all that was put aside or ignored, with the reasons."""
    state = await client.connection.query("scheduler", "state", {}, STATE_TIMEOUT_S)
    if state is None:
        raise TrainbusError("no scheduler answers: start one (`trainbus up`, or `trainbus service scheduler`)")
    if as_json:
        print(render.as_json(state))
        return
    leads = "leads" if state["leads"] else "is a standby"
    print(f"{state['instance']} {leads}; policy {state['policy']}; {plural(state['queue_length'], 'run')} in the queue")
    if unused := state.get("unused_settings"):
        print(unused)
    for what, found in state["quarantine"].items():
        for name, reason in found.items():
            print(f"in quarantine: {what.removesuffix('s')} {name}: {render.visible(reason)}")


@app.command()
def replay(
    log: Log = None,
    limit: Annotated[int, typer.Option(min=0, help="Differences that are shown in full.")] = 20,
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Make every recorded decision again and compare; exit 0 if all are the same, 1 if not."""
    from trainbus.commands.scheduler_replay import replay_decisions

    raise typer.Exit(
        _with_log(
            log, choose_data_dir(data_dir, stack), lambda facts: replay_decisions(facts, limit=limit, as_json=as_json)
        )
    )


@app.command(name="what-if")
def what_if(
    nodes: Annotated[
        list[str] | None,
        typer.Option("--nodes", help="Other nodes: 40x8, or 32x8:H100,16x4:A100@spot-pool; repeatable."),
    ] = None,
    add: Annotated[
        list[str] | None, typer.Option("--add", help="More nodes than there were: 4x8:H100; repeatable.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Another policy, by name or file; repeatable.")
    ] = None,
    settings: Settings = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Only submissions after this: a date, or '7 d ago'.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Only submissions before this.")] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", help="ACCELERATOR=PRICE or POOL=PRICE of a slot-hour; repeatable.")
    ] = None,
    resume_cost_s: Annotated[
        float | None,
        typer.Option(
            "--resume-cost-s", min=0, help="Seconds that a preempted run needs to resume; default: as logged."
        ),
    ] = None,
    log: Log = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for a chart (PNG).")] = None,
    data_dir: DataDir = None,
    stack: StackName = None,
    as_json: Json = False,
) -> None:
    """Simulate past submissions on other nodes or by another policy; compare waits, use, preemptions and cost."""
    from services.scheduler.replay.history import History
    from services.scheduler.replay.whatif import WhatIfError
    from trainbus.commands.what_if import compare_scenarios, read_history

    first, last = (parse_time(text, render.utc_now()) if text else None for text in (start, end))
    policies = [load_policy(name, settings or ()) for name in policy or ()]
    if settings and not policies:
        raise UsageError("--set changes a policy: name it with --policy")
    history = _with_log(log, choose_data_dir(data_dir, stack), lambda facts: read_history(facts, History(first, last)))
    try:
        compare_scenarios(
            history,
            nodes=nodes or (),
            add=add or (),
            policies=policies,
            prices=price or (),
            resume_cost_s=resume_cost_s,
            plot=plot,
            as_json=as_json,
        )
    except WhatIfError as error:
        raise UsageError(str(error)) from error


@command(app)
async def shadow(
    client: AsyncClient,
    policy: Annotated[str, typer.Option("--policy", help="The candidate: a policy's name or file.")],
    settings: Settings = None,
    during: Annotated[
        str | None, typer.Option("--for", help="How long: 10m, 2h; default: until Ctrl-C or SIGTERM.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Follow the log with a candidate policy, publish its decisions under shadow.>, and report at the end."""
    from trainbus.commands.shadow import shadow_scheduler

    for_s = parse_duration(during) if during is not None else None
    await shadow_scheduler(client.connection, load_policy(policy, settings or ()), for_s=for_s, as_json=as_json)


# -- policy -----------------------------------------------------------------------


def load_policy(name_or_path: str, settings: Iterable[str] = ()) -> Policy:
    """Return the policy of this name or in this file.

    Raises:
        UsageError: there is none, or it is not valid.
    """
    from services.scheduler import policies

    try:
        return policies.with_settings(name_or_path, settings)
    except policies.PolicyError as error:
        raise UsageError(str(error)) from error


def _changes_of(policy: Policy) -> dict[str, Any]:
    """Return what of a policy is not the default: all that its file needs to hold."""
    return {"name": policy.name} | policy.model_dump(mode="json", exclude_defaults=True)


def _print_policy_file(policy: Policy, title: str) -> None:
    from trainbus.commands import toml_writer

    print(f"# {title}; the rest is the default")
    print(toml_writer.dumps(_changes_of(policy)), end="")


@command(policy_app)
async def show(client: AsyncClient, as_json: Json = False) -> None:
    """Show the policy that the leading scheduler has adopted."""
    from contracts import subjects, topology

    subject = subjects.fact("policy", subjects.WILDCARD, "adopted")
    message = await client.connection.read_last(topology.FACTS, subject)
    if message is None:
        raise TrainbusError("no scheduler has adopted a policy yet: start one (`trainbus up`)")
    adopted = message.event
    if as_json:
        named = {"name": adopted.policy.name, "digest": adopted.digest, "adopted_at": message.time}
        named |= {"adopted_by": adopted.instance, "sequence": message.sequence, "policy": adopted.policy}
        print(render.as_json(named))
        return
    by = f" by {adopted.instance}" if adopted.instance else ""
    _print_policy_file(adopted.policy, f"{adopted.digest}, adopted {message.time:%Y-%m-%d %H:%M:%S} UTC{by}")


@policy_app.command()
def check(
    name: Annotated[str, typer.Argument(help="A file (TOML or JSON), or a policy's name.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Check a policy and print what differs from the default; exit 2 if it is not valid."""
    policy = load_policy(name, settings or ())
    if as_json:
        print(json.dumps({"name": policy.name, "digest": policy.digest, "valid": True, "changes": _changes_of(policy)}))
    else:
        _print_policy_file(policy, f"{policy.name} ({policy.digest}) is valid")


@policy_app.command()
def presets(as_json: Json = False) -> None:
    """List the policies that come with trainbus."""
    from services.scheduler import policies

    found = [policies.load(name) for name in policies.names()]
    if as_json:
        rows = [{"name": each.name, "digest": each.digest, "changes": _changes_of(each)} for each in found]
        print(render.as_json(rows))
        return
    table = render.table("policy", "order", "overtaking", "nodes", "takes slots for")
    for each in found:
        backfill = each.reserve.backfill
        overtaking = "who fits" if each.order.skip else f"{backfill} backfill" if backfill != "none" else "no"
        default = " (default)" if each.name == policies.DEFAULT else ""
        reclaim = ", ".join(each.reclaim.by) or "-"
        table.add_row(each.name + default, ", ".join(each.order.by), overtaking, each.place.by, reclaim)
    render.console().print(table)
