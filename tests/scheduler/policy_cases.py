"""Small crowded worlds under a policy with given features: each cycle is decided with shortcuts and without."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

from contracts.events.node import NodeJoined
from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleResult
from services.scheduler.core.decide import run_steps
from services.scheduler.core.decisions import decision_record, fact_of
from services.scheduler.core.policy_features import SHORTCUTS, Feature, PolicyFeatures, Shortcut
from services.scheduler.core.state.index import Index
from tests.scheduler.world import START, World, spec

#: A part of a policy that has nothing on: runs overtake each other, and none preempts another.
Settings = dict[str, Any]
OTHER_KEYS = ("deadline", "least-attained", "even-wait", "shortest-predicted", "submitted")
#: Features by which runs preempt others, without which most shortcuts have nothing to leave out.
PREEMPTIONS = frozenset({Feature.PREEMPTION_BY_PRIORITY, Feature.PREEMPTION_BY_OTHER_KEYS})
#: A feature -> others that are on with it.
IMPLIED: dict[Feature, frozenset[Feature]] = {
    Feature.LENDING: frozenset({Feature.QUOTAS}),
    Feature.SLOT_HOURS: frozenset({Feature.QUOTAS}),
    Feature.UNSTABLE_KEYS: frozenset({Feature.TURNS}),
    Feature.ASKS_TURNS: frozenset({Feature.TURNS}),
    Feature.BACKFILL: frozenset({Feature.RESERVATIONS}),
    Feature.RESERVATIONS: frozenset({Feature.BACKFILL}),
}
#: Shortcuts that do nothing without another one.
DEPENDENT = frozenset({Shortcut.PASSED_OVER, Shortcut.SAME_SLOTS, Shortcut.SEARCH_MEMORY})
#: Seeds that show what goes wrong without an entry of the table, and where to look for others.
SEEDS = Path(__file__).with_name("policy_seeds.json")
FIND = "python -m tests.scheduler.policy_cases"
MAX_SEEDS = 200
TEAMS = ("red", "red/one", "blue", None)


class PolicyDraft:
    """The parts of a policy, filled in one feature after the other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.by: list[str] = []
        self.preempt_by: list[str] = []
        self.order: Settings = {"skip": True, "attained": {"levels_slot_s": (20.0, 100.0)}}
        self.order["even_wait"] = {"short_slot_s": 10.0, "advantage": 1.0, "margin_s": 20.0}
        self.preemption: Settings = {"quantum_s": rng.choice([0.0, 5.0]), "min_run_s": rng.choice([0.0, 0.0, 5.0])}
        self.preemption["resume_cost_s"] = 0.0
        self.place: Settings = {}
        self.parts: dict[str, Any] = {"elastic": {"resize_interval_s": 0.0}}

    def add_key(self, key: str, *, preempts: bool) -> None:
        """Order by the key, first or last."""
        if key not in self.by:
            self.by.insert(self.rng.choice([0, len(self.by)]), key)
        if preempts:
            self.preempt_by.append(key)

    def add_quota(self, **limits: Any) -> None:
        """Give a team a quota."""
        quotas = self.parts.setdefault("admit", {}).setdefault("quotas", [])
        quotas.append({"team": self.rng.choice(["red", "blue", "red/one"]), **limits})

    def build(self) -> Policy:
        """Return the policy; with no key of its own it goes by one that preempts nobody."""
        if not self.by or self.rng.random() < 0.3:
            self.add_key(self.rng.choice(("submitted", "deadline")), preempts=False)
        order = {**self.order, "by": self.by}
        preemption = {**self.preemption, "by": self.preempt_by}
        return Policy.model_validate({"order": order, "preemption": preemption, "place": self.place, **self.parts})


def _quotas(draft: PolicyDraft) -> None:
    draft.rng.choice(
        [
            lambda: draft.parts.setdefault("admit", {}).update(max_slots_per_user=draft.rng.randint(2, 4)),
            lambda: draft.add_quota(ceiling=draft.rng.randint(1, 4)),
            lambda: draft.add_quota(ceiling=draft.rng.randint(1, 3), accelerator="A"),
        ]
    )()


def _maintenance(draft: PolicyDraft) -> None:
    start = START + timedelta(seconds=draft.rng.choice([60, 200, 500]))
    nodes = draft.rng.choice([("n0",), ("n1", "n2"), ()])
    window = {"start": start, "end": start + timedelta(seconds=draft.rng.choice([30, 5000])), "node_ids": nodes}
    draft.parts["maintenance"] = (window,)


def _pools(draft: PolicyDraft) -> None:
    prices = draft.rng.sample([1.0, 2.0], 2)
    names = [{"name": name, "price_per_slot_hour": price} for name, price in zip("pq", prices, strict=True)]
    draft.parts["pools"] = {"pools": names}


