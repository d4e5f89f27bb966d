"""Answers to requests: accept or reject, with what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contracts.envelope import MAX_BODY_BYTES
from contracts.events.run import CheckpointRef
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.problems import FieldProblem, join_problems
from contracts.spec.data import DataSource
from contracts.spec.launchers import describe_launcher
from services.scheduler.core.decisions import AcceptRun, RejectRun
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.core.state.run import Run

#: The longest request that is accepted, as JSON. Each placement holds it, beside the members and the dataset: half of
#: what an event may have.
MAX_SPEC_BYTES = MAX_BODY_BYTES // 2
#: How many of the existing checkpoints a rejection lists.
MAX_LISTED_CHECKPOINTS = 20
#: How many problems the reason of a rejection names; the fact has all of them.
MAX_NAMED_PROBLEMS = 5
#: The longest name of a run.
NAME_LENGTH = 200


def depends_on_log(spec: TrainRequested) -> bool:
    """Whether the answer depends on what has been folded."""
    return spec.resume_from is not None or spec.init_from is not None


def answer_train(cluster: Cluster, run_id: str, spec: TrainRequested) -> AcceptRun | RejectRun:
    """Accept the request unless it can never run. Too many slots is no such reason: nodes may join."""
    problems = [
        FieldProblem(
            field=field,
            message=f"no committed checkpoint has the manifest {uri}, or it was deleted: take the uri of one that is "
            "there (`trainbus checkpoints ls RUN`); one that is pinned stays",
        )
        for field, uri in (("resume_from", spec.resume_from), ("init_from", spec.init_from))
        if uri is not None and uri not in cluster.checkpoints
    ]
    if spec.kind == "evaluate":
        named = {"data": spec.data, **{f"datasets.{name}": data for name, data in spec.datasets.items()}}
        problems += [
            FieldProblem(field=field, message=f"an evaluation measures an existing dataset: give {field}.dataset_id")
            for field, data in named.items()
            if isinstance(data, DataSource)
        ]
    if spec.command is not None and (problem := describe_launcher(spec.command, spec.slots.max)):
        problems.append(FieldProblem(field="command", message=problem))
    size = len(spec.model_dump_json(exclude_defaults=True).encode())
    if size > MAX_SPEC_BYTES:
        message = (
            f"the request has {size:,} bytes, more than the {MAX_SPEC_BYTES:,} that a placement can hold: put "
            "large params, env and files into the code package or the object store, and name them"
        )
        problems.append(FieldProblem(field="", message=message))
    if problems:
        return RejectRun(run_id, spec.name, "the request cannot run as it is", tuple(problems))
    return AcceptRun(run_id, spec.run_spec)


def answer_invalid(run_id: str, data: Any, problems: Sequence[FieldProblem]) -> RejectRun:
    """Reject what does not fit its schema with what is wrong. ``data`` is the body, if any."""
    name = data.get("name") if isinstance(data, dict) else None
    reason = f"the request is not valid: {join_problems(problems[:MAX_NAMED_PROBLEMS])}"
    return RejectRun(run_id, name[:NAME_LENGTH] if isinstance(name, str) else None, reason, tuple(problems))


def answer_restore(parent: Run, run_id: str, request: RestoreRequested) -> AcceptRun | RejectRun:
    """Make a new run out of ``parent``'s request, starting from the checkpoint that is asked for."""
    found = find_checkpoint(parent, request)
    name = f"{parent.spec.name} (restored)"[:NAME_LENGTH]
    if found is None:
        field, wanted = ("step", request.step) if request.step is not None else ("epoch", request.epoch)
        message = f"run {parent.run_id} has no committed checkpoint of {field} {wanted}; {_existing(parent)}"
        return RejectRun(run_id, name, "there is no such checkpoint", (FieldProblem(field=field, message=message),))
    begins = {"resume_from": found.uri, "init_from": None, "init_exclude": ()}
    spec = parent.spec.model_copy(update={"name": name, **begins})
    return AcceptRun(run_id, spec, parent.run_id)


def find_checkpoint(parent: Run, request: RestoreRequested) -> CheckpointRef | None:
    """The committed checkpoint of that step, or the last one of that epoch; the newest generation's if several."""
    fitting = [
        committed
        for committed in parent.checkpoints.values()
        if (committed.ref.step == request.step if request.step is not None else committed.ref.epoch == request.epoch)
    ]
    newest = max(fitting, key=lambda committed: (committed.generation, committed.ref.step), default=None)
    return newest.ref if newest is not None else None


def _existing(parent: Run) -> str:
    steps = sorted({(committed.ref.step, committed.ref.epoch) for committed in parent.checkpoints.values()})
    if not steps:
        return "it has none at all"
    listed = ", ".join(f"step {step} (epoch {epoch})" for step, epoch in steps[-MAX_LISTED_CHECKPOINTS:])
    return f"these exist: {listed}"
