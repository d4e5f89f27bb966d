"""Spot or on-demand, on the real availability of spot GPUs: what a run costs, and when it is done.

    python -m loadtest.scheduler.spot FOLDER [--work-h 24] [--discount 0.7]

``FOLDER`` has files as of skypilot-org/spot-traces (one a zone and kind of machine):
``{"metadata": {"gap_seconds": 600}, "data": [1, 0, ...]}``. Runs are begun every few hours of the last two thirds of
each trace, on spot alone (waiting whenever there is none), on demand alone, and as the scheduler chooses: by
``pools.in_order``, with how often nodes were taken away *until then*; where there is no spot, after
``pools.patience_s``, on demand, to its end. Cost and time are over those on demand; those on spot alone are of the
runs that were done by the trace's end.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from loadtest.common import report
from services.scheduler.core.place import pools

#: Before anything was seen, a node is taken to be taken away once in so many hours.
PRIOR_H = 12.0
#: A run is begun so often.
EVERY_H = 3
#: The first part of each trace is for learning how often nodes are taken away.
LEARNED = 1 / 3


@dataclass(frozen=True, slots=True)
class Trace:
    """When spot machines of one kind could be had in one zone."""

    name: str
    gap_s: float
    there: tuple[bool, ...]

    @classmethod
    def read(cls, path: Path) -> Trace:
        content = json.loads(path.read_text())
        return cls(path.stem, float(content["metadata"]["gap_seconds"]), tuple(map(bool, content["data"])))

    @property
    def end_s(self) -> float:
        return len(self.there) * self.gap_s

    def at(self, time_s: float) -> bool:
        return self.there[min(int(time_s // self.gap_s), len(self.there) - 1)]

    def changes_s(self, time_s: float) -> float:
        """When it next turns from what it is; infinite if not before the end."""
        place = int(time_s // self.gap_s)
        for number in range(place + 1, len(self.there)):
            if self.there[number] != self.there[place]:
                return number * self.gap_s
        return math.inf

    def per_hour(self, until_s: float) -> float:
        """How often machines were taken away in an hour that they could be had, as far as anybody knew then."""
        seen = self.there[: int(until_s // self.gap_s)]
        gone = sum(before and not after for before, after in pairwise(seen))
        return (gone + 1) / (sum(seen) * self.gap_s / 3600 + PRIOR_H)


@dataclass(slots=True)
class Outcome:
    """What became of a run: paid hours of a machine times its price on demand being 1, and its hours to the end."""

    cost: float = 0.0
    took_h: float = math.nan
    interruptions: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    work_s: float
    interval_s: float
    restart_s: float
    price: float


def on_spot(trace: Trace, begin_s: float, job: Job, left_s: float, first: bool) -> Iterator[tuple[str, float, float]]:
    """Try to go on with ``left_s`` of work on spot that is there: (what ended it, when, work that is left)."""
    ready_s = begin_s + (0.0 if first else job.restart_s)
    gone_s = trace.changes_s(begin_s)
    if ready_s + left_s <= gone_s:
        yield "done", ready_s + left_s, 0.0
    else:
        worked_s = max(gone_s - ready_s, 0.0)
        kept_s = 0.0 if math.isinf(job.interval_s) else worked_s // job.interval_s * job.interval_s
        yield "gone", gone_s, left_s - kept_s


def run(trace: Trace, begin_s: float, job: Job, policy: Policy | None, spec: RunSpec) -> Outcome:
    """One run: on spot alone, or as the policy chooses (its spot pool's rate is set to what is known by then)."""
    found, now_s, left_s = Outcome(), begin_s, job.work_s
    while True:
        if policy is not None and _prefers_on_demand(trace, now_s, left_s, policy, spec):
            return _on_demand(found, now_s, begin_s, left_s, job)
        if not trace.at(now_s):
            back_s = trace.changes_s(now_s)
            if policy is not None and back_s - now_s > policy.pools.patience_s:
                return _on_demand(found, now_s + policy.pools.patience_s, begin_s, left_s, job)
            now_s = back_s
        if math.isinf(now_s):
            return found
        [(how, until_s, left_s)] = on_spot(trace, now_s, job, left_s, found.cost == 0)
        if math.isinf(until_s):
            return found
        found.cost += (until_s - now_s) / 3600 * job.price
        if how == "done":
            found.took_h = (until_s - begin_s) / 3600
            return found
        found.interruptions += 1
        now_s = until_s


def _prefers_on_demand(trace: Trace, now_s: float, left_s: float, policy: Policy, spec: RunSpec) -> bool:
    spot, safe = policy.pools.pools
    known = spot.model_copy(update={"interruptions_per_hour": trace.per_hour(now_s)})
    now_policy = policy.model_copy(update={"pools": policy.pools.model_copy(update={"pools": (known, safe)})})
    return pools.in_order(spec, now_policy, left_s)[0].name == safe.name


def _on_demand(found: Outcome, now_s: float, begin_s: float, left_s: float, job: Job) -> Outcome:
    restart_s = job.restart_s if found.cost else 0.0
    found.cost += (left_s + restart_s) / 3600
    found.took_h = (now_s + restart_s + left_s - begin_s) / 3600
    return found


def study(traces: list[Trace], job: Job, spec: RunSpec, policy: Policy) -> dict[str, dict[str, Any]]:
    """Means: trace -> figures, and ``all``."""
    work_h = job.work_s / 3600
    found: dict[str, dict[str, Any]] = {}
    everything: dict[str, list[Outcome]] = {"spot": [], "chosen": []}
    unfinished = begun = 0
    for trace in traces:
        own: dict[str, list[Outcome]] = {"spot": [], "chosen": []}
        begin_s = LEARNED * trace.end_s
        late = 0
        while begin_s + job.work_s < trace.end_s:
            alone = run(trace, begin_s, job, None, spec)
            chosen = run(trace, begin_s, job, policy, spec)
            begun += 1
            late += math.isnan(alone.took_h)
            if not math.isnan(alone.took_h):
                own["spot"].append(alone)
            own["chosen"].append(chosen)
            begin_s += EVERY_H * 3600
        unfinished += late
        for name, outcomes in own.items():
            everything[name] += outcomes
        found[trace.name] = {**_means(own, work_h), "spot_not_done_in_time": late}
    found["all"] = {**_means(everything, work_h), "spot_not_done_in_time": unfinished, "runs": begun}
    return found


def _means(outcomes: dict[str, list[Outcome]], work_h: float) -> dict[str, Any]:
    """Cost and time over what they are on demand."""
    found: dict[str, Any] = {}
    for name, each in outcomes.items():
        if each:
            found[f"{name}_cost"] = round(sum(outcome.cost for outcome in each) / len(each) / work_h, 3)
            found[f"{name}_time"] = round(sum(outcome.took_h for outcome in each) / len(each) / work_h, 3)
            found[f"{name}_longest"] = round(max(outcome.took_h for outcome in each) / work_h, 2)
            found[f"{name}_interruptions"] = round(sum(outcome.interruptions for outcome in each) / len(each), 2)
    return found


def spec_of(interval_s: float | None) -> RunSpec:
    """A run with checkpoints so often, or a command without any."""
    body: dict[str, Any] = {"name": "study", "slots": 1, "scheduling": {"tier": "research"}}
    if interval_s is None:
        return RunSpec.model_validate({**body, "command": ["true"]})
    code = {"uri": "s3://code/p.tar.gz", "sha256": "0" * 64}
    training = {"max_steps": 1, "checkpoint_every_s": interval_s}
    return RunSpec.model_validate({**body, "task": "m:T", "code": code, "training": training})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work-h", type=float, default=24.0)
    parser.add_argument("--discount", type=float, default=0.7)
    parser.add_argument(
        "--restart-s", type=float, default=300.0, help="what starting again costs: machine, data, state"
    )
    given = parser.parse_args()
    traces = [Trace.read(path) for path in sorted(given.folder.glob("*.json"))]
    rows, figures = [], {}
    for name, interval_s in (("checkpoints every 10 min", 600.0), ("every hour", 3600.0), ("a command without", None)):
        price = 1 - given.discount
        job = Job(given.work_h * 3600, interval_s or math.inf, given.restart_s, price)
        policy = Policy.model_validate(
            {
                "pools": {
                    "pools": [
                        {"name": "spot", "capacity": "spot", "price_per_slot_hour": price, "max_nodes": 1},
                        {"name": "safe", "price_per_slot_hour": 1.0, "max_nodes": 1},
                    ],
                    "tiers": {"research": ["spot", "on-demand"]},
                    "restart_s": given.restart_s,
                }
            }
        )
        found = figures[name] = study(traces, job, spec_of(interval_s), policy)
        every = found["all"]
        late = f"{every['spot_not_done_in_time']} of {every['runs']} not done by the trace's end"
        chosen = f"{every['chosen_cost']:.2f} / {every['chosen_time']:.2f} / {every['chosen_longest']:.1f}"
        spot = late
        if "spot_cost" in every:
            spot = f"{every['spot_cost']:.2f} / {every['spot_time']:.2f} / {every['spot_longest']:.1f}; {late}"
        rows.append((f"{name}: cost / time / longest, over on demand", f"as chosen: {chosen}", f"spot alone: {spot}"))
    report("spot", rows, {"work_h": given.work_h, "discount": given.discount, "studies": figures})


if __name__ == "__main__":
    main()
