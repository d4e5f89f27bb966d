"""The policy in force, the ones that come with trainbus, and checking a team's own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from contracts import subjects, topology
from contracts.scheduling import Policy
from services.scheduler import policies
from trainbus.client.address import Address
from trainbus.client.connection import Stored, connect
from trainbus.client.errors import USAGE, CliError
from trainbus.commands import render
from trainbus.commands.scheduler import toml_writer


def load(name_or_path: str, settings: Iterable[str] = ()) -> Policy:
    """The policy of this name or in this file.

    Raises:
        CliError: there is none, or it is not valid.
    """
    try:
        return policies.with_settings(name_or_path, settings)
    except policies.PolicyError as error:
        raise CliError(str(error), USAGE) from error


def changes(policy: Policy) -> dict[str, Any]:
    """What of a policy is not the default: all that a file needs to hold."""
    return {"name": policy.name} | policy.model_dump(mode="json", exclude_defaults=True)


async def show(address: Address, *, as_json: bool) -> int:
    """Print the newest policy that was adopted."""
    async with connect(address) as link:
        stored: Stored | None = await link.last(topology.FACTS, subjects.fact("policy", subjects.WILDCARD, "adopted"))
    if stored is None:
        raise CliError("no scheduler has adopted a policy yet: none has led since it says so")
    adopted = stored.event
    if as_json:
        print(
            render.as_json(
                {
                    "name": adopted.policy.name,
                    "digest": adopted.digest,
                    "adopted_at": stored.envelope.time,
                    "adopted_by": adopted.instance,
                    "sequence": stored.sequence,
                    "policy": adopted.policy,
                }
            )
        )
        return 0
    by = f" by {adopted.instance}" if adopted.instance else ""
    print(f"# {adopted.digest}, adopted {stored.envelope.time:%Y-%m-%d %H:%M:%S} UTC{by}; what is not here is default")
    print(toml_writer.dumps(changes(adopted.policy)), end="")
    return 0


def check(name: str, settings: list[str], *, as_json: bool) -> None:
    """Print what a valid policy says; end with what is wrong with one that is not."""
    policy = load(name, settings)
    if as_json:
        print(json.dumps({"name": policy.name, "digest": policy.digest, "valid": True, "changes": changes(policy)}))
        return
    print(f"# {policy.name} ({policy.digest}) is valid; what is not here is default")
    print(toml_writer.dumps(changes(policy)), end="")


def presets(*, as_json: bool) -> None:
    """Print the policies that come with trainbus, each with what differs from the default."""
    found = [policies.load(name) for name in policies.names()]
    if as_json:
        print(render.as_json([{"name": each.name, "digest": each.digest, "changes": changes(each)} for each in found]))
        return
    made = render.table("policy", "order", "overtaking", "nodes", "takes slots for")
    for each in found:
        backfill = each.reserve.backfill
        overtaking = "who fits" if each.order.skip else f"{backfill} backfill" if backfill != "none" else "no"
        default = " (default)" if each.name == policies.DEFAULT else ""
        made.add_row(
            each.name + default, ", ".join(each.order.by), overtaking, each.place.by, ", ".join(each.reclaim.by) or "-"
        )
    render.console().print(made)
