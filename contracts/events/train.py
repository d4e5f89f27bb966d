"""Requests: what other systems publish to make trainbus do something."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_serializer, field_validator, model_validator

from contracts.base import Request, Token
from contracts.events.node import DrainScope
from contracts.scheduling import Policy
from contracts.spec.base import check_argument
from contracts.spec.data import DataSource
from contracts.spec.gates import ModelGates
from contracts.spec.run import RunFields, RunSpec
from contracts.spec.study import Space, StudyOptions

#: An alias of a model's version. MLflow keeps ``latest`` and ``v3`` for itself; promotion alone moves ``champion``.
Alias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
RESERVED_ALIAS = re.compile(r"champion|latest|v\d+", re.IGNORECASE)


class TrainRequested(RunFields, Request, verb="train"):
    """Train a model. Exactly one of ``task`` (with ``code``) and ``command`` says what runs.

    The run's id is derived from the event's source and id, so publishing it again changes nothing.
    """

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not name.isidentifier():
                raise ValueError(f"env name {name!r} is not an identifier")
        for name, value in env.items():
            try:
                check_argument(f"{name}={value}")
            except ValueError as error:
                raise ValueError(f"env variable {name!r} {error}") from None
        return env

    @model_validator(mode="after")
    def _one_way_to_run(self) -> Self:
        if (self.task is None) == (self.command is None):
            raise ValueError("give exactly one of 'task' (module:Class) and 'command' (a list of arguments)")
        if self.task is not None and self.code is None:
            raise ValueError("'task' needs 'code': upload a package with `trainbus submit`, or give its uri and sha256")
        if self.kind == "evaluate" and self.evaluate is None:
            raise ValueError("kind 'evaluate' needs 'evaluate': which checkpoint to measure")
        if self.kind == "train" and self.task is not None and self.training is None:
            raise ValueError("'task' needs 'training': at least training.epochs or training.max_steps")
        logical = self.training.logical_ranks if self.training else None
        if logical is not None and self.slots.max > logical:
            raise ValueError(
                f"slots.max ({self.slots.max}) is more than training.logical_ranks ({logical}): a logical rank cannot "
                "be divided, so ask for fewer slots or more logical ranks"
            )
        for name in ("min", "max"):
            if (count := getattr(self.slots, name)) % self.gang.bundle:
                raise ValueError(f"slots.{name} ({count}) is not a multiple of gang.bundle ({self.gang.bundle})")
        if self.datasets and self.command is None:
            raise ValueError("'datasets' needs a 'command', which reads files: a task has one dataset, in 'data'")
        if self.datasets and self.data is not None:
            raise ValueError("give 'data' or 'datasets': one dataset without a name, or several that have one")
        if self.evaluation is not None and self.model is None:
            raise ValueError("'evaluation' needs 'model': the registered model that the result competes for")
        return self

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        if self.init_from is None:
            if self.init_exclude:
                raise ValueError("'init_exclude' needs 'init_from': the checkpoint whose weights are taken otherwise")
            return self
        if self.resume_from is not None:
            raise ValueError(
                "'init_from' takes a checkpoint's weights alone, 'resume_from' goes on with all of it: give one of them"
            )
        if self.kind != "train":
            raise ValueError("'init_from' is what training begins with: an evaluation measures that of 'evaluate'")
        if self.task is None and self.init_exclude:
            raise ValueError("'init_exclude' names tensors of a 'task': a command finds all files of the checkpoint")
        return self

    @property
    def run_spec(self) -> RunSpec:
        """What the facts of the run carry of this request."""
        return RunSpec.model_construct(
            self.model_fields_set, **{name: getattr(self, name) for name in RunFields.model_fields}
        )


class TuneRequested(StudyOptions, Request, verb="tune"):
    """Search for the hyper-parameters of a run: a study, whose trials are ordinary runs.

    It needs ``name``, ``run`` and ``space``. The answer is ``study.<study_id>.accepted`` or ``rejected``.
    """

    # Until there were studies every field was allowed and the answer a fact. Unknown fields still get that answer.
    model_config = ConfigDict(extra="allow")

    name: str | None = Field(None, max_length=200)
    run: RunFields | None = Field(None, description="what each trial is a run of: the fields of train.requested")
    space: Space | None = Field(None, min_length=1, max_length=200)


class StopStudyRequested(Request, verb="stop_study"):
    """End a study: no further trials, and its runs are cancelled. What it has found stays."""

    study_id: Token
    reason: str = Field("stopped by request", max_length=2000)


class CancelRequested(Request, verb="cancel"):
    """Stop a run for good. Its checkpoints stay."""

    run_id: Token
    reason: str = Field("cancelled by request", max_length=2000)


class IngestRequested(Request, verb="ingest"):
    """Prepare a dataset without training on it."""

    data: DataSource


class RestoreRequested(Request, verb="restore"):
    """Start a new run from a committed checkpoint of another: by step, or the last of an epoch."""

    run_id: Token
    step: int | None = Field(None, ge=0)
    epoch: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.step is None) == (self.epoch is None):
            raise ValueError("give exactly one of 'step' and 'epoch'")
        return self


class PinRequested(Request, verb="pin"):
    """Pin a committed checkpoint, so that retention does not delete it, or unpin it."""

    run_id: Token
    step: int = Field(ge=0)
    pinned: bool = True
    reason: str = Field("pinned by request", max_length=2000)


class ScrubRequested(Request, verb="scrub"):
    """Read committed checkpoints back from the store and compare their hashes; repair what is rotten."""

    #: None: of every run.
    run_id: Token | None = None
    repair: bool = True


class DrainRequested(Request, verb="drain"):
    """Take a node out of use: what runs there is preempted with grace and goes elsewhere."""

    node_id: Token
    reason: str = Field("drained by request", max_length=2000)
    user: str | None = Field(None, max_length=200)
    #: ``node``: until it is undrained. ``incarnation``: until its agent joins again (a machine that will be stopped).
    scope: DrainScope = "node"


class UndrainRequested(Request, verb="undrain"):
    """Put a drained node back into use."""

    node_id: Token
    reason: str = Field("undrained by request", max_length=2000)
    user: str | None = Field(None, max_length=200)


class AdoptPolicyRequested(Request, verb="adopt_policy", version=2):
    """Decide by this policy from the next scheduling cycle on."""

    policy: Policy
    #: The digest of the policy that it is to replace: another one in force refuses the request. None: whichever it is.
    replaces: Token | None = None
    reason: str = Field("adopted by request", max_length=2000)
    user: str | None = Field(None, max_length=200)

    @field_serializer("policy")
    def _write_whole(self, policy: Policy) -> dict[str, Any]:
        # With its defaults: those of another version are another policy.
        return policy.model_dump(mode="json")


class PromoteRequested(Request, verb="promote"):
    """Make a run's result the champion, even if the gate refused it."""

    model: Token
    run_id: Token
    reason: str = Field("promoted by request", max_length=2000)


