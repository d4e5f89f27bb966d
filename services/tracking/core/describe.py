"""Names, parameters and tags within MLflow's limits. A value that is cut ends with a note of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from contracts.spec.run import RunSpec
from services.tracking.core.fold import Run

T = TypeVar("T")

#: MLflow 3.17's limits (mlflow/utils/validation.py).
MAX_KEY_CHARS = 250
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 8000
MAX_PARAMS_PER_CALL = 100
MAX_METRICS_PER_CALL = 1000
#: MLflow's is 1,000,000; the rest is for the frame around the items.
MAX_CALL_BYTES = 900_000
#: A spec's ``params`` may be any size; what is beyond this stays on the bus.
MAX_PARAMS = 2000
MAX_ARTIFACT_TAGS = 50

RUN_ID = "trainbus.run_id"
ATTEMPT = "trainbus.attempt"
LIVE = "trainbus.live"
CURSOR = "trainbus.cursor"
FILES = "trainbus.files_logged"
#: Of a page that was made twice and deleted: the one that stays.
DUPLICATE_OF = "trainbus.duplicate_of"
#: The manifest of the checkpoint with whose weights training starts; of runs and of model versions.
INIT_FROM = "trainbus.init_from"
#: The manifest of a model's checkpoint; of logged models and of model versions.
CHECKPOINT_URI = "trainbus.checkpoint_uri"
#: Of model versions: their number in the facts.
VERSION = "trainbus.version"
#: Of logged models: whether MLflow has the files; of model versions too, with the reason where it has not.
MODEL_FILES, FILES_LOGGED, FILES_LEFT_OUT = "trainbus.model_files", "logged", "left out"
RESERVED = ("mlflow.", "trainbus.")
#: The text on a page, which people write.
NOTE = "mlflow.note.content"
#: The folder of artifacts that a script logs with MLflow; on its page they are where the script put them.
MLFLOW_FOLDER = "mlflow"


def clean_key(name: str) -> str:
    """``name`` as MLflow takes it: its characters, no path tricks, at most 250 long. Different names stay different."""
    key = re.sub(r"[^A-Za-z0-9_./ :-]", "_", name)
    key = "/".join(part for part in key.split("/") if part not in ("", ".", "..")) or "_"
    if key.startswith(".."):
        key = f"_{key}"  # to MLflow every name that begins like this leads out of its folder
    if key == name and len(key) <= MAX_KEY_CHARS:
        return key
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{key[: MAX_KEY_CHARS - 9]}-{mark}"


def clean_value(value: object, limit: int) -> str:
    """``value`` as text that every database stores; a cut is marked with what is missing."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = text.replace("\0", "\\0").encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    mark = f"... [cut, {len(text):,} characters in all]"
    return text[: limit - len(mark)] + mark


def flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names; lists and scalars are values."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, value


def params(spec: RunSpec) -> dict[str, str]:
    """The run's settings as MLflow parameters. ``env`` stays out: people put secrets there."""
    shown = spec.model_dump(
        mode="json",
        include={"kind", "experiment", "priority", "slots", "task", "params", "command", "data", "training"}
        | {"model", "resume_from", "init_from", "max_attempts", "evaluation", "evaluate", "retention"}
        | ({"init_exclude"} if spec.init_exclude else set()),
        exclude_none=True,
    )
    found: dict[str, str] = {}
    for name, value in flatten(shown, ""):
        if len(found) == MAX_PARAMS:
            found["trainbus.params_cut"] = f"only the first {MAX_PARAMS} parameters are here"
            break
        found[clean_key(name)] = clean_value(value, MAX_PARAM_CHARS)
    return found


def tags(run: Run, attempt: int, generation: int) -> dict[str, str]:
    """Every tag that the MLflow run of ``attempt`` should have now, as a function of the facts."""
    if run.accepted is None:
        return {}
    spec = run.accepted.spec
    found: dict[str, object] = {
        RUN_ID: run.run_id,
        ATTEMPT: attempt,
        LIVE: "true" if run.live else "false",
        "trainbus.kind": spec.kind,
        "trainbus.request": f"{run.accepted.request_source} {run.accepted.request_id}",
        "mlflow.user": spec.user or "",
        "mlflow.source.name": spec.task or " ".join(spec.command or ()),
        "trainbus.team": spec.team,
        "trainbus.parent_run_id": run.accepted.parent_run_id,
        "trainbus.model": spec.model,
        INIT_FROM: spec.init_from,
    }
    if spec.code is not None:
        found["mlflow.source.git.commit"] = spec.code.git_commit
        found["trainbus.code.git_dirty"] = spec.code.git_dirty
        found["trainbus.code.sha256"] = spec.code.sha256
        found["trainbus.code.uri"] = spec.code.uri
    if run.prepared is not None:
        found["trainbus.dataset_id"] = run.prepared.identity
        if not run.prepared.datasets:
            found["trainbus.dataset_manifest"] = run.prepared.manifest_uri
        for name, dataset in run.prepared.datasets.items():
            found[f"trainbus.dataset_manifest.{name}"] = dataset.manifest_uri
    if placement := run.placements.get(generation):
        placed = placement.fact
        found["trainbus.generation"] = placed.generation
        found["trainbus.slots"] = sum(len(member.slots) for member in placed.members) or placed.world_size
        found["trainbus.nodes"] = len(placed.members)
    if checkpoint := run.last_checkpoint:
        found["trainbus.checkpoint.uri"] = checkpoint.uri
        found["trainbus.checkpoint.step"] = checkpoint.step
        found["trainbus.checkpoint.epoch"] = checkpoint.epoch
        found["trainbus.state_digest"] = run.digests.get(checkpoint.uri)
        found["trainbus.manifest_sha256"] = run.manifests.get(checkpoint.uri)
    if spec.training is not None:
        found["trainbus.logical_ranks"] = spec.training.logical_ranks
    if (reading := run.exactness) is not None:
        found["trainbus.exactness"] = reading.exactness
        # A tag that was set stays: an exact run that starts from zero clears its old reason.
        found["trainbus.exactness_reason"] = reading.why
        newest = max(run.starts)
        found["trainbus.environment_digest"] = run.starts[newest].environment_digest
    found |= _outcome(run, generation)
    for name, value in spec.tags.items():
        found["user." + name if name.startswith(RESERVED) else name] = value
    return {clean_key(name): clean_value(value, MAX_TAG_CHARS) for name, value in found.items() if value is not None}


