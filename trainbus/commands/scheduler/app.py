"""``trainbus scheduler``: its decisions made again, other nodes and policies tried out, and the policy in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="The scheduler: make its decisions again, ask what if, let another policy follow along, show the policy.",
)
policy_app = typer.Typer(no_args_is_help=True, help="The policy in force, those that there are, and checking a file.")
app.add_typer(policy_app, name="policy")

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder of the embedded stack; default: .trainbus here or above."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Log = Annotated[
    Path | None,
    typer.Option("--log", help="A log in a file (JSONL, as `trainbus simulate --events` writes it), not the bus."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A field of the policy: order.skip=true; repeatable.")
]


def _address(data_dir: Path | None) -> Callable[[], Any]:
    """Where the stack is, found when it is needed: a file needs none."""

    def find() -> Any:
        from trainbus.client.address import find

        return find(data_dir)

    return find


def _run(work: Coroutine[Any, Any, int]) -> None:
    raise typer.Exit(asyncio.run(work))


@app.command()
def replay(
    log: Log = None,
    limit: Annotated[int, typer.Option(min=0, help="Differences that are shown in full.")] = 20,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Make every recorded decision again and compare; exit 0 if all are the same, 1 if not."""
    from trainbus.commands.scheduler.replay import replay

    _run(replay(_address(data_dir), log, limit=limit, as_json=as_json))


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
    start: Annotated[str | None, typer.Option("--from", help="Submissions from then on: a date, or '7 d ago'.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Submissions before then.")] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", help="ACCELERATOR=PRICE or POOL=PRICE of a slot-hour; repeatable.")
    ] = None,
    resume_cost_s: Annotated[
        float | None,
        typer.Option("--resume-cost-s", min=0, help="Seconds that a preempted run takes to go on; default: as it was."),
    ] = None,
    log: Log = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Folder for a chart (PNG).")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Play the submissions of the past on other nodes or by another policy; compare waits, use, preemptions, cost."""
    from trainbus.commands.scheduler.what_if import Wish, what_if

    wish = Wish(
        nodes=tuple(nodes or ()),
        add=tuple(add or ()),
        policies=tuple(policy or ()),
        settings=tuple(settings or ()),
        start=start,
        end=end,
        prices=tuple(price or ()),
        resume_cost_s=resume_cost_s,
    )
    _run(what_if(_address(data_dir), log, wish, plot=plot, as_json=as_json))


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
    """Let a candidate policy follow what happens and say under shadow.> what it would do; report at the end."""
    from trainbus.commands.scheduler.shadow import shadow
    from trainbus.commands.times import seconds

    for_s = seconds(during) if during is not None else None
    _run(shadow(_address(data_dir)(), policy, settings or [], for_s=for_s, as_json=as_json))


@policy_app.command()
def show(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the policy that the leading scheduler has adopted."""
    from trainbus.commands.scheduler.policy import show

    _run(show(_address(data_dir)(), as_json=as_json))


@policy_app.command()
def check(
    name: Annotated[str, typer.Argument(help="A file (TOML or JSON), or a policy's name.")],
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Say whether a policy is valid, and what differs from the default; exit 2 if it is not."""
    from trainbus.commands.scheduler.policy import check

    check(name, settings or [], as_json=as_json)


@policy_app.command()
def presets(as_json: Json = False) -> None:
    """List the policies that come with trainbus."""
    from trainbus.commands.scheduler.policy import presets

    presets(as_json=as_json)
