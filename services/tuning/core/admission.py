"""Accept a study, or say what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from contracts.events.study import KnownTrial
from contracts.events.train import TuneRequested
from contracts.metric_names import find_unknown_metric
from contracts.problems import FieldProblem, describe_problems
from contracts.spec.study import Parameter, StudyFields, StudySpec
from contracts.state.study import Study
from services.tuning.core.decide import PLACEHOLDER, overlay_params

#: Trials of earlier studies that a study knows; the newest ones.
MAX_KNOWN_TRIALS = 1000


def find_problems(request: TuneRequested, studies: Mapping[str, Study]) -> list[FieldProblem]:
    """Return what makes a study impossible; nothing if it can run."""
    unknown = [FieldProblem(field=name, message="there is no such field") for name in sorted(request.model_extra or {})]
    missing = [
        FieldProblem(field=name, message=message)
        for name, message in (
            ("name", "a study needs a name"),
            ("run", "give what each trial is a run of: the fields of train.requested"),
            (
                "space",
                'give what to search: {"lr": {"type": "float", "low": 1e-5, "high": 1e-2, "log": true}}',
            ),
        )
        if getattr(request, name) is None
    ]
    if unknown or missing:
        return unknown + missing
    try:
        spec = StudyFields.model_validate(request.model_dump(exclude=set(request.model_extra or ())))
    except ValidationError as error:
        return describe_problems(error, {})
    return [
        *_space_problems(spec),
        *_metric_problems(spec),
        *_method_problems(spec),
        *_warm_problems(spec, studies),
        *_run_problems(spec),
    ]


def spec_of(request: TuneRequested) -> StudySpec:
    """Return the study that a sound request means."""
    return StudySpec.model_validate(request.model_dump(exclude=set(request.model_extra or ())))


def known_trials(spec: StudyFields, studies: Mapping[str, Study]) -> tuple[KnownTrial, ...]:
    """Return the finished trials of the studies that the new one begins with."""
    known = [
        KnownTrial(params=trial.params, values=trial.values, violations=trial.violations)
        for study_id in spec.warm_start
        if (study := studies.get(study_id)) is not None
        for trial in study.search_trials
        if trial.state == "completed" and all(_contains(spec.space, trial.params, name) for name in spec.space)
    ]
    return tuple(known[-MAX_KNOWN_TRIALS:])


def _contains(space: Mapping[str, Parameter], params: Mapping[str, Any], name: str) -> bool:
    """Whether a trial's parameters are a point of the space, as far as this parameter goes."""
    parameter = space[name]
    if set(params) - set(space):
        return False
    if name not in params:
        return not parameter.is_active(params)
    value = params[name]
    if parameter.type == "choice":
        return value in (parameter.choices or ())
    if not isinstance(value, int | float) or parameter.low is None or parameter.high is None:
        return False
    return parameter.low <= value <= parameter.high


def _space_problems(spec: StudyFields) -> list[FieldProblem]:
    problems, before = [], set[str]()
    for name, parameter in spec.space.items():
        problems += [
            FieldProblem(field=f"space.{name}.when", message=f"{other!r} is no parameter that stands before it")
            for other in parameter.when
            if other not in before
        ]
        before.add(name)
        if spec.sampler.name == "grid":
            if parameter.type == "float" and parameter.step is None:
                message = "a grid needs steps: give 'step', or list the values as choices"
                problems.append(FieldProblem(field=f"space.{name}", message=message))
            if parameter.when:
                message = "a grid has no conditional parameters: use the sampler tpe or random"
                problems.append(FieldProblem(field=f"space.{name}.when", message=message))
        if name.startswith("training.") and spec.run.training is None:
            message = "the run has no training: give run.training, or search a parameter of the script"
            problems.append(FieldProblem(field=f"space.{name}", message=message))
    for index, first in enumerate(spec.first):
        problems += [
            FieldProblem(
                field=f"first.{index}.{name}", message="there is no such parameter in the space, or it is outside"
            )
            for name in first
            if name not in spec.space or not _contains({name: spec.space[name]}, {name: first[name]}, name)
        ]
    return problems


def _metric_problems(spec: StudyFields) -> list[FieldProblem]:
    """Return which metrics the training of a Task cannot report; a script may report any."""
    if spec.run.task is None:
        return []
    named = {f"objectives.{index}.metric": each.metric for index, each in enumerate(spec.objectives)}
    named |= {f"constraints.{index}.metric": each.metric for index, each in enumerate(spec.constraints)}
    return [
        FieldProblem(field=field, message=problem)
        for field, metric in named.items()
        if (problem := find_unknown_metric([metric], []))
    ]


def _method_problems(spec: StudyFields) -> list[FieldProblem]:
    problems = []
    if len(spec.objectives) > 1 and spec.pruning.name != "none":
        message = "pruning compares one objective: leave it out, or name one objective"
        problems.append(FieldProblem(field="pruning.name", message=message))
    if len(spec.objectives) > 1 and spec.sampler.name == "cmaes":
        problems.append(FieldProblem(field="sampler.name", message="cmaes has one objective: use tpe or gp"))
    if spec.pruning.name != "none" and spec.trial_epochs is None:
        message = "pruning counts epochs: give run.training.epochs, or 'epochs' for a script"
        problems.append(FieldProblem(field="pruning.name", message=message))
    if spec.pruning.name == "extrapolation" and spec.run.task is None and not spec.epochs_param:
        message = "a script that pauses needs to know how far to train: name its parameter in 'epochs_param'"
        problems.append(FieldProblem(field="epochs_param", message=message))
    return problems


def _warm_problems(spec: StudyFields, studies: Mapping[str, Study]) -> list[FieldProblem]:
    problems = []
    for study_id in spec.warm_start:
        earlier = studies.get(study_id)
        if earlier is None:
            message = f"there is no study {study_id}: take one that `trainbus tune ls` lists"
            problems.append(FieldProblem(field="warm_start", message=message))
        elif tuple(earlier.spec.objectives) != tuple(spec.objectives):
            message = f"study {study_id} has other objectives"
            problems.append(FieldProblem(field="warm_start", message=message))
    return problems


def _run_problems(spec: StudyFields) -> list[FieldProblem]:
    """Check one point of the space as a request, so that not the first trial finds out."""
    from contracts.events.train import TrainRequested

    params: dict[str, Any] = {}
    for name, parameter in spec.space.items():
        if parameter.is_active(params):
            params[name] = example_value(parameter)
    body: dict[str, Any] = {}
    try:
        body = overlay_params(spec, params)
        TrainRequested.model_validate({**body, "name": spec.name})
    except ValidationError as error:
        return [
            FieldProblem(field=".".join(filter(None, ("run", each.field))), message=each.message)
            for each in describe_problems(error, body)
        ]
    named = {name for each in body.get("command") or () for name in PLACEHOLDER.findall(each)}
    return [
        FieldProblem(
            field="run.command",
            message=f"it names {{{name}}}, which not every trial has: let the script read it with trainbus.params()",
        )
        for name, parameter in spec.space.items()
        if name in named and parameter.when
    ]


def example_value(parameter: Parameter) -> Any:
    """Return one value of a parameter."""
    if parameter.type == "choice":
        return (parameter.choices or (None,))[0]
    assert parameter.low is not None
    return int(parameter.low) if parameter.type == "int" else parameter.low
