"""How exact a run is, read out of its facts: to the bit, or in its samples alone, and then since when and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.events.checkpoint import Exactness
from contracts.events.run import RunStarted
from contracts.spec.run import RunFields

#: What the environment of a generation records about kernels that are chosen by timing.
TIMED = "kernels.timed"
#: How many differences between two environments a sentence names.
MAX_NAMED_DIFFERENCES = 4


@dataclass(frozen=True, slots=True)
class Assessment:
    """How exact a run is. ``since``: the generation from which on it is not exact to the bit."""

    exactness: Exactness
    why: str = ""
    since: int | None = None


def assess(spec: RunFields | Mapping[str, Any] | None, starts: Iterable[RunStarted]) -> Assessment | None:
    """How exact a run is by what it asked for and how each generation started; None before anything is known."""
    if spec is None:
        return None
    body = spec.model_dump(mode="json", exclude_defaults=True) if isinstance(spec, RunFields) else spec
    training = body.get("training") or {}
    if body.get("kind", "train") != "train" or not body.get("task"):
        return None
    if training.get("logical_ranks") is None:
        return Assessment("samples-exact", "fast mode: training.logical_ranks is not set", 1)
    worst: dict[int, list[RunStarted]] = {}
    for start in starts:
        worst.setdefault(start.generation, []).append(start)
    since: int | None = None
    for generation in sorted(worst):
        lost = any(start.exactness == "samples-exact" for start in worst[generation])
        since = (since or generation) if lost else None
    if since is None:
        return Assessment("exact")
    return Assessment("samples-exact", f"since generation {since}: {_why(worst, since)}", since)


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What is not the same in two environments, as ``name: new instead of old``."""
    return [
        f"{name}: {new.get(name, 'nothing')} instead of {old.get(name, 'nothing')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _why(generations: Mapping[int, list[RunStarted]], since: int) -> str:
    here = generations[since]
    if timed := next((start.environment[TIMED] for start in here if TIMED in start.environment), ""):
        return f"kernels are chosen by timing: {timed}"
    before = [start for generation in sorted(generations) if generation < since for start in generations[generation]]
    for start in here:
        for other in [*before[-1:], *here]:
            found = differences(other.environment, start.environment)
            if other.environment_digest != start.environment_digest and found:
                more = f" and {len(found) - MAX_NAMED_DIFFERENCES} more" if len(found) > MAX_NAMED_DIFFERENCES else ""
                where = f"on {start.node_id}" if other.node_id == start.node_id else f"{start.node_id}, {other.node_id}"
                return f"{'; '.join(found[:MAX_NAMED_DIFFERENCES])}{more} ({where})"
    if before:
        return "its ranks went on in another environment"
    return "it started from a checkpoint of another environment, or one that is not exact"
