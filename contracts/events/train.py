"""Requests: what other systems publish to make trainbus do something."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from contracts.base import DataUri, ObjectUri, Request, Sha256, Token

Metric = Annotated[str, Field(min_length=1, max_length=200)]
Mode = Literal["min", "max"]
NamePattern = Annotated[str, Field(min_length=1, max_length=300)]


class Part(BaseModel):
    """A part of a request: frozen, and as strict about unknown fields as the request itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Slots(Part):
    """How many slots (GPUs, or CPU slots on a node without) a run can use: anything between the two."""

    min: int = Field(1, ge=1, le=1_000_000)
    max: int = Field(1, ge=1, le=1_000_000)

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        """A plain number means exactly so many."""
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler.resolve_ref_schema(handler(schema))
        limits = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "exactly so many"}
        return {"anyOf": [dict(json_schema), limits]}

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"slots.max ({self.max}) is smaller than slots.min ({self.min})")
        return self


class Resources(Part):
    """What each slot of a run needs; without it, one whole accelerator of any kind."""

    #: Kinds of accelerator that will do; empty: any.
    accelerators: tuple[str, ...] = Field((), max_length=50)
    #: Share of one accelerator: below 1 it is shared with other runs under a limit, 0 means none at all.
    share: float = Field(1.0, ge=0, le=1)
    #: A MIG slice of this profile (``1g.10gb``) instead of an accelerator.
    mig_profile: str | None = Field(None, min_length=1, max_length=50)
    cpus: float = Field(0.0, ge=0, le=100_000)
    memory_bytes: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _whole_slice(self) -> Self:
        if self.mig_profile is not None and self.share != 1:
            raise ValueError("resources.share is of a whole accelerator: leave it out with resources.mig_profile")
        return self


class Gang(Part):
    """How the slots of a run lie together. All of them are placed at once, or none."""

    #: Slots come in bundles of so many, each bundle on one node.
    bundle: int = Field(1, ge=1, le=1_000_000)
    #: Each bundle on a node of its own.
    apart: bool = False
    #: Label of nodes (``switch``, ``zone``; ``node`` for the node itself) that all slots should have in common.
    together: str | None = Field(None, min_length=1, max_length=100)
    #: Whether ``together`` is a must, rather than a wish.
    strict: bool = False


class Scheduling(Part):
    """When and where a run may have its slots."""

    #: Clusters that will do; empty: any. A run never lies across two.
    clusters: tuple[Token, ...] = Field((), max_length=100)
    #: ``spot`` capacity may be taken away at short notice; ``any`` leaves the choice to the policy's tiers.
    capacity: Literal["any", "on-demand", "spot"] = "any"
    #: A name that the policy maps to capacity, for example production and research.
    tier: Token | None = None
    #: When it should be done, for policies that order by it.
    deadline: AwareDatetime | None = None
    #: The longest it may have its slots, all in all; it is then stopped and fails. Backfill and promised starts
    #: rely on it.
    limit_s: float | None = Field(None, gt=0)
    #: Whether others may take its slots.
    preemptible: bool = True
    #: Whether it takes turns with runs of the same standing.
    time_slice: bool = False


class Code(Part):
    """A code package: a gzipped tar in the object store, named and checked by its hash."""

    uri: ObjectUri
    sha256: Sha256
    git_commit: str | None = Field(None, max_length=64)
    git_dirty: bool | None = None


