"""The fold of facts into a ``Cluster``, in stream order.

``apply`` is the only thing that changes a ``Cluster``. It is total: a fact that is late, doubled,
or of an old generation changes nothing, so any log can be folded and every fold of it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from contracts import subjects
from contracts.base import Fact
from contracts.envelope import Envelope, same_trace
from contracts.events import checkpoint, node, run
from contracts.events.capacity import CapacityWanted, PolicyAdopted
from contracts.events.run import BREAKS, RunExited, RunPrepared, RunStalled, RunStopping
from contracts.state.node import next_drain
from contracts.state.run import placement_problem
from contracts.texts import held_up_text
from services.scheduler.core.quota.quotas import periods_h
from services.scheduler.core.state.cluster import Allocation, Cluster, Node
from services.scheduler.core.state.durations import run_kind_of, wait_kind_of
from services.scheduler.core.state.pool_demand import reset_patience, update_demand
from services.scheduler.core.state.quarantine import (
    describe_error,
    quarantine_node,
    quarantine_run,
    release_run,
    reset_index,
)
from services.scheduler.core.state.run import EPOCH, CommittedCheckpoint, Ending, MemberState, Phase, Run
from services.scheduler.core.state.slot_spec import SLOT_MILLI, slot_spec_of
from services.scheduler.core.state.staged_checkpoints import StagedCheckpoints
from services.scheduler.core.state.workload import piece_of

#: Keys that look at what a run is expected to take.
FORESEEING = frozenset({"shortest-predicted", "even-wait"})
#: Alarms of ended runs that may remain before they are removed.
MANY_ALARMS = 1000


def fold(events: Iterable[tuple[Fact, int, datetime]]) -> Cluster:
    """The cluster after these (fact, sequence, time), oldest first."""
    cluster = Cluster()
    for fact, sequence, time in events:
        apply(cluster, fact, sequence, time)
    return cluster


def apply(cluster: Cluster, fact: Fact, sequence: int, time: datetime, envelope: Envelope | None = None) -> None:
    """Fold one fact in. ``time`` is when the server stored it: one clock for all facts."""
    if sequence <= cluster.sequence:
        return
    cluster.sequence = sequence
    run_id = fact.run_id if isinstance(fact, run.RunFact) else ""
    if (record := cluster.quarantined_runs.get(run_id)) is not None and record.step == "cycle":
        # Something has changed about it: the next cycle may succeed.
        release_run(cluster, run_id)
    try:
        _apply(cluster, fact, sequence, time, envelope)
    except Exception as error:
        _quarantine(cluster, fact, describe_error(error))
    if run_id in cluster.quarantined_runs:
        _keep_quarantined(cluster, run_id)


def _quarantine(cluster: Cluster, fact: Fact, reason: str) -> None:
    """Put aside what a fact is about that cannot be applied."""
    if isinstance(fact, run.RunFact):
        quarantine_run(cluster, fact.run_id, "fold", reason)
    elif isinstance(fact, node.NodeFact):
        quarantine_node(cluster, fact.node_id, "fold", reason)


def _keep_quarantined(cluster: Cluster, run_id: str) -> None:
    """Keep a quarantined run out of the cycles after every fact; a run that is over leaves quarantine."""
    known = cluster.runs.get(run_id)
    if known is not None and known.terminal:
        release_run(cluster, run_id)
        return
    for members in (cluster.unqueued, cluster.queued, cluster.active, cluster.promised):
        members.pop(run_id, None)


def _apply(cluster: Cluster, fact: Fact, sequence: int, time: datetime, envelope: Envelope | None) -> None:
    if isinstance(fact, run.RunPlaced):
        cluster.placed_sequence = sequence
    if isinstance(fact, run.RunAccepted):
        _accepted(cluster, fact, sequence, time, envelope)
    elif isinstance(fact, run.RunRejected):
        if fact.run_id not in cluster.runs:
            cluster.phases[Phase.REJECTED] += 1
    elif isinstance(fact, run.RunFact):
        known = cluster.runs.get(fact.run_id)
        if known is None:
            return
        known.last_sequence, known.last_event_id = sequence, fact.event_id
        if envelope is not None and same_trace(envelope.traceparent, known.traceparent):
            # A later request about the run has its own trace; the run keeps its first one.
            known.traceparent = envelope.traceparent
        if on_run := _RUN_FACTS.get(type(fact)):
            on_run(cluster, known, fact, time)
        known.request = None
        cluster.index.touch(fact.run_id)
        _store_run(cluster, known)
    elif isinstance(fact, node.NodeFact):
        before = cluster.nodes.get(fact.node_id)
        holders = [run_id for run_id, _ in before.allocations] if before is not None else []
        staging = [each for each in cluster.unqueued if fact.node_id in cluster.runs[each].awaited_nodes]
        cluster.index.touch_nodes([*holders, *staging])
        if isinstance(fact, node.NodeJoined):
            _joined(cluster, fact, time)
        elif before is not None and isinstance(fact, node.NodeDraining | node.NodeUndrained):
            before.last_drain = next_drain(before, fact)
        elif before is not None and before.incarnation == fact.incarnation:
            _change_node(cluster, before, fact, time)
        for run_id in holders:
            _store_run(cluster, cluster.runs[run_id])
        _reset_patience(cluster, fact, time)
    elif isinstance(fact, CapacityWanted):
        cluster.capacity[fact.pool] = update_demand(cluster.capacity.get(fact.pool), fact, time)
    elif isinstance(fact, PolicyAdopted):
        _adopted(cluster, fact, sequence, time)


def seen(cluster: Cluster, subject: str, sequence: int) -> None:
    """Something stands on this subject, a fact that was applied or nonsense that cannot be.

    The server's expectations count both: a fence that left nonsense out would never hold again.
    """
    cluster.sequence = max(cluster.sequence, sequence)
    aggregate, run_id, name = subjects.parts(subject)
    if aggregate == run.RunFact.aggregate:
        if name == run.RunPlaced.fact:
            cluster.placed_sequence = max(cluster.placed_sequence, sequence)
        if (known := cluster.runs.get(run_id)) is not None and known.last_sequence < sequence:
            known.last_sequence = sequence
            _store_run(cluster, known)
    elif (aggregate, name) == (PolicyAdopted.aggregate, PolicyAdopted.fact):
        cluster.policy_sequence = max(cluster.policy_sequence, sequence)


def _adopted(cluster: Cluster, fact: PolicyAdopted, sequence: int, time: datetime) -> None:
    cluster.adopted, cluster.policy_sequence = fact, sequence
    for run_id in cluster.queued:
        _predict(cluster, cluster.runs[run_id])
    cluster.usage.adopt(fact.policy.fair_share.half_life_s, periods_h(fact.policy), time.timestamp())
    # Places in line, times to look at a run again and more follow from the policy.
    reset_index(cluster)


def _store_run(cluster: Cluster, known: Run) -> None:
    """Store the run; archive it when it is over and has released all slots."""
    if not known.terminal or known.live:
        cluster.runs.restore_live(known)
        return
    cluster.runs.archive(known)
    cluster.index.forget(known.run_id)
    if cluster.index.forgotten > max(len(cluster.index.alarms) // 2, MANY_ALARMS):
        cluster.index.drop_alarms(cluster.runs.keys())


# -- a run's facts ----------------------------------------------------------------------------------


def _accepted(
    cluster: Cluster, fact: run.RunAccepted, sequence: int, time: datetime, envelope: Envelope | None
) -> None:
    if fact.run_id in cluster.runs:
        return
    slots = fact.spec.slots
    accepted = Run(fact.run_id, fact.spec, sequence, time, slot_spec_of(fact.spec), least=slots.min, most=slots.max)
    accepted.last_sequence, accepted.last_event_id = sequence, fact.event_id
    accepted.correlation_id = (envelope.correlation_id if envelope else "") or fact.request_id
    accepted.traceparent = envelope.traceparent if envelope else ""
    if (begins_with := fact.spec.resume_from or fact.spec.init_from) is not None:
        accepted.initial = _checkpoint(cluster, begins_with)
    if fact.spec.resume_from is not None:
        accepted.inherited_machine = cluster.machines.get(fact.spec.resume_from, "")
    accepted.kind = run_kind_of(fact.spec)
    owner = f"{fact.spec.team}/{fact.spec.user}/{fact.spec.name}"
    accepted.array_id = cluster.arrays.add(fact.run_id, owner, time.timestamp())
    cluster.workload.add(piece_of(accepted.slot_spec, fact.spec.slots.min))
    cluster.runs[fact.run_id] = accepted
    cluster.index.touch(fact.run_id)
    cluster.unqueued[fact.run_id] = None
    accepted.phase = Phase.PREPARING if fact.spec.needs_data else Phase.READY
    cluster.phases[accepted.phase] += 1


def _checkpoint(cluster: Cluster, uri: str) -> run.CheckpointRef | None:
    """The committed checkpoint with this manifest, whichever run's it is."""
    owner = cluster.checkpoints.get(uri)
    committed = cluster.runs[owner].checkpoints.get(uri) if owner is not None else None
    return committed.ref if committed is not None else None


