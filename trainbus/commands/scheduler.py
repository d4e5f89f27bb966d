"""``trainbus scheduler``: its state; replay its decisions, try other nodes and policies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from contracts.formats import plural
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import policy, render
from trainbus.commands.options import DataDir, Json, StackName, choose_data_dir, command, run_quietly, with_bus
from trainbus.commands.policy import Settings, load_policy
from trainbus.commands.times import parse_duration, parse_time

if TYPE_CHECKING:
    from trainbus.operate.connection import Connection
    from trainbus.operate.history.fact_log import FactLog

T = TypeVar("T")
#: Seconds for which the scheduler's answer is awaited.
STATE_TIMEOUT_S = 5.0

app = typer.Typer(
    name="scheduler",
    help="The scheduler: its state; replay its decisions, try other nodes and policies, shadow it.",
)
# As it was called before it had a place of its own.
app.add_typer(policy.app, name="policy", hidden=True)

Log = Annotated[
    Path | None,
    typer.Option("--log", help="Read a file (JSONL, as `trainbus simulate --events` writes it) instead of the bus."),
]


def _with_log(path: Path | None, data_dir: Path | None, work: Callable[[FactLog], Awaitable[T]]) -> T:
    """Run ``work`` with the log in a file, or without one with the log of the stack."""
    from trainbus.operate.history.fact_log import BusLog, FileLog

    async def read_file() -> T:
        assert path is not None
        return await work(FileLog(path))

    async def read_bus(bus: Connection) -> T:
        return await work(await BusLog.open(bus))

    return run_quietly(read_file()) if path is not None else with_bus(data_dir, read_bus)


@app.callback(invoke_without_command=True)
def default(context: typer.Context, data_dir: DataDir = None, stack: StackName = None, as_json: Json = False) -> None:
    """The scheduler: its state; replay its decisions, try other nodes and policies, shadow it."""
    if context.invoked_subcommand is None:
        with_bus(choose_data_dir(data_dir, stack), lambda bus: _print_state(bus, as_json=as_json))
    elif data_dir is not None or stack is not None or as_json:
        raise UsageError(f"give the options after the command: `trainbus scheduler {context.invoked_subcommand} ...`")


async def _print_state(bus: Connection, *, as_json: bool) -> None:
    """Print who leads, by which policy, what waits, and all that was put aside or ignored, with the reasons."""
    state = await bus.query("scheduler", "state", {}, STATE_TIMEOUT_S)
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
    from trainbus.commands.what_if import compare_scenarios, read_history
    from trainbus.operate.history.history import History
    from trainbus.operate.history.what_if import WhatIfError

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


@command(app, on_bus=True)
async def shadow(
    bus: Connection,
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
    await shadow_scheduler(bus, load_policy(policy, settings or ()), for_s=for_s, as_json=as_json)
