"""What is told of a run that needs more slots than there are and can be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from contracts.scheduling import Pool
from contracts.spec.run import RunSpec
from trainbus.client.capacity import describe_shortage


def node(slots: int = 2, **fields: Any) -> dict[str, Any]:
    return {"state": "up", "slots": slots, "accelerator": "cpu", "labels": {}, **fields}


def pool(max_nodes: int, slots_per_node: int, **fields: Any) -> dict[str, Any]:
    made = Pool(name="burst", max_nodes=max_nodes, slots_per_node=slots_per_node, **fields)
    return made.model_dump(mode="json", exclude_defaults=True)


FROM_POOL = {"labels": {"pool": "burst"}}
#: Case -> fields of the request, nodes, pools and what is told.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "there are enough": ({}, [node(), node()], [], ""),
    "too many": ({}, [node()], [], "needs at least 4 slots, and the nodes have 2: .* again with at most 2"),
    "no node": ({}, [], [], "the nodes have 0: it waits until more nodes join$"),
    "a node has left": ({}, [node(), node(state="lost")], [], "the nodes have 2:"),
    "a node is drained": ({}, [node(), node(state="draining")], [], ""),
    "an empty cluster scales up": ({}, [], [pool(2, 2)], ""),
    "a pool has too few": ({}, [node()], [pool(1, 1)], "have 2, and the policy's pools add at most 1: .*at most 3"),
    "a node of the pool is there": ({}, [node(1, **FROM_POOL)], [pool(3, 1)], "add at most 2"),
    "a pool that grew": ({}, [node(2, **FROM_POOL), node(2, **FROM_POOL)], [pool(1, 2)], ""),
    "another accelerator": (
        {"resources": {"accelerators": ["h100"]}}, [node(8)], [pool(9, 9)], "4 slots with h100, and the nodes have 0:"
    ),
    "the accelerator of a pool": (
        {"resources": {"accelerators": ["h100"]}}, [node(8)], [pool(1, 8, accelerator="h100")], ""
    ),
    "shares": ({"resources": {"share": 0.25}}, [node(1)], [], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_can_have_no_slots_is_told_so(case: str) -> None:
    fields, nodes, pools, text = CASES[case]
    spec = RunSpec.model_validate({"name": "run", "command": ["true"], "slots": {"min": 4, "max": 9}, **fields})
    found = describe_shortage(spec, nodes, pools)
    assert bool(found) == bool(text)
    assert re.search(text, found)