def _prepared(cluster: Cluster, known: Run, fact: RunPrepared, time: datetime) -> None:
    if known.phase is Phase.PREPARING and known.dataset is None and known.prepare_problem is None:
        known.dataset, known.dataset_ids = fact, frozenset(each.dataset_id for each in fact.by_name.values())
        _enter(cluster, known, Phase.READY)


def _prepare_failed(cluster: Cluster, known: Run, fact: run.RunPrepareFailed, time: datetime) -> None:
    if known.phase is Phase.PREPARING and known.dataset is None:
        known.prepare_problem = fact.reason


def _staging(cluster: Cluster, known: Run, fact: run.RunStaging, time: datetime) -> None:
    if known.phase is not Phase.READY or known.staging is not None:
        return
    known.staging, known.staging_at = fact, time
    nodes = (cluster.nodes.get(node_id) for node_id in fact.node_ids)
    known.awaited_nodes = {each.node_id: each.incarnation for each in nodes if each is not None}
    _enter(cluster, known, Phase.PREPARING)


def _cancelling(cluster: Cluster, known: Run, fact: run.RunCancelling, time: datetime) -> None:
    if not known.terminal and known.cancel_reason is None:
        known.cancel_reason = fact.reason


def _queued(cluster: Cluster, known: Run, fact: run.RunQueued, time: datetime) -> None:
    if known.terminal or known.phase is Phase.QUEUED or known.live or fact.next_generation != known.next_generation:
        return
    if fact.reason in ("crashed", "node lost"):
        known.setbacks += 1
    if fact.reason == "node lost":
        known.infrastructure_failures += 1
        known.strikes.update(_at_fault(cluster, known))
    if fact.reason != "node lost":
        known.last_failure_point = known.failure_point if fact.reason == "crashed" else ""
    known.parts, known.stopping, known.ended_at, known.stalled = {}, None, None, None
    known.reserved = None
    if known.ready_at == EPOCH:
        known.ready_at = time
        milli = known.spec.slots.min * known.slot_spec.milli
        cluster.fifo_waits.add(known.slot_spec.accelerators, known.spec.priority, known.run_id, milli, time.timestamp())
        _start_fifo_runs(cluster, known, time)
    known.queued_at, known.queue_reason, known.failures = time, fact.reason, fact.failures
    known.queued_generation = fact.next_generation
    _enter(cluster, known, Phase.QUEUED)
    _predict(cluster, known)


