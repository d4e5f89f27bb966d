"""Check the changes that ``why`` names: each is made in a replay that is cloned at that moment.

    python -m loadtest.scheduler.why --trace FILE --gpus 400 --sample 1000

The trace is played; at random moments a run that waits is asked about. With the first change that is named, the log so
far is folded again as if the run had been requested like that, and one more cycle runs: it must place the run,
or the named runs must be asked to release their slots.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from contracts.base import Fact
from contracts.events.run import RunAccepted
from contracts.scheduling import Policy
from loadtest.common import report
from services.scheduler.core.decide import decide
from services.scheduler.core.decisions import PlaceRun, StopRun
from services.scheduler.core.explain.request_changes import with_fields
from services.scheduler.core.explain.why import answer
from services.scheduler.core.fold import fold
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.policies import with_settings
from trainbus.operate.simulation.agents import Agents
from trainbus.operate.simulation.engine import Core, play_trace
from trainbus.operate.simulation.generate import jobs
from trainbus.operate.simulation.traces import at, read_pai


@dataclass(slots=True)
class Tally:
    asked: int = 0
    without: int = 0
    named: Counter[str] = field(default_factory=Counter)
    true: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)


class Recorder:
    """Keeps the log."""

    def __init__(self) -> None:
        self.log: list[tuple[Fact, int, float]] = []

    def __call__(self, fact: Fact, sequence: int, now_s: float) -> None:
        self.log.append((fact, sequence, now_s))

    def folded_with(self, run_id: str, fields: dict[str, Any]) -> Cluster:
        """Fold the cluster again from a log in which the run was requested with these fields."""

        def changed_log() -> Any:
            for fact, sequence, now_s in self.log:
                changed = fact
                if isinstance(fact, RunAccepted) and fact.run_id == run_id:
                    changed = fact.model_copy(update={"spec": with_fields(fact.spec, fields)})
                yield changed, sequence, at(now_s)

        return fold(changed_log())


def check(core: Core, recorder: Recorder, policy: Policy, run_id: str, now_s: float, tally: Tally) -> None:
    """Ask about one run, and try what is answered."""
    found = answer(core.cluster, run_id, at(now_s), policy)
    changes = found.get("changes")
    if changes is None:
        return
    tally.asked += 1
    tally.without += not changes
    for change in changes[:1]:
        kind = ",".join(change["fields"])
        tally.named[kind] += 1
        made = decide(recorder.folded_with(run_id, change["fields"]), at(now_s), policy)
        placed = any(isinstance(each, PlaceRun) and each.run_id == run_id for each in made)
        victims = sorted(each.run_id for each in made if isinstance(each, StopRun) and each.preemptor == run_id)
        came = placed if change["starts"] == "now" else victims == sorted(change["victims"])
        tally.true[kind] += came
        if not came:
            tally.wrong.append({"run_id": run_id, "at_s": now_s, "change": change, "code": found["code"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="job log in the columns of pai; without: one of our own making")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--policy", help="a name or a file; default: by priority, then submission")
    parser.add_argument("--jobs", type=int, default=1500, help="how much of the trace is played")
    parser.add_argument("--sample", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    trace = (
        read_pai(arguments.trace, arguments.gpus)
        if arguments.trace
        else jobs(arguments.jobs, arguments.gpus, 1, load=1.5)
    )
    policy = with_settings(arguments.policy, []) if arguments.policy else Policy()
    rng, recorder, tally = random.Random(arguments.seed), Recorder(), Tally()
    core = Core(policy, [recorder])
    chosen = trace.jobs[: arguments.jobs]
    player = play_trace(
        type(trace)(trace.nodes, chosen, trace.name),
        Agents({job.run_id: job.duration_s for job in chosen}, 60.0),
    )
    share = 4.0 * arguments.sample / len(chosen)
    with Progress(transient=True) as progress:
        bar = progress.add_task("runs asked about", total=arguments.sample)
        turn = next(player)
        try:
            while tally.asked < arguments.sample:
                outcome = core.turn(turn)
                # At rest: what was decided at this instant is folded.
                if not outcome.facts and core.cluster.queued and rng.random() < share:
                    run_id = rng.choice(list(core.cluster.queued))
                    check(core, recorder, policy, run_id, turn.now_s, tally)
                    progress.update(bar, completed=tally.asked)
                turn = player.send(outcome)
        except StopIteration:
            pass
    named, true = tally.named.total(), tally.true.total()
    kinds = ", ".join(f"{kind}: {tally.true[kind]} of {count}" for kind, count in tally.named.most_common())
    report(
        "why",
        [
            (
                "waiting runs asked about",
                f"{tally.asked}, {tally.without} of them without a change that helps",
                "1,000",
            ),
            ("smallest change starts the run as predicted", f"{true / max(named, 1):.2%}", "99 %"),
            ("  by what is changed", kinds, ""),
        ],
        {"asked": tally.asked, "without": tally.without, "named": named, "true": true, "wrong": tally.wrong[:20]},
    )


if __name__ == "__main__":
    main()
