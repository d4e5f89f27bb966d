"""``trainbus scheduler policy``: the policy in force, the presets, and the check of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from contracts import subjects, topology
from contracts.scheduling import Policy
from services.scheduler import policies
from trainbus.client.address import StackAddress
from trainbus.client.connection import StoredEvent, connect
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.commands import render
from trainbus.commands.scheduler import toml_writer

ADOPTED = subjects.fact("policy", subjects.WILDCARD, "adopted")


def load_policy(name_or_path: str, settings: Iterable[str] = ()) -> Policy:
    """Return the policy of this name or in this file.

    Raises:
        UsageError: there is none, or it is not valid.
    """
    try:
        return policies.with_settings(name_or_path, settings)
    except policies.PolicyError as error:
        raise UsageError(str(error)) from error


def changes_of(policy: Policy) -> dict[str, Any]:
    """Return what of a policy is not the default: all that its file needs to hold."""
    return {"name": policy.name} | policy.model_dump(mode="json", exclude_defaults=True)


async def print_policy(address: StackAddress, *, as_json: bool) -> int:
    """Print the newest policy that was adopted."""
    async with connect(address) as connection:
        message: StoredEvent | None = await connection.read_last(
            topology.FACTS, subjects.fact("policy", subjects.WILDCARD, "adopted")
        )
    if message is None:
        raise TrainbusError("no scheduler has adopted a policy yet: start one (`trainbus up`)")
    adopted = message.event
    if as_json:
        print(
            render.as_json(
                {
                    "name": adopted.policy.name,
                    "digest": adopted.digest,
                    "adopted_at": message.envelope.time,
                    "adopted_by": adopted.instance,
                    "sequence": message.sequence,
                    "policy": adopted.policy,
                }
            )
        )
        return 0
    by = f" by {adopted.instance}" if adopted.instance else ""
    print(f"# {adopted.digest}, adopted {message.envelope.time:%Y-%m-%d %H:%M:%S} UTC{by}; the rest is the default")
    print(toml_writer.dumps(changes_of(adopted.policy)), end="")
    return 0


def check_policy(name: str, settings: list[str], *, as_json: bool) -> None:
    """Print what of a policy is not the default.

    Raises:
        UsageError: it is not valid.
    """
    policy = load_policy(name, settings)
    if as_json:
        print(json.dumps({"name": policy.name, "digest": policy.digest, "valid": True, "changes": changes_of(policy)}))
        return
    print(f"# {policy.name} ({policy.digest}) is valid; the rest is the default")
    print(toml_writer.dumps(changes_of(policy)), end="")


def print_presets(*, as_json: bool) -> None:
    """Print the policies that come with trainbus."""
    found = [policies.load(name) for name in policies.names()]
    if as_json:
        print(
            render.as_json([{"name": each.name, "digest": each.digest, "changes": changes_of(each)} for each in found])
        )
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
