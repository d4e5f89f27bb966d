"""``trainbus scheduler``: replay its decisions, try other nodes and policies, show the policy in force."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from trainbus.client.address import find_address
from trainbus.commands.options import DataDir, Json, run

app = typer.Typer(
    no_args_is_help=True,
    help="The scheduler: replay its decisions, try other nodes and policies, shadow it with a policy, show its policy.",
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


def _exit(work: Coroutine[Any, Any, int]) -> None:
    raise typer.Exit(run(work))


@app.command()
def replay(
    log: Log = None,
    limit: Annotated[int, typer.Option(min=0, help="Differences that are shown in full.")] = 20,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make every recorded decision again and compare; exit 0 if all are the same, 1 if not."""
    from trainbus.commands.scheduler.replay import replay_decisions

    _exit(replay_decisions(lambda: find_address(data_dir), log, limit=limit, as_json=as_json))


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
    as_json: Json = False,
) -> None:
    """Simulate past submissions on other nodes or by another policy; compare waits, use, preemptions and cost."""
    from trainbus.commands.scheduler.what_if import WhatIfOptions, compare_scenarios

    options = WhatIfOptions(
        nodes=tuple(nodes or ()),
        add=tuple(add or ()),
        policies=tuple(policy or ()),
        settings=tuple(settings or ()),
        start=start,
        end=end,
        prices=tuple(price or ()),
        resume_cost_s=resume_cost_s,
    )
    _exit(compare_scenarios(lambda: find_address(data_dir), log, options, plot=plot, as_json=as_json))


@app.command()
def shadow(
    policy: Annotated[str, typer.Option("--policy", help="The candidate: a policy's name or file.")],
    settings: Settings = None,
    during: Annotated[
        str | None, typer.Option("--for", help="How long: 10m, 2h; default: until Ctrl-C or SIGTERM.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Follow the log with a candidate policy, publish its decisions under shadow.>, and report at the end."""
    from trainbus.commands.scheduler.shadow import shadow_scheduler
    from trainbus.commands.times import parse_duration

    for_s = parse_duration(during) if during is not None else None
    _exit(shadow_scheduler(find_address(data_dir), policy, settings or [], for_s=for_s, as_json=as_json))


@policy_app.command()
def show(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the policy that the leading scheduler has adopted."""
    from trainbus.commands.scheduler.policy import print_policy

    _exit(print_policy(find_address(data_dir), as_json=as_json))


@policy_app.command()
def check(
    name: Annotated[str, typer.Argument(help="A file (TOML or JSON), or a policy's name.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Check a policy and print what differs from the default; exit 2 if it is not valid."""
    from trainbus.commands.scheduler.policy import check_policy

    check_policy(name, settings or [], as_json=as_json)


@policy_app.command()
def presets(as_json: Json = False) -> None:
    """List the policies that come with trainbus."""
    from trainbus.commands.scheduler.policy import print_presets

    print_presets(as_json=as_json)
