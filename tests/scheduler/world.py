"""A small world around the scheduler's core: a log, agents that act on it, and time.

Deterministic: everything random comes from the ``random.Random`` that it is given.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from contracts.base import Fact
from contracts.events.capacity import PolicyAdopted
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointStaged
from contracts.events.node import (
    DrainScope,
    NodeDraining,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeNotice,
    NodeUndrained,
    NodeUnfit,
)
from contracts.events.run import (
    CheckpointRef,
    RunAccepted,
    RunCancelling,
    RunExited,
    RunPlaced,
    RunReleased,
    RunStalled,
    RunStarted,
)
from contracts.scheduling import Policy
from contracts.spec.run import RunSpec
from services.scheduler.core.decide import decide, run_steps
from services.scheduler.core.decisions import NOTHING_LEFT, Decision, decision_record, fact_of
from services.scheduler.core.fold import apply, fold
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.index import Index
from services.scheduler.core.state.run import TERMINAL, Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI

START = datetime(2026, 1, 1, tzinfo=UTC)
CODE = {"uri": "s3://code/p.tar.gz", "sha256": "0" * 64}


def spec(slots: Any = 1, priority: int = 0, *, command: bool = False, **more: Any) -> RunSpec:
    """A small request; a task by default, so that it has checkpoints."""
    what = {"command": ["true"]} if command else {"task": "m:T", "code": CODE, "training": {"epochs": 1}}
    return RunSpec.model_validate({"name": "run", "slots": slots, "priority": priority, **what, **more})


class World:
    """The log and the cluster folded from it."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.cluster = Cluster()
        self.now = START
        self.log: list[tuple[Fact, int, datetime]] = []
        #: What the last cycle has left over.
        self.left_over = NOTHING_LEFT
        self.checked: dict[str, int] = defaultdict(int)
        #: Facts of agents that are not in the log yet; ``delayed`` selects them.
        self.late: list[Fact] = []
        self.delayed: Callable[[], bool] = lambda: False

    # -- the log ------------------------------------------------------------

    def publish(self, fact: Fact) -> None:
        """Append a fact and fold it, as a real log would (the fold never fails)."""
        self.log.append((fact, len(self.log) + 1, self.now))
        apply(self.cluster, *self.log[-1])
        self.check()

    def deliver(self, fact: Fact) -> None:
        """Append an agent's fact, now or some time later."""
        if self.delayed():
            self.late.append(fact)
        else:
            self.publish(fact)

    def step(self, limit: int | None = None) -> list[Decision]:
        """Decide once and publish the first ``limit`` decisions, as a scheduler that dies in between."""
        fresh = copy.copy(self.cluster)
        fresh.index = Index()
        fresh.index.unsettled.update(dict.fromkeys(fresh.runs))
        expected = run_steps(fresh, self.now, self.policy, left_over=self.left_over).decisions
        result = run_steps(self.cluster, self.now, self.policy, left_over=self.left_over)
        decisions = result.decisions
        # What one cycle caches for the next changes no decision.
        assert sorted(map(repr, decisions)) == sorted(map(repr, expected)), (decisions, expected)
        made = decision_record(self.cluster, self.now, self.policy, left_over=self.left_over)
        self.left_over = result.left_over
        facts = [fact_of(decision, self.cluster, self.now, made) for decision in decisions]
        for fact in facts[:limit]:
            self.publish(fact)
        return decisions

    def zombie_step(self, behind: int) -> list[Fact]:
        """Decide as a former leader, ``behind`` facts late, and publish what its fences allow."""
        stale = fold(self.log[: max(len(self.log) - behind, 0)])
        fence = stale.placed_sequence
        ids = {fact.event_id for fact, _, _ in self.log}
        published: list[Fact] = []
        for decision in decide(stale, self.now, self.policy):
            fact = fact_of(decision, stale, self.now, decision_record(stale, self.now, self.policy))
            if isinstance(fact, RunPlaced):
                fenced = fence == self.cluster.placed_sequence
            else:
                fenced = stale.runs[fact.run_id].last_sequence == self.run(fact.run_id).last_sequence
            if fact.event_id in ids or not fenced:
                break
            self.publish(fact)
            if isinstance(fact, RunPlaced):
                fence = self.cluster.placed_sequence
            published.append(fact)
        return published

    def settle(self) -> list[Decision]:
        """Decide until no decision is left; a scheduler must come to rest."""
        made: list[Decision] = []
        for _ in range(50):
            decisions = self.step()
            if not decisions and not any(self.left_over):
                return made
            made += decisions
        raise AssertionError(f"the scheduler never comes to rest: {made[-6:]}")

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # -- facts of nodes and users -------------------------------------------------------

    def adopt(self, policy: Policy) -> None:
        """Decide by another policy from the next cycle on."""
        self.policy, after = policy, self.cluster.policy_sequence
        self.publish(PolicyAdopted(digest=policy.digest, policy=policy, after_sequence=after, origin="request"))

    def join(
        self,
        node_id: str,
        slots: int,
        life: str = "1",
        running: tuple[tuple[str, int], ...] = (),
        machine: str = "",
    ) -> None:
        self.publish(
            NodeJoined(
                node_id=node_id,
                incarnation=f"{node_id}-{life}",
                address="h",
                slots=slots,
                lease_ttl_s=3,
                machine_digest=machine,
                running=running,
                data_folders=(),
            )
        )

    def lose(self, node_id: str) -> None:
        self.publish(NodeLost(node_id=node_id, incarnation=self.cluster.nodes[node_id].incarnation))

    def leave(self, node_id: str) -> None:
        self.publish(NodeLeft(node_id=node_id, incarnation=self.cluster.nodes[node_id].incarnation))

    def drain(self, node_id: str, scope: DrainScope = "node", user: str = "ada") -> None:
        life = self.cluster.nodes[node_id].incarnation
        asked: dict[str, Any] = {"user": user, "requested_at": self.now, "request_id": f"d{len(self.log)}"}
        self.publish(NodeDraining(node_id=node_id, incarnation=life, scope=scope, reason="a loud fan", **asked))

    def undrain(self, node_id: str) -> None:
        life = self.cluster.nodes[node_id].incarnation
        asked: dict[str, Any] = {"user": "ada", "requested_at": self.now, "request_id": f"u{len(self.log)}"}
        self.publish(NodeUndrained(node_id=node_id, incarnation=life, **asked))

    def notice(self, node_id: str, grace_s: float | None = None, kind: str = "terminate") -> None:
        life = self.cluster.nodes[node_id].incarnation
        self.publish(NodeNotice(node_id=node_id, incarnation=life, source="spot", kind=kind, grace_s=grace_s))

    def unfit(self, node_id: str, *slots: int) -> None:
        life = self.cluster.nodes[node_id].incarnation
        self.publish(NodeUnfit(node_id=node_id, incarnation=life, reason="uncorrected ECC errors", slots=slots))

    def stall(self, run_id: str, node_id: str, on_stall: Any) -> None:
        run = self.run(run_id)
        fact = {"generation": run.generation, "rank": 0, "step": 7, "silent_s": 61.0, "median_step_s": 0.25}
        self.deliver(RunStalled.model_validate({"run_id": run_id, "node_id": node_id, "on_stall": on_stall, **fact}))

    def accept(self, run_id: str, wanted: RunSpec) -> None:
        self.publish(RunAccepted(run_id=run_id, spec=wanted, request_id=run_id, request_source="test"))

    def cancel(self, run_id: str) -> None:
        self.publish(RunCancelling(run_id=run_id, reason="cancelled by request"))

    def commit(
        self, run_id: str, step: int, *, generation: int | None = None, final: bool = False, epoch: int = 1
    ) -> str:
        generation = generation or self.cluster.runs[run_id].generation
        uri = f"s3://models/e/{run_id}/g{generation}/step_{step}.json"
        ref = CheckpointRef(uri=uri, step=step, epoch=epoch, samples_consumed=step * 8)
        exactness = "samples-exact" if self.run(run_id).inexact else "exact"
        fact = {"run_id": run_id, "generation": generation, "checkpoint": ref, "size_bytes": 1, "final": final}
        fact["manifest_sha256"] = hashlib.sha256(uri.encode()).hexdigest()
        self.deliver(CheckpointCommitted.model_validate({**fact, "exactness": exactness}))
        return uri

    def stage(self, run_id: str, step: int, *node_ids: str, final: bool = True) -> None:
        """Publish the parts of a checkpoint: those of these nodes, by default of all that have not ended."""
        run = self.run(run_id)
        world_size = sum(len(part.ranks) for part in run.parts.values())
        for part in run.live:
            if not node_ids or part.node_id in node_ids:
                fact = {"run_id": run_id, "generation": run.generation, "node_id": part.node_id, "ranks": part.ranks}
                place = {"step": step, "epoch": 1, "samples_consumed": step * 8, "world_size": world_size}
                self.deliver(CheckpointStaged.model_validate({**fact, **place, "files": (), "final": final}))

    def refuse(self, run_id: str, step: int, reason: str = "its files differ", **fields: bool) -> None:
        fact = {"run_id": run_id, "generation": self.run(run_id).generation, "step": step, "reason": reason}
        self.deliver(CheckpointRefused.model_validate({**fact, **fields}))

    def start(self, run_id: str, exactness: Any = "exact") -> None:
        run = self.run(run_id)
        for part in run.live:
            fact = {"run_id": run_id, "generation": run.generation, "node_id": part.node_id}
            self.deliver(RunStarted.model_validate({**fact, "exactness": exactness}))

    def release(self, run_id: str, *node_ids: str) -> None:
        run = self.run(run_id)
        for node_id in node_ids or tuple(part.node_id for part in run.live):
            self.deliver(RunReleased(run_id=run_id, generation=run.generation, node_id=node_id))

    def exit(self, run_id: str, outcome: Any = "succeeded", *node_ids: str, **more: Any) -> None:
        run = self.run(run_id)
        for node_id in node_ids or tuple(part.node_id for part in run.live):
            fact = {"run_id": run_id, "generation": run.generation, "node_id": node_id, "outcome": outcome, **more}
            self.deliver(RunExited.model_validate(fact))

    # -- state -------------------------------------------------------------

    def run(self, run_id: str) -> Run:
        return self.cluster.runs[run_id]

    def phase(self, run_id: str) -> str:
        return str(self.run(run_id).phase)

    def facts(self, kind: type[Fact], run_id: str | None = None) -> list[Any]:
        found = [fact for fact, _, _ in self.log if isinstance(fact, kind)]
        return [fact for fact in found if run_id is None or fact.aggregate_id == run_id]

    def check(self) -> None:
        """Check that no slot is allocated twice, that gangs are whole, and that generations count up."""
        cluster = self.cluster
        given: dict[tuple[str, int], int] = {}
        for run in cluster.runs.values():
            for part in run.live:
                node = cluster.nodes[part.node_id]
                assert node.allocations[(run.run_id, run.generation)].slots == part.slots
                for slot in part.slots if run.slot_spec.milli else ():
                    given[node.node_id, slot] = given.get((node.node_id, slot), 0) + run.slot_spec.milli
                    assert given[node.node_id, slot] <= SLOT_MILLI, f"slot {slot} of {node.node_id} is allocated twice"
            assert run.generation >= self.checked[run.run_id]
            self.checked[run.run_id] = run.generation
        for node in cluster.nodes.values():
            assert node.free_milli == [SLOT_MILLI - given.get((node.node_id, slot), 0) for slot in range(node.slots)]
            assert not node.cpu_milli or node.free_cpu_milli >= 0
            assert not node.memory_bytes or node.free_memory_bytes >= 0
        used = sum(len(node.used) for node in cluster.nodes.values())
        assert used == len(given), "a slot is used without an allocation"
        last = self.log[-1][0]
        if isinstance(last, RunPlaced):
            slots = last.spec.slots
            assert slots.min <= last.world_size <= slots.max
            assert sorted(rank for member in last.members for rank in member.ranks) == list(range(last.world_size))
            assert all(len(member.slots) == len(member.ranks) for member in last.members)
            if cluster.runs[last.run_id].exact:
                kinds = {cluster.nodes[member.node_id].machine for member in last.members}
                assert len(kinds) == 1, f"an exact run is on machines that are not alike: {kinds}"


