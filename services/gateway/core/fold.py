"""The fold of events into rows. Applying the same events in the same order gives the same rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from contracts import exactness
from contracts.base import Event
from contracts.events.checkpoint import CheckpointCommitted, CheckpointDeleted
from contracts.events.dataset import (
    DatasetIngested,
    DatasetIngestFailed,
    DatasetSharded,
    DatasetShardFailed,
    IngestionFact,
)
from contracts.events.model import (
    ModelConfigured,
    ModelDeployed,
    ModelDeployFailed,
    ModelFact,
    ModelPromoted,
    ModelStaged,
)
from contracts.events.node import NodeFact, NodeJoined, NodeNotice
from contracts.events.run import (
    CheckpointRef,
    RunAccepted,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunFact,
    RunFailed,
    RunNotPromoted,
    RunPlaced,
    RunPrepared,
    RunProgress,
    RunPromoted,
    RunPromotionPending,
    RunQueued,
    RunRejected,
    RunReleased,
    RunStarted,
    RunTracked,
    RunWaiting,
)
from contracts.events.study import (
    StudyAccepted,
    StudyCompleted,
    StudyFact,
    StudyRejected,
    StudyStopped,
    TrialEnded,
    TrialFact,
    TrialSuggested,
)
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.run_states import TERMINAL_STATES
from contracts.spec.run import RunFields
from contracts.state.node import incarnations_before, next_drain, next_node_state
from contracts.state.run import change_run
from services.gateway.core.rows import (
    Checkpoint,
    Dataset,
    Ingestion,
    Model,
    Node,
    Point,
    Progress,
    RegisteredModel,
    Run,
    Study,
)

R = TypeVar("R")
#: Fields of a request that came after v0.1.0: where one has its default, the request is what it was without it.
ADDED_FIELDS = (
    "packages",
    "study",
    "trial",
    "datasets",
    "evaluate.metric",
    "evaluate.mode",
    "evaluation.checkpoint",
    "evaluation.slots",
    "evaluation.command",
)
#: Fields of ``run.evaluated`` that came after v0.1.0.
ADDED_EVALUATION_FIELDS = ("gates", "champion_version", "configuration")


@dataclass(frozen=True, slots=True)
class At:
    """When and where an event was published. ``run_id`` is that of the run that a request makes."""

    sequence: int
    time_s: float
    run_id: str = ""


@dataclass(slots=True)
class Rows:
    """The rows that a batch of events is about: what was there, and after ``apply`` what is."""

    runs: dict[str, Run] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    datasets: dict[str, Dataset] = field(default_factory=dict)
    models: dict[tuple[str, int], Model] = field(default_factory=dict)
    registered: dict[str, RegisteredModel] = field(default_factory=dict)
    ingestions: dict[str, Ingestion] = field(default_factory=dict)
    studies: dict[str, Study] = field(default_factory=dict)

    def copy(self) -> Rows:
        """Return rows that can be changed without these."""
        return Rows(**{each.name: dict(getattr(self, each.name)) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class Keys:
    """The rows that must be loaded before events can be applied."""

    runs: set[str] = field(default_factory=set)
    checkpoints: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    registered: set[str] = field(default_factory=set)
    ingestions: set[str] = field(default_factory=set)
    #: Fingerprints of ingestions that have no dataset yet, and of datasets.
    inputs: set[str] = field(default_factory=set)
    studies: set[str] = field(default_factory=set)


def keys(events: Iterable[tuple[Event, At]]) -> Keys:
    """Return the keys of the existing rows that the events change."""
    found = Keys()
    for event, at in events:
        if isinstance(event, RunFact):
            found.runs.add(event.run_id)
        elif isinstance(event, (TrainRequested, RestoreRequested)):
            found.runs.add(at.run_id)
        elif isinstance(event, NodeFact):
            found.nodes.add(event.node_id)
        elif isinstance(event, StudyFact):
            found.studies.add(event.study_id)
        if isinstance(event, ModelFact | RunPromotionPending):
            found.registered.add(event.model)
        if isinstance(event, IngestionFact):
            found.ingestions.add(event.ingestion_id)
        if isinstance(event, DatasetIngested):
            found.inputs.add(event.fingerprint)
        if isinstance(event, DatasetSharded):
            found.inputs.add(event.feature_store_version)
            if event.ingestion_id is not None:
                found.ingestions.add(event.ingestion_id)
        if isinstance(event, CheckpointDeleted):
            found.checkpoints.add(event.uri)
    return found


def apply(rows: Rows, event: Event, at: At) -> None:
    """Fold one event into ``rows``. A fact of a stale generation or incarnation changes nothing."""
    if isinstance(event, (TrainRequested, RestoreRequested)):
        known = rows.runs.get(at.run_id)
        rows.runs[at.run_id] = _new_run(event, at) if known is None else _merge_request(known, event, at)
    elif isinstance(event, CheckpointCommitted):
        _on_committed(rows, event, at)
    elif isinstance(event, CheckpointDeleted):
        if (checkpoint := rows.checkpoints.get(event.uri)) is not None:
            rows.checkpoints[event.uri] = replace(checkpoint, deleted_at=at.time_s, deleted_reason=event.reason)
    elif isinstance(event, RunFact):
        before = rows.runs.get(event.run_id) or Run(event.run_id, requested_at=at.time_s)
        after = fold_run(before, event, at)
        if after is not before:
            rows.runs[event.run_id] = replace(after, sequence=max(before.sequence, at.sequence))
    elif isinstance(event, NodeFact):
        if (node := fold_node(rows.nodes.get(event.node_id), event, at)) is not None:
            rows.nodes[event.node_id] = node
    elif isinstance(event, StudyFact):
        if (study := fold_study(rows.studies.get(event.study_id), event, at)) is not None:
            rows.studies[event.study_id] = study
    elif isinstance(event, DatasetSharded):
        _on_sharded(rows, event)
    elif isinstance(event, DatasetIngested):
        _on_ingested(rows, event, at)
    elif isinstance(event, DatasetIngestFailed | DatasetShardFailed):
        begun = rows.ingestions.get(event.ingestion_id) or Ingestion(event.ingestion_id, at.time_s)
        rows.ingestions[event.ingestion_id] = replace(begun, failed=event.reason)
    elif isinstance(event, ModelPromoted):
        rows.models[event.model, event.version] = _model(event, at)
    if isinstance(event, ModelFact | RunPromotionPending):
        known_model = rows.registered.get(event.model) or RegisteredModel(event.model)
        rows.registered[event.model] = fold_model(known_model, event)


def request_hash(spec: TrainRequested) -> str:
    """Return a hash that equal requests share, also when their bodies are spelled differently.

    A version that adds a field gives the requests of earlier versions the hash that they had.
    """
    unset: dict[str, Any] = {}
    for path in ADDED_FIELDS:
        *parents, name = path.split(".")
        part: Any = spec
        for parent in parents:
            part = getattr(part, parent)
            if part is None:
                break
        if part is not None and getattr(part, name) == type(part).model_fields[name].get_default(
            call_default_factory=True
        ):
            excluded = unset
            for parent in parents:
                excluded = excluded.setdefault(parent, {})
            excluded[name] = True
    return hashlib.sha256(spec.model_dump_json(exclude=unset).encode()).hexdigest()


# -- runs ---------------------------------------------------------------------


def fold_run(run: Run, fact: Event, at: At) -> Run:
    """The run after ``fact``; the very same object if the fact changes nothing."""
    if not isinstance(fact, RunFact) or (life := change_run(run, fact)) is None:
        return run
    columns = _columns(run, fact, at)
    if "unfinished" in life:
        life["unfinished"] = list(life["unfinished"])
    if life.get("state") in TERMINAL_STATES:
        columns |= {"ended_at": at.time_s, **_clear_waiting()}
    return replace(run, **{**columns, **life}) if columns or life else run


def _columns(run: Run, fact: RunFact, at: At) -> dict[str, Any]:
    """Return the columns that a fact changes besides the run's life."""
    match fact:
        case RunAccepted():
            since = run.requested_at or at.time_s
            return {**_spec_columns(fact.spec), "parent_run_id": fact.parent_run_id, "requested_at": since}
        case RunRejected():
            name = run.name if run.spec else fact.name or run.name
            return {"name": name, "problems": [problem.model_dump() for problem in fact.problems]}
        case RunPrepared():
            return {"dataset_id": fact.dataset_id}
        case RunQueued():
            return {"queued_at": at.time_s, "slots_got": 0, "members": [], **_clear_waiting()}
        case RunWaiting():
            return {"waiting_code": fact.code, "waiting_message": fact.message, "waiting_since": at.time_s}
        case RunPlaced():
            return _merge_placed(run, fact)
        case RunStarted():
            return _merge_started(run, fact, at)
        case RunReleased():
            return {"members": _release(run, fact.node_id), **_reached(run, fact)}
        case RunExited():
            return {
                "members": _release(run, fact.node_id),
                **_reached(run, fact),
                "log_tail": list(fact.log_tail) or run.log_tail,
                # Until the run has completed, which is once what its ranks staged is committed.
                "artifacts": [artifact.model_dump() for artifact in fact.artifacts] or run.artifacts,
            }
        case RunCompleted():
            found = _checkpoint_fields(fact.checkpoint) if fact.checkpoint else None
            return {
                "metrics": plain(fact.metrics),
                "checkpoint": _newer(run.checkpoint, found),
                "artifacts": [artifact.model_dump() for artifact in fact.artifacts],
            }
        case RunFailed():
            return {"log_tail": list(fact.log_tail) or run.log_tail}
        case RunTracked():
            return {"mlflow_run_id": fact.mlflow_run_id, "mlflow_experiment_id": fact.mlflow_experiment_id}
        case RunEvaluated():
            # The row of a fact of an earlier version stays what it was.
            unset = {name for name in ADDED_EVALUATION_FIELDS if name not in fact.model_fields_set}
            evaluation = fact.model_dump(mode="json", exclude={"run_id"} | unset)
            return {"evaluation": evaluation, "verdict": run.verdict or "evaluated"}
        case RunPromotionPending():
            if run.verdict in ("promoted", "not_promoted"):
                return {}
            return {"verdict": f"awaiting_{fact.awaits}", "verdict_reason": fact.reason, "model": fact.model}
        case RunPromoted():
            verdict = {"verdict": "promoted", "verdict_reason": fact.reason}
            return {**verdict, "model": fact.model, "model_version": fact.version}
        case RunNotPromoted():
            return {"verdict": "not_promoted", "verdict_reason": fact.reason}
    return {}


