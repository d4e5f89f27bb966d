"""What follows from what has happened to a run: each run on its own, without a look at the others."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from contracts.events.run import RunStalled, StopReason, queue_reason_of
from contracts.grace import LEAST_GRACE_S
from contracts.scheduling import Policy
from services.scheduler.core.cycle_state import CycleState
from services.scheduler.core.decisions import CancelRun, CompleteRun, ExplainRun, FailRun, QueueRun, StopRun
from services.scheduler.core.place.maintenance import must_leave
from services.scheduler.core.reasons import UNCOMMITTED, uncommitted_text
from services.scheduler.core.state.cluster import Cluster, Node
from services.scheduler.core.state.run import MemberState, Phase, Run
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.steps.stage import awaited_nodes, stage_runs, staging_end_s

Settlement = CancelRun | CompleteRun | FailRun | StopRun | QueueRun

#: Seconds after its ranks have ended from when on it is said that a run waits for its final checkpoint.
EXPLAINED_AFTER_S = 5.0


def settle_runs(cycle: CycleState) -> None:
    """Decide what follows from what has happened to each run alone."""
    index = cycle.cluster.index
    index.unsettled.update(dict.fromkeys(index.due(cycle.now_s)))
    scripts: list[Run] = []
    run_id = ""
    try:
        for run_id in list(index.unsettled):
            run = cycle.cluster.runs[run_id]
            settlement = _settle(cycle, run)
            if settlement is None:
                _check_later(cycle, run)
                _explain_wait(cycle, run)
            elif isinstance(settlement, QueueRun) and run.phase is Phase.READY and run.reads_files:
                scripts.append(run)
            else:
                _decide(cycle, run, settlement)
    except Exception as error:
        note_suspect(error, run_id=run_id)
        raise
    for run in stage_runs(cycle, scripts):
        _decide(cycle, run, _queue_new(run))
    if index.alarms:
        cycle.wake_at(index.alarms[0][0])


def _decide(cycle: CycleState, run: Run, settlement: Settlement) -> None:
    cycle.result.decisions.append(settlement)
    if isinstance(settlement, StopRun):
        cycle.leaving.add(run.run_id)
    elif isinstance(settlement, QueueRun) and not _must_pause(cycle, run, settlement):
        cycle.queued[run.run_id] = run


def stop_overspent_runs(cycle: CycleState) -> None:
    """Stop the runs whose team has used up its slot-hours."""
    stops, wake_s = cycle.entitlements.spent(cycle.leaving)
    cycle.result.decisions += stops
    cycle.leaving |= {stop.run_id for stop in stops}
    cycle.wake_at(wake_s)


def _settle(cycle: CycleState, run: Run) -> Settlement | None:
    cluster, run_id = cycle.cluster, run.run_id
    if run_id in cluster.unqueued:
        return settle_unqueued(cluster, run, cycle.now_s, cycle.policy)
    if run_id in cluster.active:
        return settle_active(cluster, run, cycle.now, cycle.policy, cycle.reachable_since)
    if run_id in cluster.queued and run.cancel_reason is not None:
        return CancelRun(run_id, run.cancel_reason)
    return None


def _check_later(cycle: CycleState, run: Run) -> None:
    """Check the run again when there is a new fact about it, or its time has come."""
    index, check_s = cycle.cluster.index, next_check_s(run, cycle.policy, cycle.now_s)
    index.touched[run.run_id] = None
    if run.run_id in cycle.cluster.queued:
        index.unexplained[run.run_id] = None
    if not check_s <= cycle.now_s:
        # (A run whose time has come, and that may only be unreachable, is checked in every cycle.)
        del index.unsettled[run.run_id]
        if check_s < math.inf:
            index.alarm(check_s, run.run_id)


def _explain_wait(cycle: CycleState, run: Run) -> None:
    """Publish once what a run waits for whose ranks have all ended well, if it is not about to be there."""
    if run.ended_at is None or cycle.now_s < run.ended_at.timestamp() + EXPLAINED_AFTER_S:
        return
    if not run.awaited_steps or (run.waiting_code, run.waiting_generation) == (UNCOMMITTED, run.next_generation):
        return
    text = uncommitted_text(run)
    cycle.result.decisions.append(ExplainRun(run.run_id, run.next_generation, UNCOMMITTED, text))


def _must_pause(cycle: CycleState, run: Run, settlement: QueueRun) -> bool:
    """Whether a run that just broke must wait before its next try; it is examined once it is queued."""
    has_broken = settlement.reason in ("crashed", "node lost")
    return has_broken and cycle.policy.faults.retry_delay_s(run.setbacks + 1) > 0


def settle_unqueued(cluster: Cluster, run: Run, now_s: float, policy: Policy) -> Settlement | None:
    """Queue a run whose data is there; end one that cannot or shall not go on."""
    if run.cancel_reason is not None:
        return CancelRun(run.run_id, run.cancel_reason)
    if run.prepare_problem is not None:
        return FailRun(run.run_id, 0, f"its data could not be prepared: {run.prepare_problem}")
    begins_with = run.spec.resume_from or run.spec.init_from
    if begins_with is not None and run.initial is None:
        return FailRun(run.run_id, 0, f"the checkpoint to start from does not exist (any more): {begins_with}")
    is_staged = run.staging is not None and (
        now_s >= staging_end_s(run, policy) or not any(awaited_nodes(cluster, run))
    )
    return _queue_new(run) if run.phase is Phase.READY or is_staged else None


def _queue_new(run: Run) -> QueueRun:
    return QueueRun(run.run_id, run.next_generation, "new", run.failures)


def settle_active(
    cluster: Cluster, run: Run, now: datetime, policy: Policy, reachable_since: datetime
) -> Settlement | None:
    """Stop the rest of a gang that has broken; decide what follows once every part has ended."""
    if run.live:
        if run.stopping is not None:
            return None
        waited = now - max(run.placed_at, reachable_since)
        return _stop(cluster, run, now, policy) or _not_started(run, waited.total_seconds(), policy)
    return None if run.terminal else _outcome(run, now, policy)


def next_check_s(run: Run, policy: Policy, now_s: float = -math.inf) -> float:
    """When the clock alone may be a reason to decide about the run, in seconds since the epoch; inf: never."""
    found = math.inf
    if run.phase is Phase.PREPARING and run.staging is not None:
        found = staging_end_s(run, policy)
    elif run.live and run.stopping is None:
        if not all(part.started for part in run.live):
            found = run.placed_at.timestamp() + policy.faults.start_deadline_s
        if run.spec.scheduling.limit_s is not None:
            found = min(found, run.placed_at.timestamp() + run.spec.scheduling.limit_s - run.run_s)
        for window in policy.maintenance:
            # Which nodes it concerns is checked then.
            leaves_s = window.start.timestamp() - run.spec.grace_s
            found = min(found, leaves_s if leaves_s > now_s else math.inf)
    elif not run.live and not run.terminal and run.ended_at is not None:
        ended_s = run.ended_at.timestamp()
        found = ended_s + policy.faults.final_checkpoint_wait_s
        if now_s < ended_s + EXPLAINED_AFTER_S:
            found = min(found, ended_s + EXPLAINED_AFTER_S)
    return found


def _stop(cluster: Cluster, run: Run, now: datetime, policy: Policy) -> StopRun | None:
    """Return the stop of a gang that still runs, if it must stop."""
    broken = [part for part in run.parts.values() if part.ended in ("failed", "lost")]
    released = [part for part in run.parts.values() if part.ended == "released"]
    homes = [cluster.nodes[part.node_id] for part in run.live]
    draining, noticed = _leaving_homes(homes)
    if run.terminal:
        return StopRun(run.run_id, run.generation, "run_over", "the run is over", 0.0, "cancel")
    if broken:
        # Its peers hang in a collective that can never complete: no checkpoint to wait for.
        return StopRun(run.run_id, run.generation, _broken_reason(run), _broken_text(broken[0]), 0.0)
    if run.cancel_reason is not None:
        return StopRun(run.run_id, run.generation, "cancelled", run.cancel_reason, run.spec.grace_s, "cancel")
    limit_s = run.spec.scheduling.limit_s
    if limit_s is not None and run.ran_s(now) >= limit_s:
        text = f"it has had its slots for {run.ran_s(now):.6g} s, and its limit (scheduling.limit_s) is {limit_s:g} s"
        return StopRun(run.run_id, run.generation, "time_limit", text, run.spec.grace_s, "fail")
    if unfit := _unfit_home(cluster, run):
        # What a broken device has computed is not worth keeping, and a checkpoint might hang in it.
        return StopRun(run.run_id, run.generation, "unfit", unfit, 0.0)
    if run.stalled is not None:
        # Its peers wait in a collective for the rank that makes no step.
        return StopRun(run.run_id, run.generation, "stalled", _stalled_text(run.stalled), 0.0)
    if noticed:
        # The machine that goes first sets the time for all.
        first = min(noticed, key=lambda home: _left_s(home, now))
        grace_s = max(min(run.spec.grace_s, _left_s(first, now) - policy.faults.notice_margin_s), LEAST_GRACE_S)
        return StopRun(run.run_id, run.generation, "notice", _notice_text(first), grace_s)
    if released:
        text = f"node {released[0].node_id} has released its ranks"
        return StopRun(run.run_id, run.generation, "released", text, run.spec.grace_s)
    if policy.maintenance and (shut := _shut_home(homes, run, now, policy)):
        return StopRun(run.run_id, run.generation, "maintenance", shut, run.spec.grace_s)
    if draining:
        text = f"node {draining[0]} is being drained"
        return StopRun(run.run_id, run.generation, "drained", text, run.spec.grace_s)
    return None


def _leaving_homes(homes: list[Node]) -> tuple[list[str], list[Node]]:
    """Return the ids of the nodes that are drained, and the nodes that are about to be taken away."""
    draining, noticed, node_id = [], [], ""
    try:
        for home in homes:
            node_id = home.node_id
            if home.draining:
                draining.append(node_id)
            if home.notice is not None:
                noticed.append(home)
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return draining, noticed


def _shut_home(homes: list[Node], run: Run, now: datetime, policy: Policy) -> str:
    """Which node of the run has to be empty soon, for maintenance; '' if none has."""
    grace_s = run.spec.grace_s
    node_id = ""
    try:
        for home in homes:
            node_id = home.node_id
            if must_leave(node_id, home.labels, policy.maintenance, now, grace_s):
                return f"maintenance of node {node_id} begins"
    except Exception as error:
        note_suspect(error, node_id=node_id)
        raise
    return ""


def _unfit_home(cluster: Cluster, run: Run) -> str:
    """Which node of the run has failed its check with slots of the run; '' if none has."""
    for part in run.live:
        unfit = cluster.nodes[part.node_id].unfit
        if unfit is not None and (not unfit.slots or set(unfit.slots) & set(part.slots)):
            return f"node {part.node_id} is unfit: {unfit.reason}"[:2000]
    return ""


def _left_s(home: Node, now: datetime) -> float:
    """Seconds until the machine is taken away."""
    if home.notice is None or home.notice.grace_s is None:
        return math.inf
    return home.notice.grace_s - (now - home.noticed_at).total_seconds()


def _notice_text(home: Node) -> str:
    notice = home.notice
    assert notice is not None
    within = f" within {notice.grace_s:g} s" if notice.grace_s is not None else ""
    return f"node {home.node_id} is taken away{within} ({notice.source}: {notice.kind})"


def _stalled_text(stalled: RunStalled) -> str:
    without = " and goes on without that node" if stalled.on_stall == "exclude" else ""
    return (
        f"rank {stalled.rank} on {stalled.node_id} has made no step for {stalled.silent_s:.3g} s after step "
        f"{stalled.step} (the median step takes {stalled.median_step_s:.3g} s); it restarts{without}"
    )


def _not_started(run: Run, waited_s: float, policy: Policy) -> StopRun | None:
    """The stop of a gang some of whose nodes have had their time to start it and did not."""
    missing = [part.node_id for part in run.live if not part.started]
    if not missing or waited_s < policy.faults.start_deadline_s:
        return None
    names = ", ".join(sorted(missing)[:5])
    text = f"its ranks on {names} have not started within {policy.faults.start_deadline_s:g} s of the placement"
    return StopRun(run.run_id, run.generation, "start_deadline", text, 0.0)


def _outcome(run: Run, now: datetime, policy: Policy) -> Settlement | None:
    endings = {part.ended for part in run.parts.values()}
    stop = run.stopping
    if endings == {"succeeded"}:
        return _complete(run, now, policy)
    if run.cancel_reason is not None or (stop is not None and stop.then == "cancel"):
        return CancelRun(run.run_id, run.cancel_reason or (stop.message if stop else ""))
    if stop is not None and stop.then == "fail":
        return FailRun(run.run_id, run.generation, stop.message)
    if endings & {"failed", "lost"}:
        reason = queue_reason_of(_broken_reason(run))
        if reason == "crashed":
            return _crashed(run)
    else:
        reason = queue_reason_of(stop.reason) if stop else "preempted"
    if reason == "node lost":
        exited = next((part.exit for part in run.parts.values() if part.exit and part.exit.reason), None)
        why = exited.reason if exited else stop.message if stop else "its nodes were lost"
        return _retry_after_infrastructure_failure(run, why, policy, exited.log_tail if exited else ())
    return QueueRun(run.run_id, run.next_generation, reason, run.failures)


def _retry_after_infrastructure_failure(
    run: Run, why: str, policy: Policy, log_tail: tuple[str, ...] = ()
) -> QueueRun | FailRun:
    """Queue a run that seems not at fault, or fail it if too many generations in a row were broken like this one."""
    failures = run.infrastructure_failures + 1
    if failures < policy.faults.max_infrastructure_failures:
        return QueueRun(run.run_id, run.next_generation, "node lost", run.failures)
    reason = (
        f"gave up after {failures} generations in a row were broken by their nodes or the store "
        f"without a new checkpoint; the last: {why}"
    )
    return FailRun(run.run_id, run.generation, reason[:2000], log_tail)


def _complete(run: Run, now: datetime, policy: Policy) -> CompleteRun | QueueRun | FailRun | None:
    """Completed; but not before each checkpoint that its ranks staged is committed or refused, however long that takes.

    A run whose last state is lost has not its result: what is missing is trained again.
    """
    if run.staged.open:
        return None
    trains = run.spec.kind == "train" and run.spec.task is not None and run.spec.training is not None
    if trains and run.final is None and not run.staged.broken and run.ended_at is not None:
        waited = now - run.ended_at
        if waited < timedelta(seconds=policy.faults.final_checkpoint_wait_s):
            return None
    first = next((part for part in run.parts.values() if 0 in part.ranks), None)
    exited = first.exit if first else None
    if run.staged.broken:
        refused = run.staged.broken[max(run.staged.broken)]
        lost = f"its last checkpoint, of step {refused.step}, was refused: {refused.reason}"
        if refused.infrastructure_failure:
            return _retry_after_infrastructure_failure(run, lost, policy)
        return _retry_after_failure(run, lost[:2000])
    stored = run.resume.step if run.resume is not None else 0
    if trains and exited is not None and exited.step > stored:
        lost = f"its ranks ended at step {exited.step}, and no node could store a checkpoint after {stored}"
        return _retry_after_failure(run, lost)
    checkpoint = run.final or (run.newest.ref if run.newest else None)
    metrics = tuple(exited.metrics.items()) if exited else ()
    if exited is None:
        return CompleteRun(run.run_id, run.generation, checkpoint, metrics, ())
    exits = [exited, *(part.exit for part in run.parts.values() if part is not first)]
    notice = "; ".join(each.notice for each in exits if each is not None and each.notice)
    return CompleteRun(run.run_id, run.generation, checkpoint, metrics, exited.artifacts, notice)


def _crashed(run: Run) -> QueueRun | FailRun:
    hopeless = next((part for part in run.parts.values() if part.exit is not None and part.exit.permanent), None)
    point = run.failure_point
    repeats = bool(point) and point == run.last_failure_point
    part = hopeless or run.culprit
    exited = part.exit if part else None
    why = (exited.reason if exited else "") or "its ranks failed"
    where = f", rank {exited.rank} on {exited.node_id}" if exited and exited.rank is not None else ""
    code = f", exit code {exited.exit_code}" if exited and exited.exit_code is not None else ""
    if hopeless:
        limit = "another would end the same way"
    elif repeats and run.failures + 1 < run.spec.max_attempts:
        step = exited.step if exited else 0
        limit = "twice the same " + (f"at step {step}" if step else "before the first step")
    else:
        limit = ""
    return _retry_after_failure(run, why, limit, where + code, exited.log_tail if exited else ())


def _retry_after_failure(
    run: Run, why: str, limit: str = "", details: str = "", log_tail: tuple[str, ...] = ()
) -> QueueRun | FailRun:
    """Queue a run after a failure of its own, or fail it: there is no attempt left, or ``limit`` speaks against one."""
    failures = run.failures + 1
    if not limit and failures < run.spec.max_attempts:
        return QueueRun(run.run_id, run.next_generation, "crashed", failures)
    attempts = f"{failures} attempt{'s' if failures > 1 else ''} ({limit or f'max_attempts {run.spec.max_attempts}'})"
    # The reason first: tables cut a text off at its end.
    return FailRun(run.run_id, run.generation, f"{why}; after {attempts}{details}", log_tail)


def _broken_reason(run: Run) -> StopReason:
    """Whose fault a broken generation was.

    Ranks whose peer's node died fail as well, with errors that look like their own: a lost part
    speaks for all. So does a failure after the generation was asked to stop.
    """
    parts = list(run.parts.values())
    if any(part.ended == "lost" for part in parts):
        return "node_lost"
    own = [part for part in parts if part.exit is not None and part.ended == "failed" and part.unprovoked]
    if any(part.exit is not None and not part.exit.infrastructure_failure for part in own):
        return "crashed"
    if own:
        return "infrastructure"
    return run.stopping.reason if run.stopping else "crashed"


def _broken_text(part: MemberState) -> str:
    if part.ended == "lost":
        return f"node {part.node_id} is lost"
    reason = part.exit.reason if part.exit else ""
    return f"ranks on {part.node_id} failed: {reason}"[:500] if reason else f"ranks on {part.node_id} failed"
