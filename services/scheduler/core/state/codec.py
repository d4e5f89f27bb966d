"""A whole cluster as bytes and back, for snapshots. What was saved and loaded equals what was there.

The fields of ``Cluster`` are found by their annotations, so that a new one is saved without a word here; one whose type
is more than data has ``to_state`` and ``from_state``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from services.scheduler.core.state.cluster import Allocation, Cluster, Node
from services.scheduler.core.state.runs import Runs, dump, load

#: Sections of the runs that are over: their ids, a line each; the lengths of what they are packed to; all of it.
IDS, LENGTHS, PACKED = "over/ids", "over/lengths", "over/packed"
RUNS, NODES = "runs", "nodes"


def save(cluster: Cluster) -> dict[str, bytes]:
    """The cluster in sections. Takes a look at each run that is not over; the others are packed already."""
    packed = cluster.runs.packed
    sections = {
        RUNS: dump(cluster.runs.values()),
        IDS: "\n".join(packed).encode(),
        LENGTHS: json.dumps([len(content) for content in packed.values()]).encode(),
        PACKED: b"".join(packed.values()),
        NODES: json.dumps([_saved_node(node) for node in cluster.nodes.values()]).encode(),
    }
    for name, (write, _) in _codecs().items():
        sections[name] = write(getattr(cluster, name))
    return sections


def restore(sections: Mapping[str, bytes | memoryview]) -> Cluster:
    """The cluster that ``save`` was given.

    Raises:
        ValueError, KeyError: the sections are not those of such a cluster.
    """
    cluster = Cluster(**{name: read(bytes(sections[name])) for name, (_, read) in _codecs().items()})
    cluster.runs = Runs(((run.run_id, run) for run in load(bytes(sections[RUNS]))), _over(sections))
    cluster.nodes = {node.node_id: node for node in map(_restored_node, json.loads(bytes(sections[NODES])))}
    # What earlier cycles cached is computed again.
    for run_id in (*cluster.unqueued, *cluster.active, *cluster.queued):
        cluster.index.touch(run_id)
    return cluster


def _over(sections: Mapping[str, bytes | memoryview]) -> Iterator[tuple[str, bytes]]:
    ids, content, at = bytes(sections[IDS]).decode(), sections[PACKED], 0
    for run_id, length in zip(ids.split("\n") if ids else [], json.loads(bytes(sections[LENGTHS])), strict=True):
        yield run_id, bytes(content[at : at + length])
        at += length


#: What is in a node beside its plain fields.
_NODE_EXTRA = ("allocations", "free_milli", "free_cpu_milli", "free_memory_bytes")


def _saved_node(node: Node) -> dict[str, Any]:
    plain = _nodes().dump_python([node], mode="json", exclude={0: set(_NODE_EXTRA)})[0]
    allocations = _allocations().dump_python(list(node.allocations.items()), mode="json")
    return {
        "node": plain,
        "allocations": allocations,
        "free_milli": node.free_milli,
        "free_cpu_milli": node.free_cpu_milli,
        "free_memory_bytes": node.free_memory_bytes,
    }


def _restored_node(saved: dict[str, Any]) -> Node:
    (node,) = _nodes().validate_python([saved["node"]])
    node.allocations = dict(_allocations().validate_python(saved["allocations"]))
    # Set here, since a node that is made new has all of it left.
    node.free_milli = saved["free_milli"]
    node.free_cpu_milli, node.free_memory_bytes = saved["free_cpu_milli"], saved["free_memory_bytes"]
    return node


@cache
def _nodes() -> TypeAdapter[list[Node]]:
    return TypeAdapter(list[Node])


@cache
def _allocations() -> TypeAdapter[list[tuple[tuple[str, int], Allocation]]]:
    return TypeAdapter(list[tuple[tuple[str, int], Allocation]])


Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]


@cache
def _codecs() -> dict[str, Codec]:
    """Field of a cluster -> how it is written and read. Those that follow from the others are left out."""
    hints = get_type_hints(Cluster)
    names = [each.name for each in fields(Cluster) if each.compare and each.name not in (RUNS, NODES)]
    return {name: _codec(hints[name]) for name in names}


def _codec(hint: Any) -> Codec:
    if hasattr(hint, "from_state"):
        return (
            lambda value: json.dumps(value.to_state()).encode(),
            lambda content: hint.from_state(json.loads(content)),
        )
    # The settings of a list count for what is in it.
    adapter: TypeAdapter[Any] = TypeAdapter(tuple[hint], config=ConfigDict(ser_json_inf_nan="strings"))
    return (lambda value: adapter.dump_json((value,))), (lambda content: adapter.validate_json(content)[0])
