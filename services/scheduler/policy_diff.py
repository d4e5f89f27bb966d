"""What another policy would change: its settings, and what the next cycles would decide about the runs of now."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from contracts.events.capacity import PolicyAdopted
from contracts.events.run import RunCancelled, RunCompleted, RunFact, RunFailed, RunPlaced, RunStopping
from contracts.scheduling import Policy
from services.scheduler.core.decisions import NOTHING_LEFT, decision_record, fact_of
from services.scheduler.core.fold import apply
from services.scheduler.core.quarantine import describe_quarantine, run_cycle
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import EPOCH

#: Cycles that are simulated: what one starts, the next one may preempt. They are at rest after two or three.
MAX_CYCLES = 10
#: Affected runs that are named; all are counted.
MAX_NAMED_RUNS = 200
#: What names a row of a list, so that one that is added is not taken for a change of all that follow.
ROW_KEYS = {"admit.quotas": ("team", "accelerator"), "pools.pools": ("name",)}
#: What can become of a run, what costs it the most first.
OUTCOMES = ("failed", "cancelled", "preempted", "resized", "waits", "placed", "completed", "goes on")


class Outcome(NamedTuple):
    """What becomes of a run. ``detail`` is the code of a wait, the slots of a placement, or the reason."""

    what: str
    detail: str = ""


#: What becomes of a run in the cycles, in order.
Outcomes = tuple[Outcome, ...]


def diff_policy(
    cluster: Cluster, now: datetime, in_force: Policy, policy: Policy, reachable_since: datetime = EPOCH
) -> dict[str, Any]:
    """Return as JSON what ``policy`` in place of ``in_force`` changes. It changes the cluster: call it on a copy."""
    other = copy.deepcopy(cluster)
    apply(other, PolicyAdopted(digest=policy.digest, policy=policy), cluster.sequence, now)
    sequence = cluster.sequence
    before, after = (
        simulate_cycles(copied, now, chosen, reachable_since)
        for copied, chosen in ((cluster, in_force), (other, policy))
    )
    failing = describe_quarantine(cluster)
    affected = [run_id for run_id in before if before[run_id] != after[run_id]]
    affected.sort(key=lambda run_id: OUTCOMES.index(after[run_id][-1].what))
    return {
        "in_force": {"name": in_force.name, "digest": in_force.digest},
        "candidate": {"name": policy.name, "digest": policy.digest},
        "changes": diff_settings(in_force, policy),
        "sequence": sequence,
        "at": now.isoformat(),
        "runs_examined": len(before),
        "runs_affected": len(affected),
        "outcomes": {"in_force": _count(before), "candidate": _count(after)},
        "runs": [_row(cluster, run_id, before[run_id], after[run_id]) for run_id in affected[:MAX_NAMED_RUNS]],
        #: Runs and nodes on which a cycle fails by the candidate alone.
        "failures": {
            what: {name: reason for name, reason in found.items() if name not in failing[what]}
            for what, found in describe_quarantine(other).items()
        },
    }


def simulate_cycles(
    cluster: Cluster, now: datetime, policy: Policy, reachable_since: datetime = EPOCH
) -> dict[str, Outcomes]:
    """Return what becomes of each run of now in the next cycles, until they decide nothing more.

    No time passes and no agent acts: a run that is asked to release its slots still has them in the end.
    """
    runs = [*cluster.unqueued, *cluster.queued, *cluster.active]
    found: defaultdict[str, list[Outcome]] = defaultdict(list)
    waits: dict[str, str] = {}
    left_over = NOTHING_LEFT
    for _ in range(MAX_CYCLES):
        record = decision_record(cluster, now, policy, reachable_since, left_over)
        result = run_cycle(cluster, now, policy, reachable_since, max_explained=0, left_over=left_over)
        waits |= {run_id: why.code for run_id, why in result.waits.items()}
        facts = [fact_of(decision, cluster, now, record) for decision in result.decisions]
        for fact in facts:
            apply(cluster, fact, cluster.sequence + 1, now)
            if isinstance(fact, RunFact) and (outcome := _outcome(fact)) is not None:
                found[fact.run_id].append(outcome)
        left_over = result.left_over
        if not facts and not any(left_over):
            break
    return {run_id: tuple(found.get(run_id) or (_at_rest(cluster, run_id, waits),)) for run_id in runs}


def _outcome(fact: RunFact) -> Outcome | None:
    match fact:
        case RunPlaced():
            return Outcome("placed", ", ".join(f"{each.node_id}:{len(each.slots)}" for each in fact.members))
        case RunStopping():
            return Outcome("resized" if fact.reason == "resized" else "preempted", fact.message)
        case RunFailed() | RunCancelled():
            return Outcome(fact.fact, fact.reason)
        case RunCompleted():
            return Outcome("completed")
    return None


def _at_rest(cluster: Cluster, run_id: str, waits: Mapping[str, str]) -> Outcome:
    """Return what becomes of a run about which nothing is decided."""
    return Outcome("waits", waits.get(run_id, "")) if run_id in cluster.queued else Outcome("goes on")


def _count(outcomes: Mapping[str, Outcomes]) -> dict[str, int]:
    return Counter(each[-1].what for each in outcomes.values())


def _row(cluster: Cluster, run_id: str, before: Outcomes, after: Outcomes) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "name": cluster.runs[run_id].spec.name,
        "in_force": [each._asdict() for each in before],
        "candidate": [each._asdict() for each in after],
    }


def diff_settings(old: Policy, new: Policy) -> list[dict[str, Any]]:
    """Return each setting that differs, by its dotted name, with both values; None: one of the two has none."""
    one, other = (dict(_flatten(policy.model_dump(mode="json"))) for policy in (old, new))
    return [
        {"setting": name, "in_force": one.get(name), "candidate": other.get(name)}
        for name in one | other
        if one.get(name) != other.get(name)
    ]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a policy; the rows of a list by what names them, where that names one each."""
    if isinstance(value, Mapping):
        for inner, part in value.items():
            # A team is a path, and a name in quotes in the file.
            label = inner if inner.replace("_", "").isalnum() else f'"{inner}"'
            yield from _flatten(part, f"{name}.{label}" if name else label)
    elif rows := _named_rows(value, ROW_KEYS.get(name, ())):
        for label, row in rows.items():
            yield from _flatten(row, f"{name}[{label}]")
    elif value != []:
        yield name, value


def _named_rows(value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the rows of a list by what names them; none if two have one name."""
    if not keys or not isinstance(value, list):
        return {}
    rows = {
        ",".join(str(row[key]) for key in keys if row[key] is not None): {
            name: part for name, part in row.items() if name not in keys
        }
        for row in value
    }
    return rows if len(rows) == len(value) else {}