def _backfill(draft: PolicyDraft) -> None:
    kind = draft.rng.choice(["easy", "conservative"])
    draft.parts["reserve"] = {"backfill": kind, "promise_slots": draft.rng.choice([None, 2])}


def _unstable(draft: PolicyDraft) -> None:
    draft.add_key(draft.rng.choice(("least-attained", "even-wait")), preempts=False)
    draft.preemption["time_slice_s"] = 10.0


def _wait_limit(draft: PolicyDraft) -> None:
    draft.add_key("least-attained", preempts=False)
    draft.order["attained"] = {"levels_slot_s": (20.0, 100.0), "lift_after_s": 30.0}


def _fair_share(draft: PolicyDraft) -> None:
    draft.add_key("fair-share", preempts=draft.rng.random() < 0.5)
    draft.parts["fair_share"] = {"half_life_s": 600.0}


#: A feature -> what puts it into a policy. What depends on a run is on for about half of all runs.
DRAFTS: dict[Feature, Callable[[PolicyDraft], Any]] = {
    Feature.QUOTAS: _quotas,
    Feature.LENDING: lambda draft: draft.add_quota(slots=draft.rng.randint(1, 4)),
    Feature.SLOT_HOURS: lambda draft: draft.add_quota(slot_hours=0.1, period_h=1.0),
    Feature.FAIR_SHARE: _fair_share,
    Feature.OVERTAKERS: lambda draft: draft.preemption.update(overtakers=True),
    Feature.TURNS: lambda draft: draft.preemption.update(time_slice_s=draft.rng.choice([5.0, 20.0])),
    Feature.ASKS_TURNS: lambda draft: draft.preemption.update(time_slice_s=draft.rng.choice([5.0, 20.0])),
    Feature.PREEMPTION_BY_PRIORITY: lambda draft: draft.add_key("priority", preempts=True),
    Feature.PREEMPTION_BY_OTHER_KEYS: lambda draft: draft.add_key(draft.rng.choice(OTHER_KEYS), preempts=True),
    Feature.UNSTABLE_KEYS: _unstable,
    Feature.WAIT_LIMIT: _wait_limit,
    Feature.STRICT_ORDER: lambda draft: draft.order.update(skip=False),
    Feature.BACKFILL: _backfill,
    Feature.RESERVATIONS: _backfill,
    Feature.MAINTENANCE: _maintenance,
    Feature.OTHER_STRATEGY: lambda draft: draft.place.update(by=draft.rng.choice(["spread", "balanced", "fgd"])),
    Feature.SCARCE: lambda draft: draft.place.update(scarce=draft.rng.choice([("A",), ("B",)])),
    Feature.POOLS: _pools,
}


def policy_with(features: list[Feature], rng: random.Random) -> Policy:
    """Return a policy in which at least these features are on."""
    draft = PolicyDraft(rng)
    for feature in features:
        DRAFTS[feature](draft)
    return draft.build()


@contextmanager
def allowing(allowed: frozenset[Shortcut]) -> Iterator[None]:
    """Rule out all other shortcuts, whatever the features."""
    allows = PolicyFeatures.allows
    with patch.object(PolicyFeatures, "allows", lambda self, shortcut: shortcut in allowed and allows(self, shortcut)):
        yield