#: Columns of a run that are fields of its spec.
SPEC_COLUMNS = ("name", "kind", "experiment", "user", "team", "priority", "model", "study")
#: Fact about a trial -> the state that it brings the trial to.
TRIAL_STATES = {"trial_pruned": "pruned", "trial_paused": "paused", "trial_resumed": "running"}
#: States of a trial that a fact may still change.
OPEN_TRIAL_STATES = ("running", "paused")


def _spec_columns(spec: RunFields) -> dict[str, Any]:
    return {
        **{name: getattr(spec, name) for name in SPEC_COLUMNS},
        "evaluates": spec.evaluate.run_id if spec.evaluate is not None else None,
        "slots_min": spec.slots.min,
        "slots_max": spec.slots.max,
        "slots_wanted": spec.slots.max,
        "spec": spec.model_dump(mode="json", exclude_defaults=True),
    }


def _new_run(request: TrainRequested | RestoreRequested, at: At) -> Run:
    if isinstance(request, RestoreRequested):
        point = f"step {request.step}" if request.step is not None else f"epoch {request.epoch}"
        name = f"{request.run_id} from {point}"
        return Run(at.run_id, name=name, parent_run_id=request.run_id, requested_at=at.time_s)
    return Run(at.run_id, requested_at=at.time_s, request_hash=request_hash(request), **_spec_columns(request))


