"""The protocol between a node's agent and the rank processes that it starts.

It consists of plain files and a socket in the run's folder, so that a script in any language can use it:

- ``launch.json`` (agent -> rank): a ``Launch``, written before the ranks start. Its path is in
  the environment variable TRAINBUS_LAUNCH.
- ``rank_<n>.jsonl`` (rank -> agent): the rank's journal, one JSON object a line, append-only. It
  is a file so that it outlives both sides: appending never blocks a training step, a restart of the agent
  loses nothing, and the agent keeps its own offset.
- ``stop.json`` (agent -> rank): exists once the run is asked to stop. ``stop_seen`` (rank -> agent): exists once
  ``trainbus.should_stop()`` has answered yes in a script. From then on EXIT_DONE means stopped, not finished.
- ``agent.sock`` (both ways, one JSON object a line): the agent sends ``stop`` and ``peer_lost``;
  a rank sends ``hello`` once, and a bare newline ("doorbell") after each urgent line of its journal. On separate
  connections, without a hello, a rank sends its ``read_plan`` (which shards it will read when) and a ``shard_request``
  for the shard that it waits for; the agent replies with a ``shard_reply`` when that lies in the dataset's folder or
  cannot be fetched. In the same way it sends a ``range_request`` for bytes of a checkpoint's file of which the node has
  parts, and gets a ``range_reply``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from contracts.base import Sha256
from contracts.events.run import CheckpointRef
from contracts.spec.run import RunSpec

#: The variables that a process with a user's code inherits of the service that starts it. No other one can leak.
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
LAUNCH_VARIABLE = "TRAINBUS_LAUNCH"
#: A folder of the rank's own: what lies in it is kept with the run, and lies in it again when the script starts anew.
OUTPUT_DIR_VARIABLE = "TRAINBUS_OUTPUT_DIR"
#: For scripts: the folder with the run's data as plain files, below ``train``, ``val`` and ``test``.
DATA_DIR_VARIABLE = "TRAINBUS_DATA_DIR"
#: The folder of the last kept checkpoint and its step; set only where there is something to resume.
RESUME_DIR_VARIABLE = "TRAINBUS_RESUME_DIR"
RESUME_STEP_VARIABLE = "TRAINBUS_RESUME_STEP"
#: The folder of the checkpoint that the run begins with (``spec.init_from``), in every start; not set without one.
INIT_DIR_VARIABLE = "TRAINBUS_INIT_DIR"
RUN_ID_VARIABLE = "TRAINBUS_RUN_ID"
#: Folder of the project's packages, named by the hash of their lock; set only where the node does not have them all.
PACKAGES_DIR_VARIABLE = "TRAINBUS_PACKAGES_DIR"
#: ``spec.params`` as JSON.
PARAMS_VARIABLE = "TRAINBUS_PARAMS"
#: The rank's journal, to append lines to.
JOURNAL_VARIABLE = "TRAINBUS_JOURNAL"
#: A file that exists once the run is asked to stop.
STOP_FILE_VARIABLE = "TRAINBUS_STOP_FILE"
#: An empty file beside it, which exists once a script has seen that it is to stop.
STOP_SEEN_NAME = "stop_seen"
#: Part of its device's memory that a rank's tensors may take, where the run has a share of the device.
MEMORY_FRACTION_VARIABLE = "TRAINBUS_MEMORY_FRACTION"
#: Exit codes of a rank that ended as it should. Anything else is a failure.
EXIT_DONE = 0
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped on request; the run continues elsewhere
#: Fragments of the errors of gloo, NCCL and the rendezvous when the other end is gone.
PEER_LOST_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "remote process",
    "DistNetworkError",
    "a peer is gone",
)


def is_about_lost_peer(text: str) -> bool:
    """Whether an error of a rank says that another rank is gone."""
    return any(sign in text for sign in PEER_LOST_SIGNS)


class Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Launch(Line):
    """Everything a rank needs to know; ranks, world size and rendezvous are in the environment."""

    run_id: str
    generation: int
    node_id: str
    world_size: int
    spec: RunSpec
    #: Folder of this generation on this node: journals, logs, checkpoints under ``checkpoints/``.
    folder: Path
    socket: Path
    code_folder: Path | None = None
    #: Local copy of the dataset: its ``manifest.json`` with the shards beside it.
    dataset_folder: Path | None = None
    dataset_id: Sha256 | None = None
    #: Local copy of the checkpoint to start from (or to evaluate), and what it is.
    resume_folder: Path | None = None
    resume: CheckpointRef | None = None
    #: Whether tensor files in ``resume_folder`` have their length, but not their bytes before a ``range_request``.
    resume_is_partial: bool = False
    #: The ranks' output folder.
    output_dir: Path | None = None
    #: Local copy of the weights to begin with (``spec.init_from``); None where a Task has a state to resume.
    init_folder: Path | None = None
    #: The run's failures and seconds of running so far, from ``placed``.
    failures_seen: int = 0
    run_s: float = 0.0
    #: Properties of the machine that decide the last bits of arithmetic.
    machine: dict[str, str] = Field(default_factory=dict)
    #: Folder in memory (tmpfs) where ranks save survivor state, ``g<generation>/step_<n>-rank_<r>/``; None: none.
    memory_folder: Path | None = None
    #: What the survivor state of all runs of the node may take in memory; None: what there is.
    memory_max_bytes: int | None = None
    #: Folder on disk for what memory has no room for, laid out like ``memory_folder``; None: none.
    spill_folder: Path | None = None
    #: Folder on disk where the node keeps the uncommitted checkpoints of earlier generations,
    #: ``g<generation>/step_<n>-rank_<r>/``; None: none.
    survivor_dir: Path | None = None


def _parse_number(value: Any) -> float | None:
    if isinstance(value, str) and value not in NON_FINITE:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _select_numbers(values: Any) -> Any:
    """Return the values that are numbers, NaN and infinity among them: one that is none must not lose the others."""
    if not isinstance(values, Mapping):
        return values
    numbers = {str(name): _parse_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


#: How JSON has what it has no number for.
NON_FINITE = ("NaN", "Infinity", "-Infinity")
Values = Annotated[dict[str, float], BeforeValidator(_select_numbers)]


class TimedLine(Line):
    """A line of a rank's journal."""

    #: Seconds since the epoch; 0: when the agent reads the line.
    time: float = 0.0


