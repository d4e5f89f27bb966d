"""Studies as a program sees them: requested, folded from their facts, stopped, and their best parameters submitted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import ValidationError

from contracts import streams, subjects
from contracts.events.study import StudyAccepted, StudyFact, StudyRejected
from contracts.events.train import StopStudyRequested, TrainRequested, TuneRequested
from contracts.spec.study import Parameter
from contracts.state.study import Studies, Study, Trial
from services.tuning.core.admission import example_value
from services.tuning.core.decide import PLACEHOLDER, TRAINING, best_request
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, UsageError, invalid_request
from trainbus.client.opened_submission import open_submission
from trainbus.client.package import CodePackage
from trainbus.client.stored_event import StoredEvent
from trainbus.client.submission import LOWER_IS_BETTER
from trainbus.client.submit_options import SubmitOptions

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient

#: One of them stands in every project whose script reads its parameters from us.
READERS_OF_PARAMS = ("TRAINBUS_PARAMS", "import trainbus", "from trainbus")


@dataclass(frozen=True, slots=True)
class SubmittedStudy:
    """A study that was requested: its id is known before the service has accepted it."""

    study_id: str
    name: str
    event_id: str
    request: TuneRequested
    package: CodePackage | None = None
    #: What the check before the upload could not check here, and why; '' if it checked all.
    unchecked: str = ""
    #: What it found that may be a mistake.
    notes: tuple[str, ...] = ()


def read_study_file(path: Path) -> dict[str, Any]:
    """Return the body of a tune.requested in a JSON file.

    Raises:
        UsageError: the file holds no JSON object.
    """
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}: give the project's folder, or the JSON file of a study; its name is --name"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no readable JSON file: {error}") from error
    if not isinstance(body, dict):
        raise UsageError(f"{path} must hold a JSON object: the body of a tune.requested")
    return body


def parse_parameter(text: str) -> tuple[str, Any]:
    """Return name and values of ``lr=1e-5..1e-2:log``, ``batch=32,64,128`` or ``warmup=100..2000``.

    Raises:
        UsageError: the text is none of these.
    """
    name, sign, values = text.partition("=")
    if not sign or not name or not values:
        raise UsageError(f"--space {text!r}: give a name and its values: lr=1e-5..1e-2:log or batch=32,64,128")
    if ".." not in values:
        return name, [_parse_value(value) for value in values.split(",")]
    try:
        return name, Parameter.model_validate(values).model_dump(exclude_defaults=True)
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UsageError(f"--space {text!r}: {reason}") from None


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_objective(text: str) -> dict[str, str]:
    """Return metric and mode of ``validation/accuracy`` or ``latency:min``; names of losses and errors mean ``min``.

    Raises:
        UsageError: the mode is neither ``min`` nor ``max``.
    """
    metric, _, mode = text.rpartition(":") if ":" in text else (text, "", "")
    mode = mode or ("min" if LOWER_IS_BETTER.search(metric) else "max")
    if not metric or mode not in ("min", "max"):
        raise UsageError(f"--metric {text!r}: give a metric, and whether less or more is better: validation/loss:min")
    return {"metric": metric, "mode": mode}


async def submit_study(
    client: AsyncClient,
    body: Mapping[str, Any],
    project: Path | None = None,
    task: str | None = None,
    **options: Unpack[SubmitOptions],
) -> SubmittedStudy:
    """Pack and upload the project of a study's run, request the study and return it.

    ``body`` is a tune.requested. ``options`` (see SubmitOptions) override fields of its ``run``; the same ``event_id``
    is the same study.

    Raises:
        UsageError: the study or its run is not valid; nothing was sent.
    """
    run_body = dict(body.get("run") or {})
    if run_body:
        options["request"] = run_body
    async with open_submission(client.connection, client.address, project, task, options) as opened:
        wanted = {**body, "run": opened.request.model_dump(mode="json", exclude_unset=True)}
        wanted.setdefault("name", opened.request.name)
        try:
            request = TuneRequested.model_validate(wanted)
        except ValidationError as error:
            raise invalid_request(error, wanted, TuneRequested) from error
        objectives = [each.metric for each in request.objectives] + [each.metric for each in request.constraints]
        outcome = await opened.check(_example_run(opened.request, request), objectives)
    if (code := (await opened.upload()).code) is not None and request.run is not None:
        request = request.model_copy(update={"run": request.run.model_copy(update={"code": code})})
    published = await client.connection.publish_request(request, options.get("event_id"))
    assert published.study_id is not None
    found = outcome.unchecked, (*outcome.notes, *_describe_unread(request, opened.package))
    return SubmittedStudy(published.study_id, request.name or "", published.event_id, request, opened.package, *found)


def _describe_unread(request: TuneRequested, package: CodePackage | None) -> list[str]:
    """Return what is wrong with a script that gets none of the parameters: all its trials are the same."""
    command = request.run.command if request.run is not None else None
    if command is None or package is None or package.mentions(READERS_OF_PARAMS):
        return []
    named = {name for each in command for name in PLACEHOLDER.findall(each)}
    unread = [name for name in request.space or {} if name not in named]
    if not unread:
        return []
    return [
        f"nothing in the project reads {', '.join(unread)}: name it in the command (--{unread[0]} {{{unread[0]}}}), or "
        "read trainbus.params() in the script"
    ]


def _example_run(run: TrainRequested, request: TuneRequested) -> TrainRequested:
    """Return the run with one point of the space, for the check before the upload."""
    params: dict[str, Any] = {}
    for name, parameter in (request.space or {}).items():
        if not name.startswith(TRAINING) and parameter.is_active(params):
            params[name] = example_value(parameter)
    return run.model_copy(update={"params": {**run.params, **params}})


async def read_studies(connection: Connection) -> Studies:
    """Return every study as its facts add up."""
    return fold_studies(await connection.read(subjects.study()))


def fold_studies(events: Sequence[StoredEvent]) -> Studies:
    """Fold stored facts of studies. Pure."""
    studies = Studies()
    for stored in events:
        if isinstance(stored.event, StudyFact):
            studies.apply(stored.event, stored.sequence)
    return studies


async def read_study(connection: Connection, reference: str) -> Study:
    """Return a study by its id, the beginning of its id, or its name (the newest of that name).

    Raises:
        NotFoundError: there is no such study, or the reference is of several.
        UsageError: it was rejected.
    """
    events = await connection.read(subjects.study())
    studies = fold_studies(events).studies
    found = [s for s in studies.values() if s.study_id.startswith(reference)]
    found = [s for s in found if s.study_id == reference] or found or _named(studies.values(), reference)
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFoundError(f"{reference!r} begins the ids of {len(found)} studies: give more of it")
    for stored in events:
        if isinstance(stored.event, StudyRejected) and reference in (stored.event.study_id, stored.event.name):
            raise UsageError(f"study {stored.event.study_id} was rejected: {stored.event.reason}")
    raise NotFoundError(f"there is no study {reference!r}: `trainbus tune ls` lists those that there are")


def _named(studies: Any, name: str) -> list[Study]:
    return [study for study in studies if study.spec.name == name][-1:]


async def wait_for_answer(connection: Connection, study_id: str) -> StudyAccepted | StudyRejected:
    """Return the service's answer to a request for a study, as soon as it is there."""
    async for batch in connection.follow(streams.FACTS, subjects.study(study_id)):
        for stored in batch:
            if isinstance(stored.event, StudyAccepted | StudyRejected):
                return stored.event
    raise AssertionError("unreachable")