def _merge_request(run: Run, request: TrainRequested | RestoreRequested, at: At) -> Run:
    """Return a run whose facts were read first with what only its request holds."""
    requested = _new_run(request, at)
    run = replace(run, requested_at=at.time_s, request_hash=requested.request_hash)
    if run.spec is not None:
        return run
    if isinstance(request, TrainRequested):
        return replace(run, **_spec_columns(request))
    return replace(run, name=run.name or requested.name, parent_run_id=run.parent_run_id or requested.parent_run_id)


def _merge_started(run: Run, fact: RunStarted, at: At) -> dict[str, Any]:
    first = next((member["node_id"] for member in run.members if 0 in member["ranks"]), fact.node_id)
    placements = run.placements
    if fact.node_id == first and placements and placements[-1]["generation"] == fact.generation:
        # The first rank knows from where on they train.
        step = max(placements[-1]["resume_step"], fact.step)
        placements = [*placements[:-1], {**placements[-1], "started_step": step}]
    start = fact.model_dump(mode="json", exclude={"run_id"})
    same = (fact.generation, fact.node_id)
    is_known = any((known["generation"], known["node_id"]) == same for known in run.starts)
    starts = run.starts if is_known else [*run.starts, start]
    reading = exactness.assess(run.spec, [RunStarted(run_id=run.run_id, **known) for known in starts])
    return {
        "started_at": run.started_at or at.time_s,
        "placements": placements,
        "starts": starts,
        "exactness": reading.exactness if reading else None,
        "exactness_reason": (reading.why or None) if reading else None,
        "inexact_since": reading.since if reading else None,
    }