def _predict(cluster: Cluster, known: Run) -> None:
    """Note what the run is expected to take yet. It stands until it is queued again, so that its place in line does."""
    policy = cluster.policy
    if policy is not None and not FORESEEING.isdisjoint(policy.order.by):
        expected = cluster.history.predict(known.kind, policy.predict)
        known.predicted_s = expected.mean_remaining_s(known.run_s)


def _at_fault(cluster: Cluster, known: Run) -> dict[str, int]:
    """How many strikes the nodes that failed a generation get, by their incarnations.

    It is those whose ranks failed, made no step, or never started.
    """
    if (stalled := known.stalled) is not None:
        home = cluster.nodes.get(stalled.node_id)
        return {home.incarnation: 1} if home else {}
    failed = [
        part for part in known.parts.values() if part.unprovoked and part.exit and part.exit.infrastructure_failure
    ]
    if not failed and not any(part.ended in ("lost", "failed") for part in known.parts.values()):
        failed = [part for part in known.parts.values() if not part.started and part.ended != "succeeded"]
    return {home.incarnation: 1 for part in failed if (home := cluster.nodes.get(part.node_id)) is not None}


def _waiting(cluster: Cluster, known: Run, fact: run.RunWaiting, time: datetime) -> None:
    known.waiting_code, known.waiting_generation = fact.code, fact.next_generation