class Split(Part):
    """How samples are divided: by a hash of each sample's split key, so that it is stable as data grows."""

    train: float = Field(0.8, ge=0, le=1)
    validation: float = Field(0.1, ge=0, le=1)
    test: float = Field(0.1, ge=0, le=1)
    seed: int = 0
    #: What samples must share to fall into one split. ``content``: their bytes, so that duplicates never leak;
    #: ``near``: what near-duplicates have in common (a perceptual hash of an image, a normalised text); ``group``: the
    #: value of ``group_field``; ``file``: the object they were read from; ``key``: nothing. ``time`` divides at dates.
    by: Literal["content", "near", "group", "file", "key", "time"] = "content"
    #: Field (jsonl, parquet, features) or column of labels.csv (images) that tells the group.
    group_field: str | None = Field(None, min_length=1, max_length=200)
    #: The same shares within each class. Counted, not hashed: growth may then move samples at the borders.
    stratify: bool = False
    #: For ``time``: the field that holds it, and where the validation and the test split begin.
    time_field: str | None = Field(None, min_length=1, max_length=200)
    validation_from: AwareDatetime | None = None
    test_from: AwareDatetime | None = None
    #: For ``time``: what lies less than so long before a border is left out.
    embargo_s: float = Field(0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _sum(self) -> Self:
        if abs(self.train + self.validation + self.test - 1) > 1e-6:
            raise ValueError("split.train + split.validation + split.test must be 1")
        if self.train == 0:
            raise ValueError("split.train must be above 0")
        return self

    @model_validator(mode="after")
    def _by(self) -> Self:
        if (self.by == "group") != (self.group_field is not None):
            raise ValueError("split.by 'group' goes with split.group_field: give both or neither")
        borders = [border for border in (self.validation_from, self.test_from) if border is not None]
        if self.by != "time":
            if self.time_field is not None or borders or self.embargo_s:
                raise ValueError("split.time_field, validation_from, test_from and embargo_s need split.by 'time'")
            return self
        if self.time_field is None or not borders:
            raise ValueError("split.by 'time' needs split.time_field, and split.validation_from or split.test_from")
        if borders != sorted(borders):
            raise ValueError("split.validation_from must be before split.test_from")
        if self.stratify:
            raise ValueError("split.stratify does not go with split.by 'time': dates divide, whatever the classes are")
        return self


class Bounds(Part):
    """What a number may be, both ends included."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self


class Checks(Part):
    """What a record must be, beyond being readable. What is not goes to quarantine."""

    #: The labels there are; empty: whatever comes up.
    labels: tuple[str, ...] = Field((), max_length=10_000)
    #: Numeric fields and what they may be.
    ranges: dict[str, Bounds] = Field(default_factory=dict, max_length=1000)
    #: Fields that must be there and not null.
    required: tuple[str, ...] = Field((), max_length=1000)
    #: Field that identifies a record: equal copies count once, copies that differ are all set aside.
    id_field: str | None = Field(None, min_length=1, max_length=200)
    #: Field that holds a record's time, which may not lie after ``not_after``, or after its object was written.
    time_field: str | None = Field(None, min_length=1, max_length=200)
    not_after: AwareDatetime | None = None
    #: Records (images, lines, rows, files) may be so large.
    max_record_bytes: int = Field(64 * 2**20, ge=1, le=4 * 2**30)


class FeatureTable(Part):
    """Features of an entity over time: Parquet files, as Feast lays them out."""

    #: Comes before the names of its features, ``<name>__<feature>``.
    name: Token
    source: DataUri
    #: The columns that identify the entity; ``entity_keys`` are their names in the entity table, where they differ.
    keys: tuple[str, ...] = Field(min_length=1, max_length=20)
    entity_keys: tuple[str, ...] = Field((), max_length=20)
    event_time: str = Field("event_timestamp", min_length=1)
    #: When the row came to be known; null: nobody noted it.
    created_time: str | None = "created"
    #: The columns to join; empty: all the others.
    features: tuple[str, ...] = Field((), max_length=10_000)
    #: How old a value may be; null: any age.
    ttl_s: float | None = Field(None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if self.entity_keys and len(self.entity_keys) != len(self.keys):
            raise ValueError(f"{len(self.entity_keys)} entity_keys for {len(self.keys)} keys: give one for each")
        return self


class FeatureJoin(Part):
    """Features as of the time of each row of the entity table (``data.source``)."""

    #: Column of the entity table: as of when.
    time_field: str = Field("event_timestamp", min_length=1)
    tables: tuple[FeatureTable, ...] = Field(min_length=1, max_length=100)
    #: Only what was known at the row's time; false: corrections made later count too.
    as_known: bool = True
    #: Leave out whatever came to be known after this.
    snapshot_at: AwareDatetime | None = None

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise ValueError("two feature tables have one name: their features could not be told apart")
        return self


class DataSource(Part):
    """Raw data to be ingested and sharded before training.

    ``images``: one folder a class, or a ``labels.csv`` or ``labels.parquet`` (columns ``file``, ``label``) beside the
    files. ``jsonl`` and ``parquet``: one record a line or row; with ``features`` each row gets features as of its time.
    ``text``: bytes, cut into windows. ``tokens``: flat files of little-endian integers, cut into windows.
    ``binary``: arbitrary files, named by a ``manifest.jsonl`` or ``manifest.csv`` (``file``, ``label``, more fields).
    ``webdataset`` and ``mds``: folders of shards that those libraries wrote.
    """

    source: DataUri
    format: Literal["images", "jsonl", "parquet", "text", "tokens", "binary", "webdataset", "mds"]
    split: Split = Split()
    checks: Checks = Checks()
    features: FeatureJoin | None = None
    #: Share of broken records above which ingestion fails instead of quarantining them; also of every class.
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    #: Bytes of one sample for ``text``, tokens of one for ``tokens``.
    window_bytes: int = Field(129, ge=2, le=1_048_576)
    #: Bytes of one integer, for ``tokens`` alone.
    token_bytes: Literal[1, 2, 4] = 2
    #: Column or field that is the sample's label.
    label_field: str | None = None
    #: Mean, deviation and range of every numeric field, or of the channels of images, over the train split.
    statistics: bool = True
    shard_bytes: int = Field(128 * 2**20, ge=2**16, le=4 * 2**30)

    @model_validator(mode="after")
    def _features_of_rows(self) -> Self:
        if self.features is not None and self.format != "parquet":
            raise ValueError("data.features needs data.format 'parquet': the entity table is a Parquet file")
        return self


class DatasetRef(Part):
    """A dataset that is already sharded."""

    dataset_id: Sha256


class EarlyStopping(Part):
    metric: Metric = "validation/loss"
    mode: Mode = "min"
    patience: int = Field(3, ge=1, description="evaluations without improvement before training ends")
    min_delta: float = Field(0.0, ge=0)


class Loading(Part):
    """How samples come to the trainer. Nothing here changes what is learned, but for ``lanes`` and ``window``."""

    #: Processes that decode; 0: a thread of the rank does it.
    workers: int = Field(0, ge=0, le=256)
    #: Steps that are made ready ahead.
    ahead: int = Field(2, ge=1, le=1000)
    #: The order of samples: so many lanes are read side by side, each shuffled within ``window`` shards' worth of
    #: samples. Null: what suits the dataset. Both are part of the order, like the seed.
    lanes: int | None = Field(None, ge=1, le=4096)
    window: int | None = Field(None, ge=1, le=4096)
    #: A rank is starved when it waits for data this share of its time, over ``starved_s`` at the least.
    starved_share: float = Field(0.2, gt=0, le=1)
    starved_s: float = Field(30.0, gt=0)


class Training(Part):
    """What the Trainer does with a Task; unmodified scripts (``command``) ignore it."""

    epochs: int | None = Field(None, ge=1, le=1_000_000)
    max_steps: int | None = Field(None, ge=1)
    global_batch: int = Field(64, ge=1, description="samples a step, over all ranks")
    accumulate: int = Field(1, ge=1, description="micro-batches a step on each rank")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: ``zero1`` is DDP with the optimizer sharded over the ranks; it exists in exact mode alone.
    strategy: Literal["ddp", "zero1", "fsdp2", "deepspeed"] = "ddp"
    zero_stage: Literal[0, 1, 2, 3] = 0
    #: Exact mode: the step is made of so many logical ranks, whatever the number of processes is, and the
    #: result is the same to the bit. None: fast mode, exact in the samples alone.
    logical_ranks: int | None = Field(None, ge=1, le=4096)
    #: Exact mode: buffers (BatchNorm statistics) are those of logical rank 0, or the mean over all logical ranks.
    buffers: Literal["first", "mean"] = "first"
    #: Exact mode: whether the run may go to machines whose arithmetic may differ; it is then no longer exact.
    unlike_nodes: Literal["avoid", "allow"] = "avoid"
    #: Decay of an exponential moving average of the weights, which is then what is validated and evaluated.
    ema_decay: float | None = Field(None, gt=0, lt=1)
    clip_norm: float | None = Field(None, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    loading: Loading = Loading()
    #: Steps between checkpoints; None: at the end of each epoch.
    checkpoint_every_steps: int | None = Field(None, ge=1)
    #: The longest time between checkpoints, whatever the steps; ``auto`` weighs their measured cost against the
    #: failures seen (Young/Daly).
    checkpoint_every_s: Annotated[float, Field(gt=0)] | Literal["auto"] = 600.0
    #: Checkpoints besides, after these very steps.
    checkpoint_at_steps: tuple[int, ...] = Field((), max_length=10_000)
    #: Steps between evaluations on the validation split; None: at the end of each epoch.
    validate_every_steps: int | None = Field(None, ge=1)
    log_every_steps: int = Field(1, ge=1)
    early_stopping: EarlyStopping | None = None

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("training needs an end: set training.epochs or training.max_steps")
        if self.zero_stage and self.strategy != "deepspeed":
            raise ValueError("training.zero_stage needs training.strategy 'deepspeed'")
        return self

    @model_validator(mode="after")
    def _exact(self) -> Self:
        logical = self.logical_ranks
        if logical is None:
            if self.strategy == "zero1":
                raise ValueError("training.strategy 'zero1' is part of exact mode: set training.logical_ranks")
            return self
        if self.strategy == "deepspeed":
            raise ValueError(
                "training.logical_ranks (exact mode) does not go with strategy 'deepspeed': "
                "use 'ddp', 'zero1' or 'fsdp2', or leave logical_ranks out"
            )
        if logical > self.global_batch:
            raise ValueError(
                f"training.logical_ranks ({logical}) is more than training.global_batch ({self.global_batch}): "
                "each logical rank needs a sample"
            )
        return self


class Retention(Part):
    """Which checkpoints are kept; the newest always is."""

    last: int = Field(3, ge=1)
    best: int = Field(1, ge=0)
    metric: Metric = "validation/loss"
    mode: Mode = "min"
    #: Checkpoints whose step is a multiple of this are kept for ever.
    every_steps: int | None = Field(None, ge=1)


class Checkpoints(Part):
    """How checkpoints are stored."""

    #: Send what changed against the checkpoint before (XOR, byte planes, zstd) where that is smaller.
    delta: bool = False
    #: Also write a DVC pointer file, and the files under the names that ``dvc pull`` looks for.
    dvc: bool = False


class Watch(Part):
    """What is done about ranks that make no progress, or less than the others."""

    #: A rank is stalled when a step takes so many times the median step, and ``stall_min_s`` at the least.
    stall_factor: float = Field(20.0, gt=1)
    stall_min_s: float = Field(60.0, gt=0)
    #: ``restart`` starts a new generation, ``exclude`` one without the node of the stalled rank.
    on_stall: Literal["observe", "restart", "exclude"] = "observe"
    #: A rank is a straggler when its own work takes so many times the median of the ranks over ``straggler_steps``.
    straggler_factor: float = Field(1.5, gt=1)
    straggler_steps: int = Field(50, ge=2)


class Evaluation(Part):
    """Evaluation on the held-out test split after training, and the gate to promotion."""

    metric: Metric
    mode: Mode
    #: How much better than the champion a candidate must be to replace it.
    min_improvement: float = 0.0
    #: What a candidate must reach whatever the champion does.
    threshold: float | None = None


class EvaluateTarget(Part):
    """The checkpoint and the data that a run of kind ``evaluate`` measures."""

    run_id: Token
    checkpoint_uri: ObjectUri
    split: Literal["train", "validation", "test"] = "test"


class TrainRequested(Request, verb="train"):
    """Train a model. Exactly one of ``task`` (with ``code``) and ``command`` says what runs.

    The run's id is derived from the event's source and id, so publishing it again changes nothing.
    """

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["train", "evaluate"] = "train"
    experiment: Token = "default"
    user: str | None = Field(None, max_length=200)
    #: A path (``research/vision``) where teams are parts of others.
    team: str | None = Field(None, max_length=200)
    priority: int = Field(0, ge=-1000, le=1000, description="a higher number goes first")
    slots: Slots = Slots()
    resources: Resources = Resources()
    gang: Gang = Gang()
    scheduling: Scheduling = Scheduling()
    code: Code | None = None
    task: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=300)
    params: dict[str, Any] = Field(default_factory=dict, description="passed to the Task as keyword arguments")
    command: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    #: Name -> regular expression with one group, applied to the command's output lines.
    metric_patterns: dict[str, str] = Field(default_factory=dict, max_length=50)
    env: dict[str, str] = Field(default_factory=dict, max_length=200)
    data: DataSource | DatasetRef | None = None
    training: Training | None = None
    retention: Retention = Retention()
    checkpoints: Checkpoints = Checkpoints()
    watch: Watch = Watch()
    evaluation: Evaluation | None = None
    evaluate: EvaluateTarget | None = None
    #: The registered model that this run's result competes for.
    model: Token | None = None
    #: A committed checkpoint (its manifest) to go on from: its weights, its optimizer, its step, its place in the data.
    resume_from: ObjectUri | None = None
    #: A committed checkpoint (its manifest) whose weights training begins with, on other data too; optimizer, schedule
    #: and step begin anew. Its moving average counts where it has one: that is what was evaluated.
    init_from: ObjectUri | None = None
    #: Names of tensors that are not taken from ``init_from`` and stay as the task makes them, ``*`` for anything:
    #: ``head.*``. All others must be in both, in one shape.
    init_exclude: tuple[NamePattern, ...] = Field((), max_length=1000)
    max_attempts: int = Field(3, ge=1, le=100, description="failures by its own fault before the run fails")
    grace_s: float = Field(30.0, ge=0, le=3600, description="time to complete a checkpoint when preempted")
    tags: dict[str, str] = Field(default_factory=dict, max_length=50)

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not name.isidentifier():
                raise ValueError(f"env name {name!r} is not an identifier")
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
        if self.task is None or self.kind != "train":
            raise ValueError("'init_from' needs a 'task' to train: nothing else has weights of which trainbus knows")
        return self


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
    """Keep a committed checkpoint whatever retention says, or stop keeping it."""

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


class PromoteRequested(Request, verb="promote"):
    """Make a run's result the champion whatever the gate said."""

    model: Token
    run_id: Token
    reason: str = Field("promoted by request", max_length=2000)


class RollbackRequested(Request, verb="rollback"):
    """Make the champion before the present one champion again."""

    model: Token
    reason: str = Field("rolled back by request", max_length=2000)