def _merge_placed(run: Run, fact: RunPlaced) -> dict[str, Any]:
    placement = {"generation": fact.generation, "resume_step": fact.resume.step if fact.resume else 0}
    return {
        **({} if run.spec is not None else _spec_columns(fact.spec)),
        **_clear_waiting(),
        "slots_got": fact.world_size,
        "slots_wanted": fact.wanted_slots or run.slots_max or fact.world_size,
        "members": [{**member.model_dump(mode="json"), "released": False} for member in fact.members],
        "placements": [*run.placements, placement],
        "sizes": [*run.sizes, fact.world_size],
    }


def _clear_waiting() -> dict[str, Any]:
    return {"waiting_code": None, "waiting_message": None, "waiting_since": None}


def _release(run: Run, node_id: str) -> list[dict[str, Any]]:
    return [{**m, "released": True} if m["node_id"] == node_id else m for m in run.members]


def _reached(run: Run, fact: RunReleased | RunExited) -> dict[str, Any]:
    return {
        "reached_step": max(run.reached_step, fact.step),
        "reached_samples": max(run.reached_samples, fact.samples_consumed),
    }


def _newer(have: dict[str, Any] | None, found: dict[str, Any] | None) -> dict[str, Any] | None:
    if have is None or found is None:
        return found or have
    return found if found["step"] > have["step"] else have


def _checkpoint_fields(ref: CheckpointRef) -> dict[str, Any]:
    # Rows of earlier releases lack the field; a row without it is equal to theirs.
    return ref.model_dump(exclude=None if ref.step_is_count else {"step_is_count"})


def _on_committed(rows: Rows, fact: CheckpointCommitted, at: At) -> None:
    run = rows.runs.get(fact.run_id) or Run(fact.run_id, requested_at=at.time_s)
    if change_run(run, fact) is None:
        return
    ref = fact.checkpoint
    place = ref.model_dump(exclude={"manifest_sha256"})
    rows.checkpoints[ref.uri] = _row(Checkpoint, fact, **place, committed_at=at.time_s, metrics=plain(fact.metrics))
    latest = {**_checkpoint_fields(ref), "committed_at": at.time_s}
    rows.runs[run.run_id] = replace(
        run, checkpoint=_newer(run.checkpoint, latest), sequence=max(run.sequence, at.sequence)
    )


# -- progress -----------------------------------------------------------------


def apply_progress(
    known: Progress | None, placements: Iterable[Mapping[str, int]], report: RunProgress, at: At
) -> tuple[Progress | None, list[Point]]:
    """The run's newest figures, and the points to keep: not those of an abandoned tail."""
    system = report.kind == "system"
    placements = tuple(placements)
    points = [
        Point(
            run_id=report.run_id,
            kind=report.kind,
            name=name,
            node_id=report.node_id if system else "",
            step=int(point.time) if system else point.step,
            time=point.time,
            value=value,
            generation=report.generation,
        )
        for point in report.points
        if math.isfinite(point.time) and (system or survives(report.generation, point.step, placements))
        for name, value in point.values.items()
        if math.isfinite(value)  # a curve has a gap there
    ]
    if system or (known is not None and report.generation < known.generation):
        return known, points
    latest = dict(known.latest) if known else {}
    for point in report.points:
        latest |= plain(point.values)
    return (
        Progress(
            run_id=report.run_id,
            generation=report.generation,
            step=max([report.step, *(point.step for point in report.points)]),
            total_steps=report.total_steps or (known.total_steps if known else None),
            epoch=report.epoch or (known.epoch if known else 0),
            samples_consumed=report.samples_consumed or (known.samples_consumed if known else 0),
            latest=latest,
            reported_at=at.time_s,
        ),
        points,
    )