def _outcome(run: Run, generation: int) -> dict[str, object]:
    found: dict[str, object] = {}
    if generation < run.generation:
        return {"trainbus.abandoned": f"started again from scratch as generation {run.generation}"}
    if run.ended is not None:
        found["trainbus.reason"] = getattr(run.ended.fact, "reason", None) or None
        found["trainbus.artifacts"] = len(run.artifacts)
        for artifact in run.artifacts[:MAX_ARTIFACT_TAGS]:
            found[f"trainbus.artifact.{artifact.name}"] = artifact.uri
    if run.evaluated is not None:
        evaluated = run.evaluated.fact
        found["trainbus.evaluation_run_id"] = evaluated.evaluation_run_id
        found["trainbus.champion_run_id"] = evaluated.champion_run_id
        for artifact in evaluated.report[:MAX_ARTIFACT_TAGS]:
            found[f"trainbus.report.{artifact.name}"] = artifact.uri
    if run.not_promoted is not None:
        found["trainbus.not_promoted"] = run.not_promoted.reason
    return found


def script_params(params: Mapping[str, str], present: Set[str]) -> dict[str, str]:
    """Return the parameters of a script that the page has not, as many as it may have."""
    found = {clean_key(name): clean_value(value, MAX_PARAM_CHARS) for name, value in params.items()}
    new = {name: value for name, value in found.items() if name not in present}
    return dict(list(new.items())[: max(MAX_PARAMS - len(present), 0)])


def script_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a script; those that describe the run stay ours."""
    kept = {name: value for name, value in tags.items() if name == NOTE or not name.startswith(RESERVED)}
    return {clean_key(name): clean_value(value, MAX_TAG_CHARS) for name, value in kept.items()}


def model_tags(run: Run, checkpoint_uri: str) -> dict[str, str]:
    """Return what a logged model is, as tags."""
    found = {RUN_ID: run.run_id, CHECKPOINT_URI: checkpoint_uri}
    for name, hashes in (("manifest_sha256", run.manifests), ("state_digest", run.digests)):
        if value := hashes.get(checkpoint_uri):
            found[f"trainbus.{name}"] = value
    if run.prepared is not None:
        found["trainbus.dataset_id"] = run.prepared.identity
    return found


def model_params(spec: RunSpec) -> dict[str, str]:
    """Return the parameters of a logged model: those of the run's own code."""
    flat = {clean_key(name): clean_value(value, MAX_PARAM_CHARS) for name, value in flatten(spec.params, "")}
    return dict(list(flat.items())[:MAX_PARAMS_PER_CALL])


def model_name(name: str) -> str:
    """Return ``name`` as MLflow takes it for a logged model."""
    return re.sub(r"[/:.%\"'\0]", "-", name)[:MAX_KEY_CHARS] or "model"


def file_path(name: str, folder: str) -> tuple[str, str]:
    """Return folder and file name for an artifact, always inside the run's artifacts."""
    parts = [clean_key(part) for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    parts = parts or ["file"]
    if parts[0] == MLFLOW_FOLDER and len(parts) > 1:
        return "/".join(parts[1:-1]), parts[-1]
    return "/".join([folder, *parts[:-1]]).strip("/"), parts[-1]


def chunks(items: Iterable[tuple[int, T]], max_items: int, max_bytes: int = MAX_CALL_BYTES) -> Iterator[list[T]]:
    """Lists within both limits, in order. ``items`` are (bytes of JSON, item)."""
    chunk: list[T] = []
    total = 0
    for size, item in items:
        if chunk and (len(chunk) == max_items or total + size > max_bytes):
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size
    if chunk:
        yield chunk


def json_bytes(*texts: str) -> int:
    """At most how many bytes an item of these texts takes in a request (escapes included)."""
    return sum(len(json.dumps(text)) for text in texts) + 120