def _placed(cluster: Cluster, known: Run, fact: run.RunPlaced, time: datetime) -> None:
    if fact.generation <= known.generation or placement_problem(fact, known.queued_generation) or known.live:
        return
    waited_s = max((time - known.queued_at).total_seconds(), 0.0)
    cluster.waits.add(wait_kind_of(fact.world_size, known.served_slot_s), waited_s, time)
    known.generation, known.placed_at, known.placed_sequence = fact.generation, time, known.last_sequence
    known.final, known.staged, known.held_up = None, StagedCheckpoints(), ""
    known.stopping, known.ended_at, known.stalled = None, None, None
    if fact.resume is None:
        known.machine, known.inexact = "", False
    known.parts = {member.node_id: MemberState(member.node_id, member.slots, member.ranks) for member in fact.members}
    # A former leader's placement of a run that is over takes its slots too, since the agents act on it,
    # until the scheduler stops it.
    cluster.active[known.run_id] = None
    if not known.terminal:
        _enter(cluster, known, Phase.PLACED)
    for part in known.parts.values():
        home = cluster.nodes.get(part.node_id)
        if home is None or not home.alive:
            _end(cluster, known, part, "lost", time)
        else:
            home.allocate((known.run_id, fact.generation), Allocation(part.slots, known.slot_spec))
            home.update_idle_times(time)
            part.accelerator = home.accelerator
            _account(cluster, known, part, 1, time)
    cluster.moved_at = time


def _account(cluster: Cluster, known: Run, part: MemberState, sign: int, time: datetime) -> None:
    """The part has its slots from now on, or (-1) until now."""
    if part.accelerator is not None and known.slot_spec.milli:
        slots = sign * len(part.slots) * known.slot_spec.milli / SLOT_MILLI
        cluster.usage.change(known.spec.team, known.spec.user, part.accelerator, slots, time.timestamp())


def _held_up(cluster: Cluster, known: Run, fact: run.RunHeldUp, time: datetime) -> None:
    if fact.generation == known.generation and not any(part.started for part in known.parts.values()):
        known.held_up = held_up_text(fact)


def _started(cluster: Cluster, known: Run, fact: run.RunStarted, time: datetime) -> None:
    if fact.generation != known.generation or fact.node_id not in known.parts:
        return
    known.parts[fact.node_id].started = True
    known.held_up = ""
    known.inexact = known.inexact or fact.exactness == "samples-exact"
    if (home := cluster.nodes.get(fact.node_id)) is not None:
        known.machine = home.machine
        (home.data_folders if known.reads_files else home.datasets).update(known.dataset_ids)
    if known.phase is Phase.PLACED:
        _enter(cluster, known, Phase.RUNNING)


