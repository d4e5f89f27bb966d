"""The smallest changes of a request that would start a run that waits: every one that is named has been tried.

A change is tried by running the cycle once more, for a cluster in which the run had been submitted like that. So every
rule of the policy and every other run that waits is taken into account, and the answer comes true.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from contracts.events.train import TrainRequested
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.decide import run_steps
from services.scheduler.core.decisions import PlaceRun, StopRun
from services.scheduler.core.reasons import Why
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.durations import run_kind_of
from services.scheduler.core.state.run import Run
from services.scheduler.core.state.slot_spec import slot_spec_of

#: How many kinds of accelerator, clusters and teams are tried.
MAX_TRIED_VALUES = 20
HIGHEST_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """What to ask for instead, and what then happens."""

    #: Dotted field of the request -> its new value.
    fields: dict[str, Any]
    #: ``now``: its slots are free; ``after preemption``: others are preempted for them, and have their grace time.
    starts: Literal["now", "after preemption"]
    victims: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        asked = " and ".join(f"{name} {_shown(value)}" for name, value in self.fields.items())
        if self.starts == "now":
            return f"with {asked} it would start now"
        names = ", ".join(self.victims[:5]) + (f" and {len(self.victims) - 5} more" if len(self.victims) > 5 else "")
        have = "has released its" if len(self.victims) == 1 else "have released their"
        return f"with {asked} it would start as soon as {names} {have} slots"


def smallest_changes(cluster: Cluster, run: Run, now: datetime, policy: Policy, why: Why) -> list[Change]:
    """Changes of the request each of which would start the run, the smallest of each kind; fewer slots first."""
    attempt = Attempt(cluster, run, now, policy)
    kinds = (_fewer_slots, _other_lie, _other_kind, _shorter, _other_team, _higher_priority)
    return [change for kind in kinds for change in kind(attempt, why)]


class Attempt:
    """Runs the cycle once more, with another request of the run."""

    def __init__(self, cluster: Cluster, run: Run, now: datetime, policy: Policy) -> None:
        self.cluster, self.run, self.now, self.policy = cluster, run, now, policy

    def starts(self, fields: dict[str, Any]) -> Change | None:
        """What happens if these fields of the request are as given; None: it still waits."""
        try:
            spec = with_fields(self.run.spec, fields)
        except ValueError:
            return None
        clone = self.changed(spec)
        made = run_steps(clone, self.now, self.policy, about=self.run.run_id).decisions
        if any(isinstance(each, PlaceRun) and each.run_id == self.run.run_id for each in made):
            return Change(fields, "now")
        victims = [each.run_id for each in made if isinstance(each, StopRun) and each.preemptor == self.run.run_id]
        return Change(fields, "after preemption", tuple(victims)) if victims else None

    def changed(self, spec: RunSpec) -> Cluster:
        """Return the cluster as it would be with this request."""
        clone, slots = fork_cluster(self.cluster), spec.slots
        run = replace(
            self.run,
            spec=spec,
            slot_spec=slot_spec_of(spec),
            least=slots.min,
            most=slots.max,
            kind=run_kind_of(spec),
            request=None,
        )
        clone.runs[run.run_id] = run
        clone.index.touched[run.run_id] = None
        return clone


def fork_cluster(cluster: Cluster) -> Cluster:
    """Return a cluster in which a cycle may be tried: what the cycle changes is a copy, and the rest is shared."""
    clone = copy.copy(cluster)
    clone.runs = copy.copy(cluster.runs)
    clone.index = cluster.index.fork()
    return clone


def with_fields(spec: RunSpec, fields: dict[str, Any]) -> RunSpec:
    """The request with these (dotted) fields changed; ValueError if it is then not valid."""
    data = spec.model_dump(exclude_unset=True)
    for name, value in fields.items():
        *path, last = name.split(".")
        inner = data
        for step in path:
            found = inner.get(step)
            inner[step] = found if isinstance(found, dict) else {}
            inner = inner[step]
        inner[last] = value
    if "slots.min" in fields and "max" not in data["slots"]:
        data["slots"]["max"] = max(spec.slots.max, fields["slots.min"])
    return TrainRequested.model_validate(data).run_spec


def _fewer_slots(attempt: Attempt, why: Why) -> Iterator[Change]:
    """The most slots with which it would start; fewer than those need not be tried if one bundle does not fit."""
    bundle = attempt.run.spec.gang.bundle
    most = attempt.run.spec.slots.min // bundle - 1
    best = _largest(most, lambda count: attempt.starts({"slots.min": count * bundle}))
    if best is not None:
        yield best


def _largest(most: int, tried: Callable[[int], Change | None]) -> Change | None:
    """The change for the largest count of 1 to ``most`` that works, if fewer always work where more do."""
    low, high, best = 1, most, None
    while low <= high:
        middle = (low + high) // 2
        found = tried(middle)
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle + 1
    return best


def _other_lie(attempt: Attempt, why: Why) -> Iterator[Change]:
    """Laxer wishes for how its slots lie together."""
    spec = attempt.run.spec
    laxer: list[dict[str, Any]] = []
    if spec.gang.strict:
        laxer.append({"gang.strict": False})
    if spec.gang.apart:
        laxer.append({"gang.apart": False})
    if spec.gang.bundle > 1:
        laxer.append({"gang.bundle": 1})
    if attempt.run.exact:
        laxer.append({"training.heterogeneous_nodes": "allow"})
    yield from _those_that_work(attempt, laxer)


def _other_kind(attempt: Attempt, why: Why) -> Iterator[Change]:
    """Other accelerators, capacity or clusters."""
    spec, nodes = attempt.run.spec, [node for node in attempt.cluster.nodes.values() if node.is_schedulable]
    others: list[dict[str, Any]] = []
    if spec.resources.accelerators:
        kinds = sorted({node.accelerator for node in nodes} - set(spec.resources.accelerators))
        others += [{"resources.accelerators": [kind]} for kind in kinds[:MAX_TRIED_VALUES]]
    if spec.scheduling.capacity != "any":
        others.append({"scheduling.capacity": "any"})
    if spec.scheduling.clusters:
        clusters = sorted({node.labels.get("cluster", "") for node in nodes} - set(spec.scheduling.clusters) - {""})
        others += [{"scheduling.clusters": [name]} for name in clusters[:MAX_TRIED_VALUES]]
    yield from _those_that_work(attempt, others)


def _shorter(attempt: Attempt, why: Why) -> Iterator[Change]:
    """A limit so short that it is done before slots are needed that are kept for another run."""
    if why.code == "reserved" and why.start_by is not None:
        spare_s = (why.start_by - attempt.now).total_seconds() - attempt.run.spec.grace_s + attempt.run.run_s
        if spare_s >= 1:
            yield from _those_that_work(attempt, [{"scheduling.limit_s": float(int(spare_s))}])


def _other_team(attempt: Attempt, why: Why) -> Iterator[Change]:
    """Another team's queue, where rules about teams bind."""
    policy, own = attempt.policy, attempt.run.spec.team
    if why.code not in ("quota", "ceiling") and "fair-share" not in policy.order.by:
        return
    teams = {quota.team for quota in policy.admit.quotas} | set(policy.fair_share.weights)
    yield from _those_that_work(attempt, [{"team": team} for team in sorted(teams - {own})[:MAX_TRIED_VALUES]])


def _higher_priority(attempt: Attempt, why: Why) -> Iterator[Change]:
    """The least priority that would do."""
    if "priority" not in attempt.policy.order.by:
        return
    cluster, own = attempt.cluster, attempt.run.spec.priority
    others = {cluster.runs[run_id].spec.priority for run_id in (*cluster.queued, *cluster.active)}
    steps = sorted({priority + 1 for priority in others if own <= priority < HIGHEST_PRIORITY}, reverse=True)
    best = _largest(len(steps), lambda count: attempt.starts({"priority": steps[count - 1]}))
    if best is not None:
        yield best


def _those_that_work(attempt: Attempt, tried: list[dict[str, Any]]) -> Iterator[Change]:
    for fields in tried:
        if (change := attempt.starts(fields)) is not None:
            yield change


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