class Chaos:
    """Random actions of agents, nodes and users, in any order that the bus allows."""

    def __init__(self, world: World, rng: random.Random, nodes: int = 3, policies: Sequence[Policy] = ()) -> None:
        """``policies``: those among which operators change."""
        self.world, self.rng, self.policies = world, rng, policies
        world.delayed = lambda: rng.random() < 0.2
        self.lives: dict[str, int] = {}
        self.machines = {f"n{i}": "ab"[i % 2] for i in range(nodes)} if rng.random() < 0.5 else {}
        self.node_ids = [f"n{i}" for i in range(nodes)]
        for node_id in self.node_ids:
            self._join(node_id)

    def act(self) -> None:
        """Do one random action."""
        often = [self._agent] * 10 + [self._scheduler] * 8 + [self._time] * 3 + [self._late] * 3
        seldom = [self._user] * 2 + [self._stale] * 2 + [self._zombie] * 2 + [self._node]
        self.rng.choice(often + seldom)()

    def _scheduler(self) -> None:
        self.world.step(self.rng.choice([None, None, 1, 2]))

    def _zombie(self) -> None:
        self.world.zombie_step(self.rng.randint(1, 12))

    def _late(self) -> None:
        if self.world.late:
            self.world.publish(self.world.late.pop(self.rng.randrange(len(self.world.late))))

    def _time(self) -> None:
        self.world.wait(self.rng.choice([0.1, 1.0, 3.0, 40.0]))

    def _agent(self) -> None:
        world, rng = self.world, self.rng
        live = [(run, part) for run in world.cluster.runs.values() for part in run.live]
        if not live:
            return
        run, part = rng.choice(live)
        deed = rng.random()
        if run.stopping is not None or run.terminal:
            if deed < 0.15:
                world.exit(run.run_id, rng.choice(["succeeded", "failed"]), part.node_id)
            elif deed < 0.3 and run.spec.task:
                world.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1)
            else:
                world.release(run.run_id, part.node_id)
        elif deed < 0.28:
            world.start(run.run_id, rng.choice(["exact", "exact", "samples-exact"]))
        elif deed < 0.3:
            world.stall(run.run_id, part.node_id, rng.choice(["observe", "restart", "exclude"]))
        elif deed < 0.5 and run.spec.task:
            world.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1)
        elif deed < 0.6:
            world.exit(run.run_id, "failed", part.node_id, infrastructure_failure=rng.random() < 0.3)
        elif deed < 0.65:
            world.release(run.run_id, part.node_id)
        elif deed < 0.75:
            if run.spec.task and rng.random() < 0.7:
                world.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1, final=True)
            world.exit(run.run_id)

    def _stale(self) -> None:
        """Publish an earlier fact again, as a duplicate or a late fact."""
        if self.world.log:
            self.world.publish(self.rng.choice(self.world.log)[0])

    def _node(self) -> None:
        world, rng = self.world, self.rng
        node_id = rng.choice(self.node_ids)
        node = world.cluster.nodes[node_id]
        if not node.alive:
            self._join(node_id)
            return
        deed = rng.random()
        if deed < 0.3:
            world.lose(node_id)
        elif deed < 0.4:
            world.leave(node_id)
        elif deed < 0.45:
            world.drain(node_id, rng.choice(["node", "incarnation"]))
        elif deed < 0.47:
            world.undrain(node_id)
        elif deed < 0.52:
            world.notice(node_id, rng.choice([None, 5.0, 120.0]), str(rng.random()))
        elif deed < 0.57:
            world.unfit(node_id, *rng.choice([(), (0,)]))
        else:
            holders = sorted(node.allocations)
            self._join(node_id, tuple(holder for holder in holders if rng.random() < 0.5))

    def _user(self) -> None:
        runs = [run for run in self.world.cluster.runs.values() if not run.terminal]
        if self.policies and self.rng.random() < 0.3:
            self.world.adopt(self.rng.choice(self.policies))
        elif runs and self.rng.random() < 0.15:
            self.world.cancel(self.rng.choice(runs).run_id)
        elif self.world.cluster.runs.total < 15:
            self.submit()

    def submit(self) -> None:
        least = self.rng.randint(1, 4)
        wanted = {"min": least, "max": self.rng.randint(least, 6)}
        run_id = f"r{self.world.cluster.runs.total}"
        more: dict[str, Any] = {"max_attempts": self.rng.randint(1, 4), "grace_s": 5}
        command = self.rng.random() < 0.3
        if not command and self.rng.random() < 0.6:
            more["training"] = {"epochs": 1, "logical_ranks": self.rng.randint(wanted["max"], 7)}
        self.world.accept(run_id, spec(wanted, self.rng.randint(0, 3), command=command, **more))

    def _join(self, node_id: str, running: tuple[tuple[str, int], ...] = ()) -> None:
        self.lives[node_id] = self.lives.get(node_id, 0) + 1
        self.world.join(node_id, 2, str(self.lives[node_id]), running, self.machines.get(node_id, ""))

    def calm(self) -> None:
        """Make everything work from now on, and check that every run ends."""
        world = self.world
        world.delayed = lambda: False
        while world.late:
            self._late()
        for node_id in self.node_ids:
            if not world.cluster.nodes[node_id].is_schedulable:
                world.undrain(node_id)
                self._join(node_id)
        for _ in range(300):
            world.settle()
            live = [run for run in world.cluster.runs.values() if run.live]
            if all(run.phase in TERMINAL and not run.live for run in world.cluster.runs.values()):
                return
            for run in live:
                if run.stopping is not None or run.terminal:
                    world.release(run.run_id)
                else:
                    if run.spec.task:
                        world.commit(run.run_id, (run.newest.ref.step if run.newest else 0) + 1, final=True)
                    world.exit(run.run_id)
            world.wait(31.0)
        left = {run.run_id: (str(run.phase), run.spec.slots) for run in world.cluster.runs.values() if not run.terminal}
        raise AssertionError(f"these runs never end: {left}")
