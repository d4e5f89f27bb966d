"""Every sentence about a fact, in one table: the command line, the client and the page show these.

A sentence is about the run, node, dataset or model of the fact and does not name it. It is one line and stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from contracts.base import Event
from contracts.checkpoint_ref import name_point
from contracts.events import capacity, checkpoint, dataset, model, node, request, run, study
from contracts.formats import format_bytes, format_metrics, format_reason, format_time, plural
from contracts.problems import join_problems

#: Metrics, and ranks or nodes, that a sentence names.
MAX_NAMED_METRICS = 4
MAX_NAMED = 5
#: Facts that come with every checkpoint: who follows a run does not see them.
ROUTINE_FACTS: tuple[type[Event], ...] = (checkpoint.CheckpointStaged, checkpoint.CheckpointDeleted)
#: What follows once a rank has stalled, by ``on_stall``.
STALL_ACTIONS = {
    "observe": "the run goes on",
    "restart": "the run restarts",
    "exclude": "the run restarts without this node",
}


def describe(event: Any) -> str:
    """Return one line about a fact. Never raises: who can publish can say what makes no sentence."""
    text = SENTENCES.get(type(event))
    if text is not None:
        with suppress(Exception):
            return " ".join(text(event).splitlines())
    return str(event.type.removeprefix("trainbus."))


def describe_milestone(event: Any) -> str:
    """Return one line about a fact for a follower of its run, '' for a fact that comes with every checkpoint."""
    return "" if isinstance(event, ROUTINE_FACTS) else describe(event)


def explain_request(*, scheduler_answers: bool) -> str:
    """Return why a run that was requested is not accepted yet."""
    if scheduler_answers:
        return "the request is stored; the scheduler has not answered it yet"
    return (
        "the request is stored, but no scheduler answers: the run is accepted as soon as one does "
        "(`trainbus doctor` shows what is wrong)"
    )


def format_problems(fact: run.RunRejected) -> str:
    """Return what is wrong with a request, each problem with its field."""
    return join_problems(fact.problems) or fact.reason


def format_members(members: Iterable[run.Member]) -> str:
    """Return where a placement is: `` of node-0``, or ``: node-0 (4), node-1 (2)`` with the slots of each node."""
    members = tuple(members)
    if len(members) == 1:
        return f" of {members[0].node_id}"
    return ": " + ", ".join(f"{each.node_id} ({len(each.slots)})" for each in members)


def name_checkpoint(ref: run.CheckpointRef | checkpoint.CheckpointStaged) -> str:
    """Return what a checkpoint is called in a sentence: by its step, or by its version where that is not known."""
    return f"checkpoint of {name_point(ref.step, is_version=ref.step_is_count)}"


def _accepted(fact: run.RunAccepted) -> str:
    slots = fact.spec.slots
    wanted = plural(slots.min, "slot") if slots.min == slots.max else f"{slots.min} to {plural(slots.max, 'slot')}"
    parent = f", from a checkpoint of {fact.parent_run_id}" if fact.parent_run_id else ""
    priority = f", priority {fact.spec.priority}" if fact.spec.priority else ""
    data = "; its data is prepared first" if fact.spec.needs_data else ""
    return f"accepted as {fact.spec.name!r}: {wanted}{priority}{parent}{data}"


def _prepared(fact: run.RunPrepared) -> str:
    if not fact.datasets:
        return f"data ready: {_describe_samples(fact)}"
    return "data ready: " + "; ".join(f"{name}: {_describe_samples(each)}" for name, each in fact.datasets.items())


def staging_text(dataset: run.RunPrepared, node_ids: Iterable[str]) -> str:
    """Return which files are copied to which nodes."""
    names = [name or each.dataset_id[:12] for name, each in dataset.by_name.items()]
    datasets = f"dataset{'s' if len(names) > 1 else ''} {', '.join(names)}"
    nodes = list(node_ids)
    more = f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else ""
    return f"the files of {datasets} are being copied to {', '.join(nodes[:MAX_NAMED])}{more}"


def _staged_files(fact: node.NodeStaged) -> str:
    if fact.error:
        return f"the files for run {fact.run_id} could not be copied: {fact.error}"
    return f"has {format_bytes(fact.size_bytes)} of files for run {fact.run_id}, after {fact.seconds:.3g} s"


def _describe_samples(prepared: run.RunPrepared | run.PreparedDataset) -> str:
    parts = {"validation": prepared.validation_samples, "test": prepared.test_samples}
    others = "".join(f", {count:,} for {name}" for name, count in parts.items() if count)
    return f"{plural(prepared.train_samples, 'sample')} to train{others} (dataset {prepared.dataset_id[:12]})"


def _placed(fact: run.RunPlaced) -> str:
    again = f" again (generation {fact.generation})" if fact.generation > 1 else ""
    start = f", from its {name_checkpoint(fact.resume)}" if fact.resume else ""
    start += f", with the {'weights' if fact.spec.command is None else 'files'} of {fact.init.uri}" if fact.init else ""
    return f"placed{again} on {plural(fact.world_size, 'slot')}{format_members(fact.members)}{start}"


def _started(fact: run.RunStarted) -> str:
    if fact.step == 0:
        return f"started on {fact.node_id}"
    kept = " with the state that was kept in memory" if fact.resumed_from == "memory" else ""
    return f"started on {fact.node_id} from step {fact.step}{kept}"


def _stalled(fact: run.RunStalled) -> str:
    return (
        f"rank {fact.rank} on {fact.node_id} has made no step for {fact.silent_s:.3g} s after step {fact.step} "
        f"(median {fact.median_step_s:.3g} s a step); {STALL_ACTIONS.get(fact.on_stall, fact.on_stall)}"
    )


def held_up_text(fact: run.RunHeldUp) -> str:
    """Return whom the ranks of a gang wait for, and where."""
    nodes = ", ".join(fact.missing_nodes[:MAX_NAMED])
    more = f" and {len(fact.missing_nodes) - MAX_NAMED} more" if len(fact.missing_nodes) > MAX_NAMED else ""
    if not fact.address:
        return f"cannot begin: {fact.node_id} waits for {nodes} to publish where the ranks meet"
    ranks = ", ".join(map(str, fact.missing_ranks[:MAX_NAMED]))
    ranks += " ..." if len(fact.missing_ranks) > MAX_NAMED else ""
    is_one = len(fact.missing_ranks) == 1
    if 0 in fact.missing_ranks:
        return f"cannot begin: {fact.node_id} does not reach rank 0 on {nodes} at {fact.address}"
    who, have = ("rank", "has") if is_one else ("ranks", "have")
    return f"cannot begin: {who} {ranks} on {nodes}{more} {have} not come to {fact.address} yet"


def _straggler(fact: run.RunStraggler) -> str:
    return (
        f"rank {fact.rank} on {fact.node_id} takes {fact.factor:.2f} times the others' time for a step, over "
        f"{plural(fact.over_steps, 'step')}"
    )


def _starved(fact: run.RunStarved) -> str:
    return (
        f"rank {fact.rank} on {fact.node_id} waits for data {fact.wait_share:.0%} of its time ({fact.bound_by}): "
        f"{fact.hint}"
    )


def _stopping(fact: run.RunStopping) -> str:
    within = f"asked to stop within {fact.grace_s:g} s" if fact.grace_s else "stopped at once"
    return f"{within}{format_reason(fact.message)}"


def _released(fact: run.RunReleased) -> str:
    saved = "everything saved" if fact.clean else "the steps after its last checkpoint are not saved"
    detail = f" ({fact.detail})" if fact.detail else ""
    if not fact.step and not fact.clean:
        return f"stopped on {fact.node_id}, nothing saved{detail}"
    step = f" at step {fact.step}" if fact.step else ""
    return f"stopped on {fact.node_id}{step}, {saved}{detail}"


def _exited(fact: run.RunExited) -> str:
    step = f" at step {fact.step}" if fact.step else ""
    if fact.outcome == "succeeded":
        return f"finished on {fact.node_id}{step}"
    rank = "" if fact.rank is None else f" (rank {fact.rank})"
    return f"failed on {fact.node_id}{rank}{step}: {fact.reason or f'exit code {fact.exit_code}'}"


def _completed(fact: run.RunCompleted) -> str:
    metrics = f": {format_metrics(fact.metrics, MAX_NAMED_METRICS)}" if fact.metrics else ""
    return f"completed{metrics}" + (f", but {fact.notice}" if fact.notice else "")


def _evaluated(fact: run.RunEvaluated) -> str:
    champion = fact.champion_metrics
    compared = f"; the champion has {format_metrics(champion, MAX_NAMED_METRICS)}" if champion else ""
    return f"evaluated: {format_metrics(fact.metrics, MAX_NAMED_METRICS)}{compared}"


def _promoted(fact: run.RunPromoted) -> str:
    reason = f" ({fact.reason})" if fact.reason else ""
    return f"promoted to champion: {fact.model} version {fact.version}{reason}"


def _staged(fact: checkpoint.CheckpointStaged) -> str:
    return f"{name_checkpoint(fact)} uploaded by {fact.node_id}: {format_bytes(fact.size_bytes)}"


def _committed(fact: checkpoint.CheckpointCommitted) -> str:
    state = f", state {fact.state_digest[:12]}" if fact.state_digest and fact.exactness == "exact" else ""
    return f"{name_checkpoint(fact.checkpoint)} saved: {format_bytes(fact.size_bytes)}{state}"


def _pinned(fact: checkpoint.CheckpointPinned) -> str:
    return f"checkpoint {fact.step} {'pinned' if fact.pinned else 'unpinned'}{format_reason(fact.reason)}"


def _rotten(fact: checkpoint.CheckpointRotten) -> str:
    repair = "; the nodes that have them write them again" if fact.repair else ""
    return f"checkpoint {fact.step}: {plural(len(fact.blobs), 'blob')} damaged or missing{repair}"


def _values(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _suggested(fact: study.TrialSuggested) -> str:
    until = f", up to epoch {fact.until_epoch}" if fact.until_epoch else ""
    if fact.purpose == "repeat":
        return f"trial {fact.trial} repeats trial {fact.repeats} with seed {fact.seed}{until}"
    params = ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in fact.params.items()
    )
    return f"trial {fact.trial} begins with {params}{until}"


def _trial_ended(fact: study.TrialEnded) -> str:
    if fact.outcome == "completed":
        broken = ", but it breaks a constraint" if any(violation > 0 for violation in fact.violations) else ""
        return f"trial {fact.trial} completed: {_values(fact.values)}{broken}"
    return f"trial {fact.trial} {fact.outcome}{format_reason(fact.reason)}"


def _study_completed(fact: study.StudyCompleted) -> str:
    if not fact.best:
        return f"completed without a result{format_reason(fact.reason)}"
    best = f"best trial {fact.best[0]}" if len(fact.best) == 1 else "best trials " + ", ".join(map(str, fact.best))
    return f"completed: {best}{format_reason(fact.reason)}"


def _ingested(fact: dataset.DatasetIngested) -> str:
    bad = sum(kind.count for kind in fact.quarantined)
    kinds = ", ".join(f"{kind.count} {kind.code}" for kind in fact.quarantined)
    skipped = ""
    if fact.skipped_files == 1:
        skipped = f"; 1 file is no image: {fact.skipped_example}"
    elif fact.skipped_files:
        skipped = f"; {fact.skipped_files:,} files are no images, such as {fact.skipped_example}"
    return f"read {plural(fact.accepted, 'record')}" + (f", {bad:,} in quarantine ({kinds})" if bad else "") + skipped


def _progress(fact: dataset.DatasetProgress) -> str:
    return f"{fact.phase}: {fact.done:,}" + (f" of {fact.total:,}" if fact.total is not None else "")


def _sharded(fact: dataset.DatasetSharded) -> str:
    return f"written as {plural(fact.row_count, 'sample')} in {plural(fact.shard_count, 'shard')}"


def _promoted_model(fact: model.ModelPromoted) -> str:
    back = " (rolled back)" if fact.rollback else ""
    return f"version {fact.version}, from run {fact.run_id}, is the champion{back}"


def _deployed(fact: model.ModelDeployed) -> str:
    replaced = f", in place of version {fact.replaced_version}" if fact.replaced_version else ""
    return f"version {fact.version} (run {fact.run_id}) answers after {fact.seconds:.1f} s{replaced}"


def _deploy_failed(fact: model.ModelDeployFailed) -> str:
    left = f"version {fact.serving_version} answers" if fact.serving_version else "no version answers"
    return f"version {fact.version} (run {fact.run_id}) is not served ({fact.stage}): {fact.reason}; {left}"


def _deploy_delayed(fact: model.ModelDeployDelayed) -> str:
    return (
        f"version {fact.version} (run {fact.run_id}) is not served yet ({fact.stage}): {fact.reason}; "
        f"instance {fact.instance} tries again in {fact.retry_in_s:g} s"
    )


def _by(fact: model.ModelApproved | node.NodeDraining | node.NodeUndrained | capacity.PolicyAdopted) -> str:
    return f" by {fact.user}" if fact.user else ""


def _approved(fact: model.ModelApproved) -> str:
    return f"run {fact.run_id} {'approved' if fact.approved else 'declined'}{_by(fact)}{format_reason(fact.reason)}"


def _staged_model(fact: model.ModelStaged) -> str:
    if fact.version is None:
        return f"alias {fact.alias} removed{format_reason(fact.reason)}"
    return f"version {fact.version}, from run {fact.run_id}, is {fact.alias}{format_reason(fact.reason)}"


def _joined(fact: node.NodeJoined) -> str:
    kind = "CPU" if fact.accelerator == "cpu" else fact.accelerator
    return f"joined with {plural(fact.slots, f'{kind} slot')}"


def _notice(fact: node.NodeNotice) -> str:
    within = f" within {fact.grace_s:g} s" if fact.grace_s is not None else ""
    return f"about to be taken away{within} ({fact.source}: {fact.kind}){format_reason(fact.detail)}"


def _wanted(fact: capacity.CapacityWanted) -> str:
    return f"{plural(fact.nodes, 'node')} of pool {fact.pool} wanted{format_reason(fact.reason)}"


def adoption_text(fact: capacity.PolicyAdopted) -> str:
    """Return who adopted a policy, and why."""
    match fact.origin:
        case "request":
            return f",{_by(fact)}{format_reason(fact.reason)}" if fact.user or fact.reason else ""
        case "setting":
            return f", as {fact.instance} was started with it"
        case "default":
            set_to = f" with {', '.join(fact.settings)}" if fact.settings else ""
            return f", as the default{set_to}"
    return ""


#: Fact -> its sentence.
SENTENCES: dict[type[Any], Callable[[Any], str]] = {
    run.RunAccepted: _accepted,
    run.RunRejected: lambda e: f"rejected: {format_problems(e)}",
    run.RunPrepared: _prepared,
    run.RunPrepareFailed: lambda e: f"data cannot be used: {e.reason}",
    run.RunStaging: lambda e: f"{staging_text(e.dataset, e.node_ids)}, for {e.limit_s:g} s at most",
    run.RunQueued: lambda e: "queued" if e.reason == "new" else f"queued again ({e.reason})",
    run.RunWaiting: lambda e: f"waiting: {e.message}",
    run.RunReserved: lambda e: f"reserved to start by {format_time(e.start_by)} on {plural(len(e.node_ids), 'node')}",
    run.RunPlaced: _placed,
    run.RunStarted: _started,
    run.RunHeldUp: held_up_text,
    run.RunStalled: _stalled,
    run.RunStraggler: _straggler,
    run.RunStarved: _starved,
    run.RunStopping: _stopping,
    run.RunReleased: _released,
    run.RunExited: _exited,
    run.RunCompleted: _completed,
    run.RunFailed: lambda e: f"failed: {e.reason}",
    run.RunCancelling: lambda e: f"cancellation requested{format_reason(e.reason)}",
    run.RunCancelled: lambda e: f"cancelled{format_reason(e.reason)}",
    run.RunTracked: lambda e: f"recorded in MLflow as run {e.mlflow_run_id}",
    run.RunEvaluated: _evaluated,
    run.RunPromotionPending: lambda e: f"awaiting {e.awaits}{format_reason(e.reason)}",
    run.RunPromoted: _promoted,
    run.RunNotPromoted: lambda e: f"not promoted: {e.reason}",
    run.RunProgress: lambda e: f"at step {e.step}",
    run.RunLog: lambda e: f"rank {e.rank} printed {plural(len(e.lines), 'line')}",
    checkpoint.CheckpointStaged: _staged,
    checkpoint.CheckpointCommitted: _committed,
    checkpoint.CheckpointRefused: lambda e: (
        f"checkpoint {e.step} {'not kept' if e.superseded else 'refused'}: {e.reason}"
    ),
    checkpoint.CheckpointDeleted: lambda e: f"checkpoint {e.step} deleted: {e.reason}",
    checkpoint.CheckpointPinned: _pinned,
    checkpoint.CheckpointRotten: _rotten,
    checkpoint.CheckpointRepaired: lambda e: f"checkpoint {e.step}: a blob repaired by {e.node_id}",
    dataset.DatasetIngested: _ingested,
    dataset.DatasetIngestFailed: lambda e: f"data cannot be read: {e.reason}",
    dataset.DatasetShardFailed: lambda e: f"data cannot be written as a dataset: {e.reason}",
    dataset.DatasetProgress: _progress,
    dataset.DatasetSharded: _sharded,
    model.ModelPromoted: _promoted_model,
    model.ModelDeployed: _deployed,
    model.ModelDeployFailed: _deploy_failed,
    model.ModelDeployDelayed: _deploy_delayed,
    model.ModelConfigured: lambda e: f"gates configured (version {e.version}){format_reason(e.reason)}",
    model.ModelApproved: _approved,
    model.ModelStaged: _staged_model,
    node.NodeJoined: _joined,
    node.NodeLeft: lambda e: f"left{format_reason(e.reason)}",
    node.NodeLost: lambda e: f"lost: {e.reason}",
    node.NodeDraining: lambda e: f"draining{_by(e)}{format_reason(e.reason)}",
    node.NodeUndrained: lambda e: f"undrained{_by(e)}{format_reason(e.reason)}",
    node.NodeNotice: _notice,
    node.NodeStaged: _staged_files,
    node.NodeUnfit: lambda e: f"unfit: {e.reason}",
    study.StudyRejected: lambda e: f"rejected: {e.reason}",
    study.StudyAccepted: lambda e: f"accepted as {e.spec.name!r}: {plural(e.spec.trials, 'trial')}",
    study.TrialSuggested: _suggested,
    study.TrialReported: lambda e: f"trial {e.trial} at epoch {e.step}: {_values(e.values)}",
    study.TrialPruned: lambda e: f"trial {e.trial} {e.reason}",
    study.TrialPaused: lambda e: f"trial {e.trial} paused at epoch {e.step}: {_values(e.values)}",
    study.TrialResumed: lambda e: f"trial {e.trial} goes on to epoch {e.until_epoch}",
    study.TrialEnded: _trial_ended,
    study.StudyCompleted: _study_completed,
    study.StudyStopped: lambda e: f"stopped{format_reason(e.reason)}",
    request.RequestRefused: lambda e: f"{e.request_type.split('.')[1]} refused: {e.reason}",
    capacity.CapacityWanted: _wanted,
    capacity.PolicyAdopted: lambda e: f"policy {e.policy.name} ({e.digest}) in force{adoption_text(e)}",
}