class ComparedWorld(World):
    """A world in which each cycle decides the same without shortcuts."""

    def __init__(self, policy: Policy, rng: random.Random, allowed: frozenset[Shortcut]) -> None:
        super().__init__(policy)
        self.rng, self.allowed = rng, allowed
        count, is_mixed = rng.randint(1, 3), rng.random() < 0.5
        for number in range(count):
            node: dict[str, Any] = {"node_id": f"n{number}", "incarnation": f"n{number}-1", "address": "h"}
            node["accelerator"] = "AB"[number % 2] if is_mixed else "A"
            node["labels"] = {"pool": "pq"[number % 2]}
            self.publish(NodeJoined(**node, slots=rng.randint(1, 3), lease_ttl_s=3))

    def compare(self) -> None:
        """Decide with the shortcuts and without any, compare, and publish the decisions."""
        fresh = copy.copy(self.cluster)
        fresh.index = Index()
        fresh.index.unsettled.update(dict.fromkeys(fresh.runs))
        with allowing(frozenset()):
            expected = run_steps(fresh, self.now, self.policy, left_over=self.left_over)
        with allowing(self.allowed):
            found = run_steps(self.cluster, self.now, self.policy, left_over=self.left_over)
        assert _texts(found) == _texts(expected)
        made = decision_record(self.cluster, self.now, self.policy, left_over=self.left_over)
        self.left_over = found.left_over
        for decision in found.decisions:
            self.publish(fact_of(decision, self.cluster, self.now, made))

    def act(self) -> None:
        """Submit a run, let time pass, or let an agent do what is next."""
        self.rng.choice([self._submit, self._submit, self._wait, self._act_on_run, self._act_on_run])()

    def _wait(self) -> None:
        # Never a round time: what changes at one counts a little later where it is remembered (``queue.AFTER_S``).
        self.wait(self.rng.choice([1.0, 3.0, 11.0, 40.0]) + self.rng.random())

    def _submit(self) -> None:
        rng = self.rng
        least = rng.choice([1, 1, 2, 3])
        scheduling: dict[str, Any] = {"time_slice": rng.random() < 0.6, "preemptible": rng.random() < 0.9}
        if rng.random() < 0.5:
            scheduling["limit_s"] = rng.choice([20.0, 100.0, 1000.0])
        if rng.random() < 0.5:
            scheduling["deadline"] = (START + timedelta(seconds=rng.choice([100, 200, 300]))).isoformat()
        more: dict[str, Any] = {"team": rng.choice(TEAMS), "user": rng.choice(["ada", "bob"]), "grace_s": 2}
        if rng.random() < 0.2:
            more["resources"] = rng.choice([{"accelerators": ["A"]}, {"share": 0.5}])
        wanted = {"min": least, "max": rng.choice([least, least, least + 1])}
        command = rng.random() < 0.1
        run = spec(wanted, rng.choice([0, 0, 1]), command=command, scheduling=scheduling, **more)
        self.accept(f"r{self.cluster.runs.total}", run)

    def _act_on_run(self) -> None:
        live = [run for run in self.cluster.runs.values() if run.live]
        if not live:
            return
        run, deed = self.rng.choice(live), self.rng.random()
        if run.stopping is not None or run.terminal:
            self.release(run.run_id)
        elif deed < 0.4:
            self.start(run.run_id)
        elif deed < 0.7 and run.spec.task:
            self.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1)
        elif deed < 0.85:
            if run.spec.task:
                self.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1, final=True)
            self.exit(run.run_id)


def _texts(result: CycleResult) -> list[str]:
    return sorted(map(repr, result.decisions))


def compare_cycles(seed: int, features: list[Feature], allowed: frozenset[Shortcut], cycles: int = 25) -> None:
    """Decide some cycles of a random world under a policy with these features, and compare each."""
    rng = random.Random(seed)
    world = ComparedWorld(policy_with(features, rng), rng, allowed)
    for _ in range(cycles):
        for _ in range(rng.randint(1, 3)):
            world.act()
        world.compare()


def compare_case(shortcut: Shortcut, feature: Feature, seed: int) -> None:
    """Compare cycles under a policy with the feature and random ones of those that do not rule the shortcut out.

    The shortcut is taken alone under an even seed, and together with all others under an odd one.
    """
    rng = random.Random(f"{seed}/{shortcut}/{feature}")
    # (Without the feature's own entry, so that the case is the same once that is deleted.)
    ruled_out = SHORTCUTS[shortcut].keys() - {feature}
    drawn = [each for each in Feature if rng.random() < (0.5 if each in PREEMPTIONS else 0.2) and each != feature]
    others = [each for each in drawn if ruled_out.isdisjoint({each} | IMPLIED.get(each, frozenset()))]
    is_alone = seed % 2 == 0 and shortcut not in DEPENDENT
    compare_cycles(seed, [feature, *others], frozenset({shortcut} if is_alone else Shortcut))


def is_equal(shortcut: Shortcut, feature: Feature, seed: int) -> bool:
    """Whether all cycles of the case decide the same with the shortcuts."""
    try:
        compare_case(shortcut, feature, seed)
    except AssertionError:
        return False
    return True


def is_caught(shortcut: Shortcut, feature: Feature, seed: int) -> bool:
    """Whether the case shows that the entry of the table is missing, if it is."""
    row = {each: why for each, why in SHORTCUTS[shortcut].items() if each != feature}
    with patch.dict(SHORTCUTS, {shortcut: row}):
        differs = not is_equal(shortcut, feature, seed)
    return differs and is_equal(shortcut, feature, seed)


def read_seeds() -> dict[tuple[Shortcut, Feature], int]:
    """Return for entries of the table the seed of a case in which the decisions would differ without the entry."""
    rows = json.loads(SEEDS.read_text())
    return {
        (Shortcut(shortcut), Feature(feature)): seed for shortcut, row in rows.items() for feature, seed in row.items()
    }


def find_seeds() -> None:
    """Look for a seed for each entry; one that still shows its entry stays."""
    known = read_seeds() if SEEDS.exists() else {}
    found: dict[str, dict[str, int]] = {}
    for shortcut, row in SHORTCUTS.items():
        for feature in row:
            first = [known[shortcut, feature]] if (shortcut, feature) in known else []
            tried = chain(first, range(MAX_SEEDS))
            seed = next((each for each in tried if is_caught(shortcut, feature, each)), None)
            print(shortcut, feature, seed, flush=True)
            if seed is not None:
                found.setdefault(shortcut, {})[feature] = seed
    SEEDS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    find_seeds()