def survives(generation: int, step: int, placements: Iterable[Mapping[str, int]]) -> bool:
    """Whether a step of a generation is part of the run's history: no later one started before it."""
    return all(
        step <= later["started_step"]
        for later in placements
        if later["generation"] > generation and "started_step" in later
    )


def plain(values: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics as every JSON and SQL database can hold them: NaN and infinities as text, as in facts."""
    return {name: value if math.isfinite(value) else json.dumps(value) for name, value in values.items()}


# -- nodes, studies, datasets, models --------------------------------------------------


def fold_node(node: Node | None, fact: NodeFact, at: At) -> Node | None:
    """Return the node after ``fact``; as it was if the fact does not count."""
    state, drain = next_node_state(node, fact), next_drain(node, fact)
    decision = None if drain is None else drain.model_dump(mode="json")
    if isinstance(fact, NodeJoined) and state is not None:
        return _row(
            Node,
            fact,
            past_incarnations=incarnations_before(node),
            drain_decision=decision,
            state=state,
            reason=drain.reason if drain is not None and state == "draining" else None,
            joined_at=at.time_s,
            changed_at=at.time_s,
        )
    if node is None or (state is None and decision == node.drain_decision):
        return node
    if state is None:
        return replace(node, drain_decision=decision)
    reason = _notice(fact) if isinstance(fact, NodeNotice) else "" if state == "up" else getattr(fact, "reason", "")
    return replace(node, state=state, reason=reason or None, drain_decision=decision, changed_at=at.time_s)


def fold_study(study: Study | None, fact: StudyFact, at: At) -> Study | None:
    """Return the study after ``fact``."""
    match fact:
        case StudyAccepted():
            return _new_study(fact, study.requested_at if study else at.time_s)
        case StudyRejected():
            return Study(fact.study_id, fact.name or "", "rejected", at.time_s, fact.reason)
        case StudyCompleted() | StudyStopped() if study is not None:
            best = list(fact.best) if isinstance(fact, StudyCompleted) else study.best
            return replace(study, state=fact.fact, reason=fact.reason, best=best)
        case TrialFact() if study is not None:
            return _merge_trial(study, fact)
        case _:
            return study


def _new_study(fact: StudyAccepted, requested_at: float) -> Study:
    spec = fact.spec
    study = Study(fact.study_id, spec.name, "running", requested_at, planned_trials=spec.trials)
    if len(spec.objectives) != 1:
        return study  # no value of a Pareto front is the best
    return replace(study, objective=spec.objectives[0].metric, mode=spec.objectives[0].mode)


def _merge_trial(study: Study, fact: TrialFact) -> Study:
    """Return a study after a fact about a trial. Repetitions of the best one take no part in the search."""
    number = str(fact.trial)
    if isinstance(fact, TrialSuggested):
        is_new = fact.purpose == "search" and number not in study.trial_states
        return replace(study, trial_states={**study.trial_states, number: "running"}) if is_new else study
    if study.trial_states.get(number) not in OPEN_TRIAL_STATES:
        return study
    if isinstance(fact, TrialEnded):
        states = {**study.trial_states, number: fact.outcome}
        merged = replace(study, trial_states=states)
        return replace(merged, best=[fact.trial], best_value=fact.values[0]) if _is_better(study, fact) else merged
    if (state := TRIAL_STATES.get(fact.fact)) is None:
        return study
    return replace(study, trial_states={**study.trial_states, number: state})


def _is_better(study: Study, fact: TrialEnded) -> bool:
    """Return whether a trial that has ended is better than all before it; one that breaks a constraint never is."""
    is_counted = fact.outcome == "completed" and not any(each > 0 for each in fact.violations)
    if study.mode is None or not is_counted or not fact.values or not math.isfinite(fact.values[0]):
        return False
    best = study.best_value
    return best is None or (fact.values[0] < best if study.mode == "min" else fact.values[0] > best)


def fold_model(model: RegisteredModel, fact: ModelFact | RunPromotionPending) -> RegisteredModel:
    """Return the model after ``fact``, its versions apart."""
    match fact:
        case ModelConfigured() if fact.version > model.configuration:
            gates = fact.gates.model_dump(mode="json", exclude_defaults=True)
            return replace(model, gates=gates, configuration=fact.version)
        case ModelStaged():
            others = {alias: version for alias, version in model.aliases.items() if alias != fact.alias}
            named = {} if fact.version is None else {fact.alias: fact.version}
            return replace(model, aliases=others | named)
        case ModelDeployed():
            return replace(model, served_version=fact.version, serving_problem="")
        case ModelDeployFailed():
            problem = f"version {fact.version} is not served ({fact.stage}): {fact.reason}"
            return replace(model, served_version=fact.serving_version, serving_problem=problem)
        case _:
            return model


def _notice(fact: NodeNotice) -> str:
    within = f" within {fact.grace_s:g} s" if fact.grace_s is not None else ""
    return f"{fact.source}: {fact.kind}{within}" + (f" ({fact.detail})" if fact.detail else "")


def _on_ingested(rows: Rows, fact: DatasetIngested, at: At) -> None:
    known = rows.ingestions.get(fact.ingestion_id) or Ingestion(fact.ingestion_id, at.time_s)
    made = replace(
        known,
        fingerprint=fact.fingerprint,
        shard_bytes=fact.data.shard_bytes,
        found=fact.model_dump(mode="json", exclude_defaults=True),
    )
    # The same input results in the same dataset, for which no second fact is published.
    dataset = next((each for each in rows.datasets.values() if _is_made_of(each, made)), None)
    rows.ingestions[fact.ingestion_id] = made if dataset is None else replace(made, dataset_id=dataset.dataset_id)


def _on_sharded(rows: Rows, fact: DatasetSharded) -> None:
    own = rows.ingestions.get(fact.ingestion_id or "")
    if own is None or own.found is None:  # a log from before sharding named the ingestion
        alike = (each for each in rows.ingestions.values() if each.fingerprint == fact.feature_store_version)
        own, sizes = next(alike, None), None
    else:
        sizes = own.shard_bytes
    # As it was stored: a row that is validated again could stop the projection.
    found: dict[str, Any] = own.found or {} if own is not None else {}
    data = found.get("data", {})
    dataset = _row(
        Dataset,
        fact,
        s3_path=fact.manifest_uri.rsplit("/", 1)[0] + "/",
        created_at=fact.created_at.timestamp(),
        classes=list(fact.classes),
        source=data.get("source", ""),
        format=data.get("format", "auto") if found else None,
        quarantined={kind["code"]: kind["count"] for kind in found.get("quarantined", ())},
        fingerprint=own.fingerprint if own is not None else fact.feature_store_version,
        shard_bytes=sizes,
    )
    rows.datasets[fact.dataset_id] = dataset
    for each in [*rows.ingestions.values()]:
        if each.dataset_id is None and _is_made_of(dataset, each):
            rows.ingestions[each.ingestion_id] = replace(each, dataset_id=fact.dataset_id)


def _is_made_of(dataset: Dataset, ingestion: Ingestion) -> bool:
    same_size = dataset.shard_bytes in (None, ingestion.shard_bytes)
    return dataset.fingerprint == ingestion.fingerprint and same_size


def _model(fact: ModelPromoted, at: At) -> Model:
    return _row(Model, fact, name=fact.model, metrics=plain(fact.metrics), promoted_at=at.time_s)


def _row(kind: type[R], fact: Event, **columns: Any) -> R:
    """Return a row of these columns and of those that are fields of the fact."""
    names = {column.name for column in fields(kind)} - columns.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(fact, name) for name in names if name in type(fact).model_fields}, **columns)
