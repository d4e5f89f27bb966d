"""What a study is: a search over the hyper-parameters of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from contracts.base import Token
from contracts.lenient import without_rules
from contracts.spec.base import Metric, Mode, SpecPart
from contracts.spec.run import RunFields

Value = bool | int | float | str | None
#: A parameter of the run (``learning_rate``), or a field of its training (``training.global_batch``).
ParameterName = Annotated[str, Field(pattern=r"^(training\.)?[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
MAX_TRIALS = 10_000


_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
RANGE_PATTERN = rf"^{_NUMBER}\.\.{_NUMBER}([ :]log)?$"


def parse_range(text: str) -> dict[str, Any]:
    """Return the parameter of ``100..2000`` (whole numbers), ``0.1..0.9`` or ``1e-5..1e-2 log``.

    Raises:
        ValueError: the text is none of these.
    """
    ends, scale = re.sub(r"[ :]log$", "", text), text.endswith(("log",))
    low, dots, high = ends.partition("..")
    if not dots or re.match(RANGE_PATTERN, text) is None:
        raise ValueError(f"{text!r} is no range: give 100..2000, 0.1..0.9 or '1e-5..1e-2 log', or a list of choices")
    is_int = re.fullmatch(r"[+-]?\d+", low) is not None and re.fullmatch(r"[+-]?\d+", high) is not None
    return {"type": "int" if is_int else "float", "low": float(low), "high": float(high), "log": scale}


class Parameter(SpecPart):
    """The values that a parameter may have: a range of numbers, or choices."""

    type: Literal["float", "int", "choice"]
    low: float | None = None
    high: float | None = None
    #: Whether it is drawn on a logarithmic scale.
    log: bool = False
    step: float | None = Field(None, gt=0)
    choices: tuple[Value, ...] | None = Field(None, max_length=1000)
    #: The parameter exists where each of these other parameters, which stand before it, has one of these values.
    when: dict[str, tuple[Value, ...]] = Field(default_factory=dict, max_length=20)

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        """Read ``[32, 64]`` as choices, and ``1e-5..1e-2 log`` or ``100..2000`` as a range."""
        if isinstance(value, list | tuple):
            return {"type": "choice", "choices": value}
        if isinstance(value, str):
            return parse_range(value)
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler.resolve_ref_schema(handler(schema))
        scalar = {"type": ["boolean", "integer", "number", "string", "null"]}
        choices = {"type": "array", "items": scalar, "minItems": 1, "maxItems": 1000, "description": "choices"}
        text = {"type": "string", "pattern": RANGE_PATTERN, "description": "a range: 100..2000, 1e-5..1e-2 log"}
        return {"anyOf": [dict(json_schema), choices, text]}

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        if self.type == "choice":
            if not self.choices or self.low is not None or self.high is not None:
                raise ValueError('a choice needs its values: {"type": "choice", "choices": [32, 64, 128]}')
            return self
        if self.choices is not None or self.low is None or self.high is None:
            raise ValueError(f'a range needs its ends: {{"type": "{self.type}", "low": 1, "high": 10}}')
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is larger than high ({self.high:g})")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range begins above 0, not at {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("a logarithmic range has no step: leave one of them out")
        if self.type == "int" and any(v is not None and v != int(v) for v in (self.low, self.high, self.step)):
            raise ValueError("an int range has whole numbers")
        return self

    def is_active(self, values: Mapping[str, Any]) -> bool:
        """Whether the parameter exists beside these values of other parameters."""
        return all(name in values and values[name] in allowed for name, allowed in self.when.items())


Space = dict[ParameterName, Parameter]


class Objective(SpecPart):
    """What is optimised: a metric that the runs report."""

    metric: Metric
    mode: Mode = "min"


class Constraint(SpecPart):
    """A limit for a metric of a finished trial; a trial that breaks it is never the best."""

    metric: Metric
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _has_limit(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("a constraint needs a limit: min, max or both")
        return self


class Sampler(SpecPart):
    """How parameters are suggested, by Optuna. What a sampler does not know is left out for it."""

    name: Literal["tpe", "gp", "cmaes", "random", "grid"] = "tpe"
    seed: int = Field(0, ge=0, lt=2**32)
    #: Random trials before the first modelled one (tpe, gp, cmaes).
    startup_trials: int = Field(10, ge=0, le=MAX_TRIALS)
    #: Candidates of which the best is suggested (tpe).
    candidates: int = Field(24, ge=1, le=10_000)
    #: Whether the parameters are modelled together (tpe).
    multivariate: bool = True
    #: Whether a trial that runs counts as bad, so that others keep away from it (tpe).
    constant_liar: bool = True
    #: Whether equal parameters give equal results (gp).
    deterministic: bool = False
    #: The first standard deviation, as a share of the space, and the trials of a generation (cmaes).
    sigma0: float | None = Field(None, gt=0)
    population: int | None = Field(None, ge=2, le=MAX_TRIALS)


class PruningMethod(SpecPart):
    """When a trial ends before its last epoch.

    ``median``, ``asha`` and ``hyperband`` end it for good, by Optuna. ``extrapolation`` pauses it at a rung and goes on
    with the paused trial whose learning curve promises most, from its checkpoint.
    """

    name: Literal["none", "median", "asha", "hyperband", "extrapolation"] = "none"
    #: The first epoch (or step) after which a trial may end.
    min_epochs: int = Field(1, ge=1)
    #: One of this many trials goes on to the next rung (asha, hyperband).
    reduction_factor: int = Field(3, ge=2, le=100)
    #: Trials before the first is pruned (median), and that are trained to the end to learn curves from (extrapolation).
    startup_trials: int = Field(5, ge=0, le=MAX_TRIALS)
    #: The epochs at which a trial may pause (extrapolation). Empty: an eighth, a quarter and half of all.
    rungs: tuple[Annotated[int, Field(ge=1)], ...] = Field((), max_length=50)
    #: The share of the epochs of all trials that may be used (extrapolation).
    budget: float = Field(0.4, gt=0, le=1)


class StudyOptions(SpecPart):
    """How a study searches: everything but what it searches."""

    objectives: tuple[Objective, ...] = Field(
        (Objective.defaults(metric="validation/loss"),), min_length=1, max_length=8
    )
    constraints: tuple[Constraint, ...] = Field((), max_length=20)
    trials: int = Field(20, ge=1, le=MAX_TRIALS)
    #: Trials that run at a time.
    parallel: int = Field(2, ge=1, le=1000)
    sampler: Sampler = Sampler.defaults()
    pruning: PruningMethod = PruningMethod.defaults()
    #: Scripts: the parameter that says for how many epochs to train. A task trains ``run.training.epochs``.
    epochs_param: str | None = Field(None, max_length=200)
    #: Scripts: how many epochs a whole trial has; a task's are ``run.training.epochs``.
    epochs: int | None = Field(None, ge=1)
    #: Earlier studies over the same parameters and objectives, whose finished trials the sampler knows from the start.
    warm_start: tuple[Token, ...] = Field((), max_length=100)
    #: Parameters that are tried first, in this order.
    first: tuple[dict[str, Value], ...] = Field((), max_length=1000)
    #: Seeds with which the best trial is run again at the end.
    repeat_seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field((), max_length=100)
    #: The study ends when this many trials in a row have failed.
    max_failures: int = Field(5, ge=1, le=MAX_TRIALS)


class StudyFields(StudyOptions):
    """The fields of a study."""

    name: str = Field(min_length=1, max_length=200)
    #: What each trial is a run of. Its ``params`` (and ``training``) get the suggested values.
    run: RunFields
    space: Space = Field(min_length=1, max_length=200)

    @property
    def trial_epochs(self) -> int | None:
        """How many epochs a whole trial has, if it counts them."""
        return self.epochs or (self.run.training.epochs if self.run.training is not None else None)

    @property
    def rungs(self) -> tuple[int, ...]:
        """The epochs at which a trial may pause, the last one included."""
        last = self.trial_epochs
        if self.pruning.name != "extrapolation" or last is None:
            return () if last is None else (last,)
        named = self.pruning.rungs or tuple(round(last * share) for share in (0.125, 0.25, 0.5))
        return (*sorted({epoch for epoch in named if self.pruning.min_epochs <= epoch < last}), last)


class StudySpec(StudyFields):
    """A study as facts carry it: read by its types alone, without the rules of admission."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return without_rules(handler(source), handler.resolve_ref_schema)