def _reserved(cluster: Cluster, known: Run, fact: run.RunReserved, time: datetime) -> None:
    if known.phase is Phase.QUEUED and fact.next_generation == known.next_generation:
        known.reserved = fact
        cluster.promised[known.run_id] = fact.start_by


def _stalled(cluster: Cluster, known: Run, fact: RunStalled, time: datetime) -> None:
    current = fact.generation == known.generation and fact.node_id in known.parts
    if current and fact.on_stall != "observe" and known.stopping is None and known.stalled is None:
        known.stalled = fact
        if fact.on_stall == "exclude":
            known.excluded_nodes.add(fact.node_id)


def _stopping(cluster: Cluster, known: Run, fact: RunStopping, time: datetime) -> None:
    if fact.generation != known.generation or not known.live or known.stopping is not None:
        return
    known.stopping, known.stopping_at = fact, time
    if fact.preemptor is not None:
        known.yielded_at = cluster.sequence
    if not known.terminal:
        _enter(cluster, known, Phase.STOPPING)


def _released(cluster: Cluster, known: Run, fact: run.RunReleased, time: datetime) -> None:
    part = known.parts.get(fact.node_id)
    if part is not None and part.ended is None and fact.generation == known.generation:
        _end(cluster, known, part, "released", time)


def _exited(cluster: Cluster, known: Run, fact: RunExited, time: datetime) -> None:
    part = known.parts.get(fact.node_id)
    if part is not None and part.ended is None and fact.generation == known.generation:
        part.exit = fact
        part.unprovoked = known.stopping is None
        _end(cluster, known, part, fact.outcome, time)


def _end(cluster: Cluster, known: Run, part: MemberState, how: Ending, time: datetime) -> None:
    """A part is over: its slots are free, and with the last one the generation has ended."""
    part.ended = how
    _account(cluster, known, part, -1, time)
    slot_s = len(part.slots) * max((time - known.placed_at).total_seconds(), 0.0)
    known.served_slot_s += slot_s
    for run_id in cluster.arrays.serve(known.array_id, slot_s):
        cluster.index.touch(run_id)
    home = cluster.nodes.get(part.node_id)
    if home is not None:
        home.release((known.run_id, known.generation))
        home.update_idle_times(time)
    cluster.moved_at = time
    if not known.live:
        known.ended_at = time
        known.run_s += max((time - known.placed_at).total_seconds(), 0.0)
        known.failures_seen += _broke(known)
        if known.terminal:
            cluster.active.pop(known.run_id, None)


def _broke(known: Run) -> bool:
    """Whether the ended generation ended without a request to stop."""
    stop = known.stopping
    return (stop is not None and stop.reason in BREAKS) or any(
        part.ended == "lost" or (part.ended == "failed" and part.unprovoked) for part in known.parts.values()
    )


def _staged(cluster: Cluster, known: Run, fact: checkpoint.CheckpointStaged, time: datetime) -> None:
    part = known.parts.get(fact.node_id)
    # A part that has ended stages nothing more: a late duplicate says nothing new. Neither does one with other ranks
    # than were placed there, which the checkpoint service would refuse.
    if fact.generation != known.generation or part is None or part.ended is not None:
        return
    world_size = sum(len(each.ranks) for each in known.parts.values())
    if set(fact.ranks) == set(part.ranks) and fact.world_size == world_size:
        known.staged.stage(fact, time.timestamp())


def _refused(cluster: Cluster, known: Run, fact: checkpoint.CheckpointRefused, time: datetime) -> None:
    if fact.generation == known.generation:
        known.staged.refuse(fact)


