"""One line a fact, for the timeline of a run."""

from __future__ import annotations

from contracts.base import Event
from contracts.events import checkpoint, dataset, model, node, run


def describe(event: Event) -> str:
    """What a person wants to know about ``event`` at a glance."""
    match event:
        case run.RunAccepted():
            slots = event.spec.slots
            return f"{event.spec.name}: {slots.min}..{slots.max} slots, priority {event.spec.priority}"
        case run.RunRejected():
            return (
                "; ".join(f"{p.field}: {p.message}" if p.field else p.message for p in event.problems) or event.reason
            )
        case run.RunPrepared():
            return (
                f"dataset {event.dataset_id[:12]}: {event.train_samples:,} train, "
                f"{event.validation_samples:,} validation, {event.test_samples:,} test"
            )
        case run.RunQueued():
            return f"waits for generation {event.next_generation} ({event.reason})"
        case run.RunWaiting():
            return event.message
        case run.RunReserved():
            return f"is promised to start by {event.start_by:%Y-%m-%d %H:%M:%S} UTC on {len(event.node_ids)} nodes"
        case run.RunPlaced():
            where = ", ".join(f"{m.node_id}[{','.join(map(str, m.slots))}]" for m in event.members)
            resume = f", from step {event.resume.step}" if event.resume else ""
            resume += f", with the weights of {event.init.uri}" if event.init else ""
            return f"generation {event.generation}: {event.world_size} slots on {where}{resume}"
        case run.RunStarted():
            memory = ", out of memory" if event.resumed_from == "memory" else ""
            return f"{event.node_id} trains from step {event.step}, sample {event.samples_consumed:,}{memory}"
        case run.RunStalled():
            return (
                f"rank {event.rank} on {event.node_id} has made no step for {event.silent_s:.3g} s after step "
                f"{event.step} (median {event.median_step_s:.3g} s a step): {event.on_stall}"
            )
        case run.RunStraggler():
            return (
                f"rank {event.rank} on {event.node_id} took {event.factor:.2f} times the others' time for a step, "
                f"over {event.over_steps} steps"
            )
        case run.RunStarved():
            return (
                f"rank {event.rank} on {event.node_id} waited for data {event.wait_share:.0%} of {event.over_s:.3g} s, "
                f"{event.over_steps} steps ({event.bound_by}): {event.hint}"
            )
        case run.RunPreempting():
            return f"{event.reason} (grace {event.grace_s:g} s, then {event.then})"
        case run.RunReleased():
            left = "everything saved" if event.clean else f"not everything saved {event.detail}".rstrip()
            return f"{event.node_id} released its slots at step {event.step}, {left}"
        case run.RunExited():
            return f"{event.node_id} {event.outcome} at step {event.step}" + (
                f": {event.reason}" if event.reason else ""
            )
        case run.RunCompleted():
            return _metrics(event.metrics) or "done"
        case run.RunTracked():
            return f"MLflow run {event.mlflow_run_id}"
        case run.RunEvaluated():
            champion = (
                f"; champion {_metrics(event.champion_metrics)}" if event.champion_metrics else "; no champion yet"
            )
            return _metrics(event.metrics) + champion
        case run.RunPromoted():
            return f"{event.model} version {event.version}: {event.reason}"
        case run.RunNotPromoted():
            return f"{event.model}: {event.reason}"
        case checkpoint.CheckpointStaged():
            return f"{event.node_id} uploaded step {event.step}, {_size(sum(f.size_bytes for f in event.files))}"
        case checkpoint.CheckpointCommitted():
            digest = f", {event.exactness}, state {event.state_digest[:12]}" if event.state_digest else ""
            return f"step {event.checkpoint.step}, epoch {event.checkpoint.epoch}, {_size(event.size_bytes)}{digest}"
        case checkpoint.CheckpointDeleted():
            return f"step {event.step}: {event.reason}"
        case checkpoint.CheckpointPinned():
            return f"step {event.step} " + ("is kept" if event.pinned else "is no longer kept") + f": {event.reason}"
        case checkpoint.CheckpointRotten():
            return f"step {event.step}: {len(event.blobs)} blobs are damaged or missing"
        case checkpoint.CheckpointRepaired():
            return f"step {event.step}: a blob written again by {event.node_id}"
        case dataset.DatasetIngested():
            bad = sum(q.count for q in event.quarantined)
            return f"{event.accepted:,} records" + (f", {bad} quarantined" if bad else "")
        case dataset.DatasetSharded():
            return f"{event.row_count:,} rows in {event.shard_count} shards"
        case node.NodeJoined():
            return f"{event.slots} slots ({event.accelerator})"
        case node.NodeNotice():
            within = f" within {event.grace_s:g} s" if event.grace_s is not None else ""
            return f"is taken away{within} ({event.source}: {event.kind})"
        case model.ModelPromoted():
            return f"version {event.version} from run {event.run_id}"
    return str(getattr(event, "reason", ""))


def _metrics(values: dict[str, float], limit: int = 4) -> str:
    shown = [f"{name} {value:.4g}" for name, value in sorted(values.items())[:limit]]
    return ", ".join(shown) + (" ..." if len(values) > limit else "")


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
