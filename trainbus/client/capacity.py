"""Whether a run can have its slots: on the nodes that are there, or on those that the policy's pools can add."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from contracts.formats import plural
from contracts.state.node import GONE_STATES
from trainbus.client.connection import Connection
from trainbus.client.errors import TrainbusError

if TYPE_CHECKING:
    from contracts.spec.run import RunFields

#: Seconds that the question may hold up who has submitted a run.
PATIENCE_S = 1.0


async def find_shortage(connection: Connection, spec: RunFields) -> str:
    """Return why a run cannot start with what there is and what can come; '' if it can, or if that is not known.

    It asks the read model, so it does not depend on how far the scheduler is with the run.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            policy = await connection.get("/policy")
            nodes = [each async for page in connection.read_pages("/nodes") for each in page["nodes"]]
    except (TrainbusError, TimeoutError):
        return ""
    return describe_shortage(spec, nodes, policy["policy"].get("pools", {}).get("pools", ()))


def describe_shortage(spec: RunFields, nodes: Iterable[Mapping[str, Any]], pools: Iterable[Mapping[str, Any]]) -> str:
    """Return why no nodes of these, and no more of these pools, have the slots that a run needs at least; '' else.

    Shares of accelerators and MIG slices are left to the scheduler: of those, more go on a node than it has slots.
    """
    kinds = spec.resources.accelerators
    if spec.resources.share != 1 or spec.resources.mig_profile is not None:
        return ""
    present = [each for each in nodes if each["state"] not in GONE_STATES]
    counts = Counter(each["labels"].get("pool") for each in present)
    there = sum(each["slots"] for each in present if not kinds or each["accelerator"] in kinds)
    addable = sum(
        max(0, pool.get("max_nodes", 0) - counts[pool["name"]]) * pool.get("slots_per_node", 1)
        for pool in pools
        if not kinds or pool.get("accelerator", "cpu") in kinds
    )
    need = spec.slots.min
    if need <= there + addable:
        return ""
    of_kind = f" with {' or '.join(kinds)}" if kinds else ""
    more = f", and the policy's pools add at most {addable}" if addable else ""
    remedy = f", or submit it again with at most {there + addable} (--slots)" if there + addable else ""
    return (
        f"it needs at least {plural(need, 'slot')}{of_kind}, and the nodes have {there}{more}: it waits until more "
        f"nodes join{remedy}"
    )