def _committed(cluster: Cluster, known: Run, fact: checkpoint.CheckpointCommitted, time: datetime) -> None:
    if fact.generation > known.generation:
        return
    # Who resumes from it can tell whether it still is what was committed.
    ref = fact.checkpoint
    if fact.manifest_sha256 is not None:
        ref = ref.model_copy(update={"manifest_sha256": fact.manifest_sha256})
    committed = CommittedCheckpoint(fact.generation, ref)
    known.checkpoints[ref.uri] = committed
    cluster.checkpoints[ref.uri] = known.run_id
    if fact.exactness == "exact" and known.machine:
        cluster.machines[fact.checkpoint.uri] = known.machine
    if known.newest is None or _age(committed) >= _age(known.newest):
        known.newest, known.committed_at, known.setbacks, known.infrastructure_failures = committed, time, 0, 0
        if fact.generation == known.generation:
            for home in [cluster.nodes.get(node_id) for node_id in known.parts]:
                known.strikes.pop(home.incarnation if home else "", None)
            if known.stalled is None:
                known.excluded_nodes.difference_update(known.parts)
    if fact.generation == known.generation:
        known.staged.commit(ref.step)
        if fact.final:
            known.final = ref


def _deleted(cluster: Cluster, known: Run, fact: checkpoint.CheckpointDeleted, time: datetime) -> None:
    gone = known.checkpoints.pop(fact.uri, None)
    cluster.checkpoints.pop(fact.uri, None)
    cluster.machines.pop(fact.uri, None)
    if gone is not None and gone == known.newest:
        known.newest = max(known.checkpoints.values(), key=_age, default=None)


def _age(committed: CommittedCheckpoint) -> tuple[int, int]:
    return committed.generation, committed.ref.step


def _completed(cluster: Cluster, known: Run, fact: run.RunCompleted, time: datetime) -> None:
    ended = [part.ended == "succeeded" for part in known.parts.values()]
    if fact.generation == known.generation and ended and all(ended):
        _over(cluster, known, Phase.COMPLETED, "completed", time)


def _failed(cluster: Cluster, known: Run, fact: run.RunFailed, time: datetime) -> None:
    # Generation 0: it failed before it was placed.
    if fact.generation == 0 or fact.generation >= known.generation:
        _over(cluster, known, Phase.FAILED, fact.reason, time)


def _cancelled(cluster: Cluster, known: Run, fact: run.RunCancelled, time: datetime) -> None:
    _over(cluster, known, Phase.CANCELLED, fact.reason, time)


def _over(cluster: Cluster, known: Run, phase: Phase, outcome: str, time: datetime) -> None:
    if known.terminal:
        return
    if (run_s := known.ran_s(time)) > 0:
        cluster.history.add(known.kind, run_s, time)
    _enter(cluster, known, phase)
    cluster.arrays.remove(known.array_id, known.run_id)
    cluster.fifo_waits.remove(known.slot_spec.accelerators, known.spec.priority, known.run_id)
    _start_fifo_runs(cluster, known, time)
    known.outcome = outcome
    if not known.live:
        cluster.active.pop(known.run_id, None)
        known.parts = {}


def _start_fifo_runs(cluster: Cluster, known: Run, time: datetime) -> None:
    """Start the runs of the run's pool whose turn has come in strict order of submission."""
    pool = known.slot_spec.accelerators
    nodes = cluster.nodes.values()
    slots = sum(node.slots for node in nodes if node.is_schedulable and (not pool or node.accelerator in pool))
    cluster.fifo_waits.start_runs(pool, slots * SLOT_MILLI, time.timestamp())


def _enter(cluster: Cluster, known: Run, phase: Phase) -> None:
    """Change the phase and keep the indexes in step with it."""
    cluster.phases[known.phase] -= 1
    cluster.phases[phase] += 1
    if phase not in (Phase.PREPARING, Phase.READY):
        cluster.unqueued.pop(known.run_id, None)
    if phase is Phase.QUEUED:
        cluster.queued[known.run_id] = None
        cluster.active.pop(known.run_id, None)
    else:
        cluster.queued.pop(known.run_id, None)
        cluster.promised.pop(known.run_id, None)
    known.phase = phase


# -- a node's facts ---------------------------------------------------------------------------------


