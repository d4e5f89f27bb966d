"""Facts about checkpoints, on the run they belong to."""

from __future__ import annotations

from pydantic import Field

from contracts.base import ObjectUri, Sha256, Token
from contracts.events.run import CheckpointRef, GenerationFact, RunFact, Value


class CheckpointFile(Value):
    """One file of a checkpoint; its bytes are the blob of that hash."""

    path: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}$")
    sha256: Sha256
    size_bytes: int = Field(ge=0)
    uri: ObjectUri


class CheckpointStaged(GenerationFact, fact="checkpoint_staged"):
    """This node's files of a checkpoint are in the store. Not restorable until it is committed."""

    node_id: Token
    ranks: tuple[int, ...]
    world_size: int
    step: int
    epoch: int
    samples_consumed: int
    files: tuple[CheckpointFile, ...]
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False

    @property
    def occurrence(self) -> str:
        return f"{self.generation}/{self.step}/{self.node_id}"


class CheckpointCommitted(GenerationFact, fact="checkpoint_committed"):
    """Every rank's files are verified and the manifest is written: this can be restored."""

    checkpoint: CheckpointRef
    size_bytes: int
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False

    @property
    def occurrence(self) -> str:
        return f"{self.generation}/{self.checkpoint.step}"


class CheckpointRefused(GenerationFact, fact="checkpoint_refused"):
    """A staged checkpoint did not verify; it will never be committed."""

    step: int
    reason: str

    @property
    def occurrence(self) -> str:
        return f"{self.generation}/{self.step}"


class CheckpointDeleted(RunFact, fact="checkpoint_deleted"):
    """Retention removed the manifest; its blobs go once nothing else names them."""

    uri: ObjectUri
    step: int
    reason: str

    @property
    def occurrence(self) -> str:
        return self.uri
