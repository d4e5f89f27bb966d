"""What a run is: the fields of a request to train, and the value that facts carry of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from contracts.base import ObjectUri, Sha256, Token
from contracts.lenient import without_rules
from contracts.spec.base import Argument, SpecPart
from contracts.spec.data import DatasetRef, DataSource
from contracts.spec.resources import Gang, Resources, Scheduling, Slots
from contracts.spec.training import Checkpoints, Evaluation, EvaluationTarget, Retention, Training, Watch

#: Also a folder, and a part of the id of what is ingested for it.
DatasetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")]
NamePattern = Annotated[str, Field(min_length=1, max_length=300)]


class Code(SpecPart):
    """A code package: a gzipped tar in the object store, named and checked by its hash."""

    uri: ObjectUri
    sha256: Sha256
    git_commit: str | None = Field(None, max_length=64)
    git_dirty: bool | None = None


class Packages(SpecPart):
    """Which packages a run has beside those of the node."""

    #: ``project``: those that its ``uv.lock``, ``requirements.txt`` or ``pyproject.toml`` asks for, installed on the
    #: node. ``node``: none.
    source: Literal["project", "node"] = "project"
    #: ``node``: torch is the node's, whatever version the project locks. ``project``: the project's.
    torch: Literal["node", "project"] = "node"


class RunFields(SpecPart):
    """The fields of a run. Exactly one of ``task`` (with ``code``) and ``command`` says what runs."""

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["train", "evaluate"] = "train"
    experiment: Token = "default"
    user: str | None = Field(None, max_length=200)
    #: A path (``research/vision``) where teams are parts of others.
    team: str | None = Field(None, max_length=200)
    priority: int = Field(0, ge=-1000, le=1000, description="a higher number goes first")
    slots: Slots = Slots.defaults()
    resources: Resources = Resources.defaults()
    gang: Gang = Gang.defaults()
    scheduling: Scheduling = Scheduling.defaults()
    code: Code | None = None
    packages: Packages = Packages.defaults()
    task: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=300)
    params: dict[str, Any] = Field(default_factory=dict, description="passed to the Task as keyword arguments")
    command: Annotated[list[Argument], Field(min_length=1, max_length=1000)] | None = None
    #: Name -> regular expression with one group, applied to the command's output lines.
    metric_patterns: dict[str, str] = Field(default_factory=dict, max_length=50)
    env: dict[str, str] = Field(default_factory=dict, max_length=200)
    data: DataSource | DatasetRef | None = None
    #: Data of a command that has several: each by its name, a folder below ``TRAINBUS_DATA_DIR``.
    datasets: dict[DatasetName, DataSource | DatasetRef] = Field(default_factory=dict, max_length=20)
    training: Training | None = None
    retention: Retention = Retention.defaults()
    checkpoints: Checkpoints = Checkpoints.defaults()
    watch: Watch = Watch.defaults()
    evaluation: Evaluation | None = None
    evaluate: EvaluationTarget | None = None
    #: The registered model that this run's result competes for.
    model: Token | None = None
    #: A committed checkpoint (its manifest) to go on from: its weights, its optimizer, its step, its place in the data.
    resume_from: ObjectUri | None = None
    #: A committed checkpoint (its manifest) whose weights training begins with, on other data too; optimizer, schedule
    #: and step start from zero. Its moving average is used where it has one, since that was evaluated. A command finds
    #: all files of the checkpoint instead, and in its output folder what a script kept of its own.
    init_from: ObjectUri | None = None
    #: Names of tensors that are not taken from ``init_from`` and stay as the task makes them, ``*`` for anything:
    #: ``head.*``. All others must be in both, in one shape.
    init_exclude: tuple[NamePattern, ...] = Field((), max_length=1000)
    max_attempts: int = Field(3, ge=1, le=100, description="failures by its own fault before the run fails")
    grace_s: float = Field(30.0, ge=0, le=3600, description="time to complete a checkpoint when preempted")
    tags: dict[str, str] = Field(default_factory=dict, max_length=50)
    #: The study whose trial this run is, and the trial's number.
    study: Token | None = None
    trial: int | None = Field(None, ge=0)

    @property
    def needs_data(self) -> bool:
        """Whether data is prepared before the run is queued."""
        return self.data is not None or bool(self.datasets)


class RunSpec(RunFields):
    """A run as facts carry it: read by its types alone, without the rules of admission."""

    model_config = ConfigDict(extra="ignore")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return without_rules(handler(source), handler.resolve_ref_schema)