class MetricsLine(TimedLine):
    """Metric values of one step."""

    kind: Literal["metrics"] = "metrics"
    step: int
    values: Values
    epoch: int = 0
    samples_consumed: int = 0
    total_steps: int | None = None


class StartedLine(TimedLine):
    """The training loop is about to take its first step."""

    kind: Literal["started"] = "started"
    step: int
    samples_consumed: int
    resumed_from: Literal["scratch", "checkpoint", "memory"] = "checkpoint"
    environment: dict[str, str] = Field(default_factory=dict)
    environment_digest: str | None = None
    exactness: Literal["exact", "samples-exact"] = "samples-exact"


def format_endpoint(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return the host and port of ``host:port``; an IPv6 address without its brackets.

    Raises:
        ValueError: it is none.
    """
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RendezvousLine(TimedLine):
    """This rank waits for others that have not come to the rendezvous; rank 0 sees all of them, the others rank 0."""

    kind: Literal["rendezvous"] = "rendezvous"
    #: Host and port of rank 0.
    address: str
    missing: tuple[int, ...]
    waited_s: float


class StragglerLine(TimedLine):
    """The work of ``rank`` holds the others up. Rank 0 writes it, since it sees all of them."""

    kind: Literal["straggler"] = "straggler"
    step: int
    rank: int
    factor: float
    over_steps: int


class StarvationLine(TimedLine):
    """This rank waits for its data."""

    kind: Literal["starved"] = "starved"
    step: int
    rank: int
    wait_share: float
    over_s: float
    over_steps: int
    bound_by: Literal["fetch", "read", "decode", "transfer"]
    hint: str


class CheckpointLine(TimedLine):
    """This rank's part of a checkpoint is complete on disk: ``folder`` is renamed into place."""

    kind: Literal["checkpoint"] = "checkpoint"
    folder: str
    step: int
    epoch: int
    samples_consumed: int
    metrics: Values = Field(default_factory=dict)
    final: bool = False
    exactness: Literal["exact", "samples-exact"] = "samples-exact"
    #: ``step`` is a version of the output folder, counted: at which step the script was is not known.
    step_is_count: bool = False


class ParamsLine(TimedLine):
    """Parameters that a script has chosen, for its page in MLflow."""

    kind: Literal["params"] = "params"
    values: dict[str, str]


class TagsLine(TimedLine):
    """Tags for the page in MLflow; of one name the last one counts."""

    kind: Literal["tags"] = "tags"
    values: dict[str, str]


class KeepLine(TimedLine):
    """A script asks to keep this file or folder as the run's checkpoint: ``trainbus.checkpoint()``."""

    kind: Literal["keep"] = "keep"
    #: Absolute, or relative to the output folder. It must not change until it is kept.
    path: str
    #: None: the last reported one.
    step: int | None = None
    epoch: int | None = None
    #: What ranks the checkpoint; None: the last reported values.
    metrics: Values | None = None


class ArtifactLine(TimedLine):
    """A file in the output folder is an artifact of the run: ``trainbus.artifact()``."""

    kind: Literal["artifact"] = "artifact"
    #: Relative to the output folder.
    path: str


class ResultLine(TimedLine):
    """The result of the run. ``artifacts`` are files in the generation's folder that the agent uploads."""

    kind: Literal["result"] = "result"
    metrics: Values = Field(default_factory=dict)
    artifacts: tuple[str, ...] = ()


class EndedLine(TimedLine):
    """The last line: how the process ends, and why."""

    kind: Literal["ended"] = "ended"
    outcome: Literal["succeeded", "stopped", "failed"]
    step: int = 0
    samples_consumed: int = 0
    error: str = ""
    #: The request itself is at fault: another attempt would fail alike.
    permanent: bool = False
    #: The loss or the state is not finite: another attempt begins with a committed checkpoint, not with what is newer.
    diverged: bool = False
    #: The ranks whose copy of the state is not the others'; all of them where no majority tells which is right.
    drifted_ranks: tuple[int, ...] = ()


#: The lines of which the rank informs the agent at once.
UrgentLine = RendezvousLine | StartedLine | StragglerLine | StarvationLine | CheckpointLine | ResultLine | EndedLine
JournalLine = Annotated[
    MetricsLine | ParamsLine | TagsLine | KeepLine | ArtifactLine | UrgentLine, Field(discriminator="kind")
]
JOURNAL_LINE: TypeAdapter[JournalLine] = TypeAdapter(JournalLine)


class HelloLine(Line):
    """Rank -> agent: identifies the rank on this connection."""

    kind: Literal["hello"] = "hello"
    rank: int
    pid: int
    generation: int


class ShardPlanLine(Line):
    """Rank -> agent: the rank's position in a split, and which shards it will read when."""

    kind: Literal["read_plan"] = "read_plan"
    rank: int
    split: str
    #: Samples of the run that are taken before what this rank loads now, and how many are taken a second (0: unknown).
    at: int
    per_s: float = 0.0
    #: (number of the shard in the manifest's split, first and last position that needs it); null: as before.
    needs: tuple[tuple[int, int, int], ...] | None = None


class ShardRequestLine(Line):
    """Rank -> agent: the rank waits for this shard, named by its path in the dataset's folder."""

    kind: Literal["shard_request"] = "shard_request"
    rank: int
    generation: int
    shard: str


class ShardReplyLine(Line):
    """Agent -> rank: the shard and its index are there, verified; or why the agent cannot fetch them."""

    kind: Literal["shard_reply"] = "shard_reply"
    shard: str
    problem: str = ""


class RangeRequestLine(Line):
    """Rank -> agent: the rank waits for the bytes ``start`` to ``stop`` of a file in the checkpoint's folder."""

    kind: Literal["range_request"] = "range_request"
    rank: int
    generation: int
    file: str
    start: int
    stop: int


class RangeReplyLine(Line):
    """Agent -> rank: the bytes are there, verified; or why the agent cannot fetch them."""

    kind: Literal["range_reply"] = "range_reply"
    file: str
    problem: str = ""


RankLine = Annotated[HelloLine | ShardPlanLine | ShardRequestLine | RangeRequestLine, Field(discriminator="kind")]
RANK_LINE: TypeAdapter[RankLine] = TypeAdapter(RankLine)


class StopLine(Line):
    """Agent -> rank: agree on a last step, checkpoint, and exit with EXIT_STOPPED."""

    kind: Literal["stop"] = "stop"
    grace_s: float
    reason: str = ""
    #: False: end at once, without a checkpoint.
    checkpoint: bool = True


class PeerLostLine(Line):
    """Agent -> rank: another rank of the generation has failed, so do not wait for it."""

    kind: Literal["peer_lost"] = "peer_lost"


ControlLine = Annotated[StopLine | PeerLostLine, Field(discriminator="kind")]
CONTROL_LINE: TypeAdapter[ControlLine] = TypeAdapter(ControlLine)


def json_line(line: BaseModel) -> bytes:
    """One line, ready to be appended or sent."""
    return line.model_dump_json(exclude_defaults=False).encode() + b"\n"
