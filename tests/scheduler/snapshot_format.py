"""What a snapshot of the scheduler depends on: how a cluster is saved, and what the facts add up to.

Both have a digest in ``snapshot_format.json``. ``python -m tests.scheduler.snapshot_format`` renews them, once
``FORMAT_VERSION`` has been raised. ``snapshot_facts.jsonl`` holds facts of every type that the fold handles. A change
of the fold that makes no difference to them goes unnoticed: add a fact to which it does.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from contracts.base import Fact
from contracts.earlier_events import read_data
from services.scheduler.core.fold import fold
from services.scheduler.core.state import codec
from services.scheduler.core.state.cluster import Allocation, Cluster
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.runs import COMMON, dump
from services.scheduler.snapshot import FORMAT_VERSION

FACTS = Path(__file__).with_name("snapshot_facts.jsonl")
COMMITTED = Path(__file__).with_name("snapshot_format.json")
RENEW = "python -m tests.scheduler.snapshot_format"
#: What of a JSON schema says how a value is written; not its names, texts and limits.
SHAPE = frozenset(
    {"type", "format", "enum", "const", "default", "required", "properties", "items", "prefixItems", "anyOf", "oneOf"}
    | {"additionalProperties", "$ref"}
)


@dataclass(frozen=True, slots=True)
class SnapshotFormat:
    """A version of the format, and the digests that belong to it."""

    version: int
    layout: str
    fold: str

    def check_version(self, committed: SnapshotFormat) -> str:
        """Return what is to be done before the digests may be committed; '' if nothing."""
        if (self.layout, self.fold) == (committed.layout, committed.fold) or self.version > committed.version:
            return ""
        changed = "how a cluster is saved" if self.layout != committed.layout else "what facts add up to"
        return (
            f"{changed} has changed, and snapshots of version {committed.version} must not be used any more: raise "
            f"FORMAT_VERSION in services/scheduler/snapshot.py, then run `{RENEW}`"
        )


def committed_format(path: Path = COMMITTED) -> SnapshotFormat:
    return SnapshotFormat(**json.loads(path.read_text()))


def current_format() -> SnapshotFormat:
    return SnapshotFormat(FORMAT_VERSION, digest_of(layout()), digest_of(fold_result(read_facts())))


def read_facts() -> list[tuple[Fact, int, datetime]]:
    """Return the committed facts as ``fold`` takes them."""
    found = []
    for line in FACTS.read_text().splitlines():
        sequence, at_s, type_name, data = json.loads(line)
        fact = read_data(type_name, data)
        assert isinstance(fact, Fact)
        found.append((fact, sequence, datetime.fromtimestamp(at_s, UTC)))
    return found


def layout() -> dict[str, Any]:
    """Return the fields and types of all that is saved; what has ``to_state`` shows in ``fold_result`` alone."""
    hints = get_type_hints(Cluster)
    found: dict[str, Any] = {
        name: "state" if hasattr(hints[name], "from_state") else shape_of(hints[name])
        for name in codec.save(Cluster())
        if name in hints and name != codec.RUNS
    }
    found |= {codec.RUNS: shape_of(list[Run]), "allocations": shape_of(list[Allocation])}
    return {**found, "sections": list(codec.save(Cluster())), "packed with": COMMON.decode()}


def shape_of(hint: Any) -> Any:
    """Return the JSON schema of the type without names and texts, with what it refers to in place."""
    schema = TypeAdapter(hint).json_schema(mode="serialization")
    return _inlined(schema, schema.get("$defs", {}), ())


def _inlined(value: Any, definitions: dict[str, Any], inside: tuple[str, ...]) -> Any:
    if isinstance(value, list):
        return [_inlined(each, definitions, inside) for each in value]
    if not isinstance(value, dict):
        return value
    if (reference := value.get("$ref")) is not None:
        name = reference.rpartition("/")[2]
        # (A type that holds itself: how far up it is.)
        own = inside.index(name) if name in inside else _inlined(definitions[name], definitions, (name, *inside))
        rest = {key: each for key, each in value.items() if key == "default"}
        return [own, rest] if rest else own
    kept = {key: each for key, each in value.items() if key in SHAPE}
    for key, each in kept.items():
        if key == "properties":
            kept[key] = {name: _inlined(field, definitions, inside) for name, field in each.items()}
        elif key not in ("default", "enum", "const", "required"):
            kept[key] = _inlined(each, definitions, inside)
    return kept


def fold_result(facts: list[tuple[Fact, int, datetime]]) -> dict[str, Any]:
    """Return the cluster after the facts, as it is saved; runs that are over as they are before they are packed."""
    cluster = fold(facts)
    sections = codec.save(cluster)
    for name in (codec.LENGTHS, codec.PACKED):
        del sections[name]
    sections["over/runs"] = dump(cluster.runs[run_id] for run_id in cluster.runs.packed)
    ids = sections.pop(codec.IDS).decode().split("\n")
    return {**{name: json.loads(content) for name, content in sections.items()}, codec.IDS: ids}


def digest_of(value: Any) -> str:
    """Return a digest that neither the order of a set nor the last bits of a number change."""
    return hashlib.sha256(json.dumps(_canonical(value), sort_keys=True).encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _canonical(each) for key, each in value.items()}
    if isinstance(value, list):
        found = [_canonical(each) for each in value]
        return sorted(found) if all(isinstance(each, str) for each in found) else found
    return value


def renew(current: SnapshotFormat, path: Path = COMMITTED) -> str:
    """Write the digests of this version; return why that is refused, '' if it is not."""
    if problem := current.check_version(committed_format(path)):
        return problem
    path.write_text(json.dumps(asdict(current), indent=1) + "\n")
    return ""


def handled_types() -> Iterator[type[Fact]]:
    """Yield each type of fact that changes a cluster."""
    from contracts.events import capacity, node, run
    from services.scheduler.core.fold import _RUN_FACTS

    yield from _RUN_FACTS
    yield from (run.RunAccepted, run.RunRejected)
    yield from (capacity.CapacityWanted, capacity.PolicyAdopted)
    yield from node.NodeFact.__subclasses__()


if __name__ == "__main__":
    sys.exit(renew(current_format()) or None)
