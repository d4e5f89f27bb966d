"""From what a user gives to a ``train.requested``, and the upload of the code that it runs."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from contracts.data_formats import recognize_format
from contracts.events.train import TrainRequested
from contracts.spec.launchers import describe_launcher
from services.kit.code_package import package_uri
from trainbus.client.address import StackAddress
from trainbus.client.connection import check_answer
from trainbus.client.data_format import find_local_format
from trainbus.client.errors import StackUnreachableError, UsageError, invalid_request
from trainbus.client.gateway import open_gateway
from trainbus.client.package import CodePackage
from trainbus.client.submit_options import SubmitOptions

TASK = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
#: Options that are fields of the request, and those that are fields of its ``training``, as they are given.
RUN_OPTIONS = ("name", "priority", "model", "experiment", "team", "init_from")
TRAINING_OPTIONS = ("epochs", "max_steps", "logical_ranks")
EVALUATION_OPTIONS = ("evaluate_command", "evaluate_checkpoint", "evaluate_slots")
#: Options whose entries are added to those of the request.
MAPPING_OPTIONS = ("params", "env", "metric_patterns")
#: Metrics by these names are better the lower they are.
LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|(^|[/_])(rmse|mse|mae|nll|wer|cer)($|_)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """A run that was requested: its id is known before the scheduler has accepted it."""

    run_id: str
    name: str
    event_id: str
    request: TrainRequested
    package: CodePackage | None = None
    #: What the check before the upload could not check here, and why; '' if it checked all.
    unchecked: str = ""
    #: What it found that may be a mistake.
    notes: tuple[str, ...] = ()


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


def parse_command(command: str | Sequence[str]) -> list[str]:
    """Return the arguments of a command, which a text has as a shell would take it.

    Raises:
        UsageError: a quote of the text is not closed, or there is no argument.
    """
    try:
        arguments = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise UsageError(f"command {command!r}: {error}") from error
    if not arguments:
        raise UsageError("the command is empty: give what to run, for example 'python train.py'")
    return arguments


def parse_metric(option: str, text: str) -> dict[str, str]:
    """Return metric and mode of ``test/accuracy`` or ``test/loss:min``; names of losses and errors mean ``min``.

    Raises:
        UsageError: it names no metric, or a mode that is neither ``min`` nor ``max``.
    """
    metric, _, mode = text.rpartition(":") if ":" in text else (text, "", "")
    mode = mode or ("min" if LOWER_IS_BETTER.search(metric) else "max")
    if not metric or mode not in ("min", "max"):
        raise UsageError(f"{option} {text!r}: give a metric, and whether less or more is better: test/accuracy:max")
    return {"metric": metric, "mode": mode}


def _check_patterns(patterns: Any) -> None:
    """Check that each metric pattern has a group for its value."""
    for name, pattern in patterns.items() if isinstance(patterns, Mapping) else ():
        try:
            groups = re.compile(pattern).groups
        except (re.error, TypeError) as error:
            raise UsageError(f"metric_patterns.{name}: {pattern!r} is not a regular expression: {error}") from None
        if not groups:
            raise UsageError(f"metric_patterns.{name}: {pattern!r} needs a group around the value: (...)")


def _label(data: Any, label_field: str) -> dict[str, Any]:
    """Return the source with its label's field.

    Raises:
        UsageError: there is no source: a dataset that exists has its labels.
    """
    if not isinstance(data, Mapping) or "source" not in data:
        raise UsageError("label_field says how a source is read: give it with a source as data")
    return {**data, "label_field": label_field}


def _build_evaluation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``evaluation`` that these options set."""
    fields = {name.removeprefix("evaluate_"): value for name, value in given.items()}
    if isinstance(command := fields.get("command"), str):
        fields["command"] = shlex.split(command)
    if "slots" in fields:
        fields["slots"] = parse_slots(str(fields["slots"]))
    return fields