class RollbackRequested(Request, verb="rollback"):
    """Make the champion before the present one champion again."""

    model: Token
    reason: str = Field("rolled back by request", max_length=2000)


class ConfigureRequested(Request, verb="configure"):
    """Set the gates of a registered model; they replace those that it has."""

    model: Token
    gates: ModelGates
    #: The version of the configuration that these gates were made from (0: none): another one refuses the request.
    replaces: int | None = Field(None, ge=0)
    reason: str = Field("configured by request", max_length=2000)
    user: str | None = Field(None, max_length=200)


class ApproveRequested(Request, verb="approve"):
    """Approve a candidate whose model asks for approval, or decline it."""

    model: Token
    run_id: Token
    approved: bool = True
    reason: str = Field("", max_length=2000)
    user: str | None = Field(None, max_length=200)


class StageRequested(Request, verb="stage"):
    """Let an alias (``staging``) name a version of a model; without a version, remove the alias."""

    model: Token
    alias: Alias
    version: int | None = Field(None, ge=1)
    reason: str = Field("staged by request", max_length=2000)
    user: str | None = Field(None, max_length=200)

    @field_validator("alias")
    @classmethod
    def _is_free(cls, alias: str) -> str:
        if RESERVED_ALIAS.fullmatch(alias):
            raise ValueError(
                f"alias {alias!r} is reserved: `champion` is what promote and rollback move, MLflow keeps the others"
            )
        return alias
