"""How a run trains, what is kept of it, and how its result is judged."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from contracts.base import ObjectUri, Token
from contracts.spec.base import Argument, Metric, Mode, SpecPart
from contracts.spec.resources import Slots


class EarlyStopping(SpecPart):
    metric: Metric = "validation/loss"
    mode: Mode = "min"
    patience: int = Field(3, ge=1, description="evaluations without improvement before training ends")
    min_delta: float = Field(0.0, ge=0)


class DataLoading(SpecPart):
    """How samples come to the trainer. Nothing here changes what is learned, but for ``lanes`` and ``window``."""

    #: Processes that decode; 0: a thread of the rank does it.
    workers: int = Field(0, ge=0, le=256)
    #: Steps that are made ready ahead.
    ahead: int = Field(2, ge=1, le=1000)
    #: The order of samples: this many lanes are read side by side, each shuffled within ``window`` shards' worth of
    #: samples. Null: what suits the dataset. Both are part of the order, like the seed.
    lanes: int | None = Field(None, ge=1, le=4096)
    window: int | None = Field(None, ge=1, le=4096)
    #: A rank is starved when it waits for data this share of its time, over ``starved_s`` at the least.
    starved_share: float = Field(0.2, gt=0, le=1)
    starved_s: float = Field(30.0, gt=0)


class Training(SpecPart):
    """What the Trainer does with a Task; unmodified scripts (``command``) ignore it."""

    epochs: int | None = Field(None, ge=1, le=1_000_000)
    max_steps: int | None = Field(None, ge=1)
    global_batch: int = Field(64, ge=1, description="samples a step, over all ranks")
    accumulate: int = Field(1, ge=1, description="micro-batches a step on each rank")
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    #: ``zero1`` is DDP with the optimizer sharded over the ranks; it exists in exact mode alone.
    strategy: Literal["ddp", "zero1", "fsdp2", "deepspeed"] = "ddp"
    zero_stage: Literal[0, 1, 2, 3] = 0
    #: Exact mode: the step is made of this many logical ranks for any number of processes, and the
    #: result is the same to the bit. None: fast mode, exact in the samples alone.
    logical_ranks: int | None = Field(None, ge=1, le=4096)
    #: Exact mode: buffers (BatchNorm statistics) are those of logical rank 0, or the mean over all logical ranks.
    buffers: Literal["first", "mean"] = "first"
    #: Exact mode: whether the run may go to machines whose arithmetic may differ; it is then no longer exact.
    heterogeneous_nodes: Literal["avoid", "allow"] = "avoid"
    #: Decay of an exponential moving average of the weights, which is then what is validated and evaluated.
    ema_decay: float | None = Field(None, gt=0, lt=1)
    clip_norm: float | None = Field(None, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    loading: DataLoading = DataLoading.defaults()
    #: Steps between checkpoints; None: at the end of each epoch.
    checkpoint_every_steps: int | None = Field(None, ge=1)
    #: The longest time between checkpoints, independent of steps; ``auto`` weighs their measured cost against the
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


class Retention(SpecPart):
    """Which checkpoints are kept; the newest always is."""

    last: int = Field(3, ge=1)
    best: int = Field(1, ge=0)
    metric: Metric = "validation/loss"
    mode: Mode = "min"
    #: Checkpoints whose step is a multiple of this are kept for ever.
    every_steps: int | None = Field(None, ge=1)


class Checkpoints(SpecPart):
    """How checkpoints are stored."""

    #: Send what changed against the checkpoint before (XOR, byte planes, zstd) where that is smaller.
    delta: bool = False
    #: Also write a DVC pointer file, and the files under the names that ``dvc pull`` looks for.
    dvc: bool = False


class Watch(SpecPart):
    """What is done about ranks that make no progress, or less than the others."""

    #: A rank is stalled when a step takes this many times the median step, and ``stall_min_s`` at the least.
    stall_factor: float = Field(20.0, gt=1)
    stall_min_s: float = Field(60.0, gt=0)
    #: ``restart`` starts a new generation, ``exclude`` one without the node of the stalled rank.
    on_stall: Literal["observe", "restart", "exclude"] = "observe"
    #: A rank is a straggler when its own work takes this many times the median of the ranks over ``straggler_steps``.
    straggler_factor: float = Field(1.5, gt=1)
    straggler_steps: int = Field(50, ge=2)


class Evaluation(SpecPart):
    """Evaluation on the held-out test split after training, and the gate to promotion."""

    metric: Metric
    mode: Mode
    #: How much better than the champion a candidate must be to replace it.
    min_improvement: float = 0.0
    #: What a candidate must reach, also without a champion.
    threshold: float | None = None
    #: Which checkpoint is measured, compared and promoted: the last one, or the best by ``retention.metric``. None: the
    #: best where checkpoints have that metric, else the last.
    checkpoint: Literal["best", "final"] | None = None
    #: Slots of the evaluation run. None: one; as many as the training has where its model is sharded over them.
    slots: Slots | None = None
    #: What measures the checkpoint of a script (``command``), with it in TRAINBUS_RESUME_DIR: it writes
    #: ``metrics.json`` and, if it can, ``predictions.parquet`` into TRAINBUS_OUTPUT_DIR.
    command: Annotated[list[Argument], Field(min_length=1, max_length=1000)] | None = None


class EvaluationTarget(SpecPart):
    """The checkpoint and the data that a run of kind ``evaluate`` measures."""

    run_id: Token
    checkpoint_uri: ObjectUri
    split: Literal["train", "validation", "test"] = "test"
    #: The metric that the result is compared by: the predictions' scores are of it where it is one of samples.
    metric: Metric | None = None
    mode: Mode | None = None