async def stop_study(connection: Connection, study_id: str, reason: str = "stopped by request") -> str:
    """Request the end of a study, and return the request's id."""
    return (await connection.publish_request(StopStudyRequested(study_id=study_id, reason=reason))).event_id


def best_trial(study: Study, trial: int | None = None) -> Trial:
    """Return the best finished trial of a study, also while it runs; or the trial of that number.

    Raises:
        UsageError: no trial has finished, or there are several best ones, or there is no such trial.
    """
    from services.tuning.core.optuna_study import best_trials

    if trial is not None:
        if not 0 <= trial < len(study.trials):
            raise UsageError(f"study {study.study_id} has no trial {trial}: it has {len(study.trials)}")
        return study.trials[trial]
    best = best_trials(study)
    if not best:
        raise UsageError(f"study {study.study_id} has no finished trial yet (`trainbus tune show {study.study_id}`)")
    if len(best) > 1:
        listed = ", ".join(map(str, best))
        raise UsageError(f"the trials {listed} are best, each in its way: choose one with --trial")
    return study.trials[best[0]]


async def submit_best(connection: Connection, study: Study, trial: Trial) -> tuple[str, TrainRequested]:
    """Request a run with a trial's parameters and everything else as the study's run says; return its id.

    The same trial of the same study is one run, however often it is submitted.
    """
    request = best_request(study, trial)
    published = await connection.publish_request(request, f"best/{study.study_id}/{trial.number}")
    assert published.run_id is not None
    return published.run_id, request