def _joined(cluster: Cluster, fact: node.NodeJoined, time: datetime) -> None:
    old = cluster.nodes.get(fact.node_id)
    past: set[str] = set()
    if old is not None:
        if fact.incarnation == old.incarnation or fact.incarnation in old.past_incarnations:
            return
        past = old.past_incarnations | {old.incarnation}
    new = Node(
        fact.node_id,
        fact.incarnation,
        fact.slots,
        fact.lease_ttl_s,
        accelerator=fact.accelerator,
        machine=fact.machine_digest,
        labels=fact.labels,
        profiles=fact.slot_profiles,
        cpu_milli=round(fact.cpus * 1000),
        memory_bytes=fact.memory_bytes,
        datasets=set(fact.datasets),
        data_folders=set(fact.data_folders or ()),
        stages_data=fact.data_folders is not None,
        past_incarnations=past,
        last_drain=old.last_drain if old is not None else None,
    )
    if old is not None:
        kept = set(fact.running)
        for holder, held in old.allocations.items():
            if holder in kept:
                new.allocate(holder, held)
        _lose_parts(cluster, old, kept, time)
    cluster.nodes[fact.node_id] = new
    cluster.quarantined_nodes.pop(fact.node_id, None)
    new.update_idle_times(time)
    cluster.moved_at = time


def _reset_patience(cluster: Cluster, fact: node.NodeFact, time: datetime) -> None:
    """Restart the pool's patience: one of its nodes has joined or left."""
    known = cluster.nodes.get(fact.node_id)
    name = known.labels.get("pool", "") if known is not None else ""
    if name in cluster.capacity:
        cluster.capacity[name] = reset_patience(cluster.capacity[name], time)


def _change_node(cluster: Cluster, known: Node, fact: node.NodeFact, time: datetime) -> None:
    """Fold a fact about the present incarnation of a node."""
    match fact:
        case node.NodeLost() | node.NodeLeft() if known.alive:
            known.state = "lost" if isinstance(fact, node.NodeLost) else "left"
            _lose_parts(cluster, known, set(), time)
        case node.NodeNotice():
            # A recommendation to leave is often followed by the order, which says how long there is.
            known.notice, known.noticed_at = fact, time
        case node.NodeUnfit():
            known.unfit = fact
        case node.NodeStaged():
            _data_staged(cluster, known, fact)


def _data_staged(cluster: Cluster, home: Node, fact: node.NodeStaged) -> None:
    """Note the files that a node has, if it was asked for them."""
    known = cluster.runs.get(fact.run_id)
    if known is None or known.staging is None or home.node_id not in known.staging.node_ids:
        return
    if not fact.error:
        home.data_folders.update(known.dataset_ids.intersection(fact.dataset_ids))
    known.awaited_nodes.pop(home.node_id, None)


def _lose_parts(cluster: Cluster, home: Node, kept: set[tuple[str, int]], time: datetime) -> None:
    for run_id, generation in list(home.allocations):
        holder = cluster.runs[run_id]
        part = holder.parts.get(home.node_id)
        if (run_id, generation) not in kept and part is not None and holder.generation == generation:
            _end(cluster, holder, part, "lost", time)


_RUN_FACTS: dict[type[Fact], Callable[[Cluster, Run, Any, datetime], None]] = {
    RunPrepared: _prepared,
    run.RunPrepareFailed: _prepare_failed,
    run.RunStaging: _staging,
    run.RunCancelling: _cancelling,
    run.RunQueued: _queued,
    run.RunWaiting: _waiting,
    run.RunPlaced: _placed,
    run.RunReserved: _reserved,
    run.RunHeldUp: _held_up,
    run.RunStarted: _started,
    RunStalled: _stalled,
    RunStopping: _stopping,
    run.RunReleased: _released,
    RunExited: _exited,
    checkpoint.CheckpointStaged: _staged,
    checkpoint.CheckpointRefused: _refused,
    checkpoint.CheckpointCommitted: _committed,
    checkpoint.CheckpointDeleted: _deleted,
    run.RunCompleted: _completed,
    run.RunFailed: _failed,
    run.RunCancelled: _cancelled,
}
