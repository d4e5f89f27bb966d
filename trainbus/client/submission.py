"""From what a user gives to a ``train.requested``, and the upload of the code that it runs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts.events.train import TrainRequested
from trainbus.client.address import StackAddress
from trainbus.client.errors import UsageError, invalid_request
from trainbus.client.package import CodePackage
from trainbus.client.source_location import resolve_source

TASK = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
#: File endings that tell a source's format; any other source is taken for images.
FORMATS = {"jsonl": "jsonl", "parquet": "parquet", "txt": "text"}


@dataclass(frozen=True, slots=True)
class Submission:
    """What to train and how; None or empty: not given. Fields that are given override the request."""

    #: The folder that holds the code.
    project: Path | None = None
    #: ``module:Class`` of a Task in the project.
    task: str | None = None
    command: tuple[str, ...] = ()
    #: The body of a train.requested, or a JSON file of one.
    request: Path | Mapping[str, Any] | None = None
    name: str | None = None
    #: ``2`` is exactly two, ``1..4`` or ``1-4`` anything between.
    slots: str | None = None
    epochs: int | None = None
    max_steps: int | None = None
    logical_ranks: int | None = None
    data: str | None = None
    data_format: str | None = None
    priority: int | None = None
    model: str | None = None
    experiment: str | None = None
    #: The address of a checkpoint's manifest.
    init_from: str | None = None
    init_exclude: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run that was requested: its id is known before the scheduler has accepted it."""

    run_id: str
    name: str
    event_id: str
    request: TrainRequested
    package: CodePackage | None = None


def parse_slots(text: str) -> dict[str, int]:
    """Return the least and the most slots of ``2``, ``1..4`` or ``1-4``.

    Raises:
        UsageError: the text is none of these.
    """
    match = re.fullmatch(r"(\d+)(?:(?:\.\.|-)(\d+))?", text)
    if match is None:
        raise UsageError(f"slots {text!r}: give a number (2) or a range (1..4)")
    low, high = match.groups()
    return {"min": int(low), "max": int(high or low)}


def build_request(submission: Submission, package: CodePackage | None, bucket: str) -> TrainRequested:
    """Return the request that a submission means: its fields override those of its request.

    Raises:
        UsageError: it is not valid; each problem is named with its field.
    """
    body = _read_body(submission.request)
    if submission.task is not None:
        body["task"] = submission.task
        body.pop("command", None)
    if submission.command:
        body["command"] = list(submission.command)
        body.pop("task", None)
    if package is not None:
        body["code"] = package.code(bucket)
    given = {
        "name": submission.name,
        "slots": parse_slots(submission.slots) if submission.slots else None,
        "priority": submission.priority,
        "model": submission.model,
        "experiment": submission.experiment,
        "init_from": submission.init_from,
        "init_exclude": submission.init_exclude or None,
    }
    body.update({field: value for field, value in given.items() if value is not None})
    if "name" not in body:
        body["name"] = (submission.project.resolve().name if submission.project else "run") or "run"
    if submission.params:
        body["params"] = {**body.get("params", {}), **submission.params}
    options = {
        "epochs": submission.epochs,
        "max_steps": submission.max_steps,
        "logical_ranks": submission.logical_ranks,
    }
    training = {name: value for name, value in options.items() if value is not None}
    if body.get("task") and not body.get("training") and not training.keys() & {"epochs", "max_steps"}:
        training["epochs"] = 1
    if training:
        body["training"] = {**(body.get("training") or {}), **training}
    if submission.data is not None:
        body["data"] = build_data(submission.data, submission.data_format, body.get("data"))
    try:
        return TrainRequested.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error) from error


def _read_body(request: Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(request, Path):
        return dict(request or {})
    try:
        body = json.loads(request.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{request} is no readable JSON file: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{request} must hold a JSON object: the body of a train.requested")
    return body


def build_data(text: str, data_format: str | None, given: Any = None) -> dict[str, Any]:
    """Return a request's ``data``: 64 hex digits are a dataset's id, anything else is a source to ingest.

    How a source is read (format, split, windows) stays as ``given``, which is the ``data`` of the request file.

    Raises:
        UsageError: the text is neither, or there is nothing at that place.
    """
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return {"dataset_id": text}
    try:
        source = resolve_source(text)
    except UsageError as error:
        raise UsageError(f"data: {error}, or the id of a dataset in full (`trainbus datasets show NAME`)") from None
    suffix = text.rsplit("/", 1)[-1].rpartition(".")[2].lower()
    kept = given if isinstance(given, dict) and "source" in given else {}
    known = {"format": FORMATS.get(suffix, "images"), **kept, "source": source}
    return {**known, "format": data_format} if data_format else known


def locate_task(task: type) -> tuple[Path, str]:
    """Return the folder that a Task's module is imported from, and the Task's ``module:Class`` there.

    Raises:
        UsageError: the class is not in a file of its own, or not at the top level of its module.
    """
    try:
        file = Path(inspect.getfile(task)).resolve()
    except (OSError, TypeError):
        raise UsageError(
            f"{task.__name__} is defined in no file (a notebook?): write it into one and give folder and module:Class"
        ) from None
    if task.__qualname__ != task.__name__:
        raise UsageError(f"{task.__qualname__} is defined inside another class or function: move it to the top level")
    module = file.stem if task.__module__ == "__main__" else task.__module__
    depth = module.count(".") + (file.stem == "__init__")
    return file.parents[depth], f"{module}:{task.__name__}"


async def upload_package(address: StackAddress, package: CodePackage, uri: str) -> None:
    """Store a package under its hash, unless it is there.

    Raises:
        StackUnreachableError: the object store does not answer.
    """
    from services.kit.store.errors import ObjectNotFound
    from trainbus.client.object_store import open_object_store

    async with open_object_store(address) as objects:
        try:
            if (await objects.head(uri)).size_bytes == len(package.body):
                return
        except ObjectNotFound:
            pass
        await objects.put(uri, package.body, content_type="application/gzip")