def build_request(
    project: Path | None, task: str | None, package: CodePackage | None, options: SubmitOptions
) -> TrainRequested:
    """Return the request that a submission means: its options override those of its request.

    Raises:
        UsageError: it is not valid; each problem is named with its field.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    body = _read_body(given.get("request"))
    if task is not None:
        body["task"] = task
        body.pop("command", None)
    if command := given.get("command"):
        body["command"] = parse_command(command)
        body.pop("task", None)
    if package is not None:
        # The request is validated before the upload, whose answer says where the package is: this address is replaced.
        body["code"] = package.code(package_uri("code", package.sha256))
    body |= {name: given[name] for name in RUN_OPTIONS if name in given}
    if "slots" in given:
        body["slots"] = parse_slots(str(given["slots"]))
    if init_exclude := given.get("init_exclude"):
        body["init_exclude"] = tuple(init_exclude)
    if "name" not in body:
        body["name"] = (project.resolve().name if project else "run") or "run"
    for name in MAPPING_OPTIONS:
        if given.get(name):
            body[name] = {**body.get(name, {}), **given[name]}
    _check_patterns(body.get("metric_patterns"))
    if "evaluate" in given:
        body["evaluation"] = {**(body.get("evaluation") or {}), **parse_metric("evaluate", given["evaluate"])}
    if own := {name: given[name] for name in EVALUATION_OPTIONS if name in given}:
        body["evaluation"] = {**(body.get("evaluation") or {}), **_build_evaluation(own)}
        if "metric" not in body["evaluation"]:
            raise UsageError(f"{min(own)} needs evaluate: the metric that the result is compared by")
    if "retention_metric" in given:
        wanted = parse_metric("retention_metric", given["retention_metric"])
        body["retention"] = {**(body.get("retention") or {}), **wanted}
    if "torch" in given:
        body["packages"] = {**(body.get("packages") or {}), "torch": given["torch"]}
    training = {name: given[name] for name in TRAINING_OPTIONS if name in given}
    if body.get("task") and not body.get("training") and not training.keys() & {"epochs", "max_steps"}:
        training["epochs"] = 1
    if training:
        body["training"] = {**(body.get("training") or {}), **training}
    if "data" in given:
        body |= _build_data_fields(given["data"], given.get("data_format"), body)
    if label_field := given.get("label_field"):
        body["data"] = _label(body.get("data"), label_field)
    try:
        request = TrainRequested.model_validate(body)
    except ValidationError as error:
        raise invalid_request(error, body, TrainRequested) from error
    if request.command is not None and (problem := describe_launcher(request.command, request.slots.max)):
        raise UsageError(f"command: {problem}")
    return request


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


def resolve_source(text: str) -> str:
    """Return the address of a source: ``s3://bucket/prefix`` and ``file:///`` as they are, a local path as ``file:///``.

    Raises:
        UsageError: the text is neither an address nor an existing path.
    """
    if re.match(r"s3://[^/]+/", text) or text.startswith("file:///"):
        return text
    if "://" not in text and (path := Path(text)).exists():
        return path.resolve().as_uri()
    raise UsageError(f"there is no data at {text!r}: give s3://bucket/prefix, or a folder or file that is here")


def _build_data_fields(
    data: str | Mapping[str, str], data_format: str | None, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a request that hold its data: ``data``, or ``datasets`` where each has a name.

    Raises:
        UsageError: there is nothing at a place, or one format is given for several datasets.
    """
    if isinstance(data, str):
        return {"data": build_data(data, data_format, body.get("data")), "datasets": {}}
    if data_format is not None:
        raise UsageError(
            "data_format is that of one dataset; of several each is found by its files, or stands in a request "
            "(datasets.NAME.format)"
        )
    given = body.get("datasets") or {}
    return {"data": None, "datasets": {name: build_data(each, None, given.get(name)) for name, each in data.items()}}


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
    kept = given if isinstance(given, dict) and "source" in given else {}
    known = {**kept, "source": source}
    if data_format or "format" not in known:
        known["format"] = data_format or _find_format(source) or "auto"
    return known


def _find_format(source: str) -> str | None:
    """Return the format of a source by what lies in a local one, or by the ending of an address; None: unknown here."""
    if source.startswith("file:"):
        return find_local_format(Path(unquote(urlsplit(source).path)))
    return recognize_format([source])


def locate_code(
    project: Path | str | type | None, task: str | None, options: SubmitOptions
) -> tuple[Path | None, str | None]:
    """Return the folder of the code and the Task's ``module:Class`` there.

    Raises:
        UsageError: there is nothing to run, or the task is not of that form.
    """
    if isinstance(project, type):
        project, located = locate_task(project)
        task = task or located
    if options.get("request") is None:
        if project is None:
            raise UsageError("give a project folder and a task (module:Class), or a request")
        if task is None and not options.get("command"):
            raise UsageError("say what to run: a task (module:Class) or a command ('python train.py')")
    if task is not None and not TASK.match(task):
        raise UsageError(f"task {task!r} is not of the form module:Class")
    return None if project is None else Path(project), task


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


async def upload_package(address: StackAddress, package: CodePackage) -> str:
    """Store a package under its hash, unless it is there, through the gateway; return where it is.

    Raises:
        StackUnreachableError: no gateway is named, it or the object store does not answer, or what arrived is damaged.
        UsageError: the gateway refuses the package, as a node would.
    """
    async with open_gateway(address) as http:
        answer = await http.get(f"/packages/{package.sha256}")
        if answer.status_code == 404:
            answer = await http.post("/packages", content=package.body, headers={"Content-Type": "application/gzip"})
    check_answer(answer)
    stored = answer.json()
    if stored["sha256"] != package.sha256:
        raise StackUnreachableError("the package did not arrive as it was sent: submit it again")
    return str(stored["uri"])
