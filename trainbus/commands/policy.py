"""``trainbus policy``: the scheduler's policy in force, what another one would change, and adopting it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.formats import plural
from contracts.scheduling import Policy
from contracts.texts import adoption_text, describe
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.options import Json, command, user_name

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

app = typer.Typer(
    name="policy",
    no_args_is_help=True,
    help="The scheduler's policy: show it, compare another one with it, adopt that one.",
)

PolicyFile = Annotated[str, typer.Argument(metavar="FILE", help="A file (TOML or JSON), or the name of a preset.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A field of the policy: order.skip=true; repeatable.")
]


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


@command(app)
async def show(
    client: AsyncClient,
    digest: Annotated[str, typer.Argument(help="An earlier one, by the start of its digest.")] = "",
    as_json: Json = False,
) -> None:
    """Show the policy in force, since when, by whom and why, as a file that `apply` takes."""
    found = await client.policy(digest)
    fact = found.fact
    if as_json:
        named = {"name": found.policy.name, "adopted_at": found.adopted_at, "adopted_by": fact.instance}
        told = fact.model_dump(include={"digest", "origin", "settings", "user", "reason", "policy"})
        print(render.as_json(named | {"sequence": found.sequence} | told))
        return
    by = f" by {fact.instance}" if fact.instance and fact.origin in (None, "default") else ""
    head = f"{fact.digest}, adopted {found.adopted_at:%Y-%m-%d %H:%M:%S} UTC{by}{adoption_text(fact)}"
    _print_policy_file(found.policy, " ".join(head.split()))


@command(app)
async def diff(client: AsyncClient, file: PolicyFile, settings: Settings = None, as_json: Json = False) -> None:
    """Show which settings a policy changes, and what it changes about the runs of now in the next cycles."""
    found = await client.diff_policy(load_policy(file, settings or ()))
    if as_json:
        print(render.as_json(found))
    else:
        _print_diff(found)


@command(app)
async def apply(
    client: AsyncClient,
    file: PolicyFile,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")],
    settings: Settings = None,
    replaces: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Only in place of this policy; default: the one in force.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Adopt it without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Adopt a policy: it is in force from the next cycle on, without a restart, for every scheduler."""
    candidate = load_policy(file, settings or ())
    found = await client.diff_policy(candidate)
    fact = (await client.policy()).fact
    # One that nobody has chosen is adopted all the same: a newer version would change it.
    if found["changes"] or fact.origin not in ("setting", "request"):
        _print_diff(found, stderr=as_json)
        _check_failures(found)
        if not yes:
            typer.confirm(f"Adopt {candidate.name}?", abort=True, err=as_json)
        replaced = replaces or found["in_force"]["digest"]
        fact = await client.apply_policy(candidate, reason, user=user_name(), replaces=replaced)
    print(render.as_json(fact) if as_json else render.visible(describe(fact)))


@app.command()
def check(name: PolicyFile, settings: Settings = None, as_json: Json = False) -> None:
    """Check a policy and print what differs from the default; exit 2 if it is not valid."""
    policy = load_policy(name, settings or ())
    if as_json:
        print(json.dumps({"name": policy.name, "digest": policy.digest, "valid": True, "changes": _changes_of(policy)}))
    else:
        _print_policy_file(policy, f"{policy.name} ({policy.digest}) is valid")


@app.command()
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
        preempts_by = ", ".join(each.preemption.by) or "-"
        table.add_row(each.name + default, ", ".join(each.order.by), overtaking, each.place.by, preempts_by)
    render.console().print(table)


def _check_failures(found: dict[str, Any]) -> None:
    """Refuse a policy by which the next cycle fails on a run or a node.

    Raises:
        TrainbusError: it does; the text says on which.
    """
    failing = [f"{name}: {reason}" for part in found["failures"].values() for name, reason in part.items()]
    if failing:
        raise TrainbusError(f"not adopted: the next cycle fails by this policy, please report it: {'; '.join(failing)}")


def _changes_of(policy: Policy) -> dict[str, Any]:
    """Return what of a policy is not the default: all that its file needs to hold."""
    return {"name": policy.name} | policy.model_dump(mode="json", exclude_defaults=True)


def _print_policy_file(policy: Policy, title: str) -> None:
    from trainbus.commands import toml_writer

    print(f"# {render.visible(title)}; the rest is the default")
    print(toml_writer.dumps(_changes_of(policy)), end="")


def _print_diff(found: dict[str, Any], *, stderr: bool = False) -> None:
    """Print what ``AsyncClient.diff_policy`` returns."""
    console = render.console(stderr=stderr)
    old, new = found["in_force"], found["candidate"]
    console.print(
        f"[bold]{render.escape(new['name'])}[/] ({new['digest']}) in place of "
        f"[bold]{render.escape(old['name'])}[/] ({old['digest']})",
        soft_wrap=True,
    )
    if not found["changes"]:
        console.print("no setting differs")
        return
    settings = render.table("setting", "in force", "changed to")
    for each in found["changes"]:
        settings.add_row(*(render.escape(_value(each[name])) for name in ("setting", "in_force", "candidate")))
    console.print(settings)
    examined = plural(found["runs_examined"], "run")
    if not found["runs"]:
        console.print(f"the next cycles would decide the same about the {examined} of now")
        return
    console.print(f"the next cycles would decide otherwise about {found['runs_affected']} of {examined} of now:")
    runs = render.table("run", "name", "by the one in force", "changed to")
    for each in found["runs"]:
        texts = (each["run_id"], each["name"], _outcomes(each["in_force"]), _outcomes(each["candidate"]))
        runs.add_row(*map(render.escape, texts))
    console.print(runs)
    if left := found["runs_affected"] - len(found["runs"]):
        console.print(f"and {left:,} more")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def _outcomes(outcomes: list[dict[str, str]]) -> str:
    """Return what becomes of a run."""
    return ", then ".join(map(_outcome, outcomes))


def _outcome(outcome: dict[str, str]) -> str:
    what, detail = outcome["what"], outcome["detail"]
    if what == "placed":
        return f"starts on {detail}"
    return f"{what} ({detail})" if detail else what
