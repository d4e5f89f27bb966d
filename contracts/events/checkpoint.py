"""Facts about checkpoints, on the run they belong to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from contracts.base import FactPart, ObjectUri, Sha256, Token
from contracts.checkpoint_ref import CheckpointRef
from contracts.events.run import GenerationFact, RunFact


class Chunk(FactPart):
    """A piece of a file. ``sha256`` and ``size_bytes`` are the piece's own, also when a difference is stored for it."""

    sha256: Sha256
    size_bytes: int = Field(ge=0)
    #: The piece's BLAKE3 hash where the writer gave one: the same certainty for a tenth of the reader's time.
    blake3: Sha256 | None = None
    #: The blob that holds the piece, under the hash of the blob's bytes.
    uri: ObjectUri
    #: ``xor-zstd``: the blob is a difference to ``base``, see ``docs/checkpoints.md``.
    encoding: Literal["plain", "xor-zstd"] = "plain"
    #: Bytes of the blob; for a plain piece ``size_bytes``.
    stored_bytes: int | None = Field(None, ge=0)
    #: The piece that a difference is against, itself perhaps a difference; chains are short.
    base: Chunk | None = None

    @property
    def uris(self) -> tuple[str, ...]:
        """Every blob that is needed to get the piece back."""
        return (self.uri, *(self.base.uris if self.base is not None else ()))


class CheckpointFile(FactPart):
    """One file of a checkpoint; its bytes are those of its chunks, one after the other."""

    path: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}$")
    sha256: Sha256
    size_bytes: int = Field(ge=0)
    chunks: tuple[Chunk, ...]

    @property
    def uris(self) -> tuple[str, ...]:
        """Every blob that is needed to get the file back."""
        return tuple(dict.fromkeys(uri for chunk in self.chunks for uri in chunk.uris))


class FileListing(FactPart):
    """The list of a part's files, in the store: what ``contracts/manifest.py`` encodes, as a blob under its hash."""

    uri: ObjectUri
    sha256: Sha256
    #: Bytes of the list itself.
    size_bytes: int = Field(ge=0)
    #: Bytes of all the files in it.
    files_bytes: int = Field(ge=0)


Exactness = Literal["exact", "samples-exact"]


class CheckpointStaged(GenerationFact, fact="checkpoint_staged", occurrence="generation/step/node_id"):
    """This node's files of a checkpoint are in the store. Not restorable until it is committed."""

    node_id: Token
    ranks: tuple[int, ...]
    world_size: int
    step: int
    epoch: int
    samples_consumed: int
    #: The files of a small part. Those of a larger one, whose list no event can hold, are in ``listing``. A reader from
    #: before there were listings cannot read such a fact, and so takes it for no part without files.
    files: tuple[CheckpointFile, ...] = ()
    listing: FileListing | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False
    #: These files are the whole checkpoint: what a script left on the node of rank 0. No other node adds to it.
    is_whole: bool = False
    #: ``step`` is a version of the script's output folder, counted: at which step it was is not known.
    step_is_count: bool = False
    #: Whether the state is, to the bit, what undisturbed training would have made of it.
    exactness: Exactness = "samples-exact"

    @property
    def size_bytes(self) -> int:
        """Bytes of the files."""
        return self.listing.files_bytes if self.listing is not None else sum(file.size_bytes for file in self.files)


class CheckpointCommitted(GenerationFact, fact="checkpoint_committed", occurrence="generation/checkpoint.step"):
    """Every rank's files are verified and the manifest is written: this can be restored."""

    checkpoint: CheckpointRef
    size_bytes: int
    metrics: dict[str, float] = Field(default_factory=dict)
    final: bool = False
    exactness: Exactness = "samples-exact"
    #: A hash over weights, optimizer, schedule and sampler, the same for any number of ranks.
    state_digest: Sha256 | None = None
    #: Of the manifest's bytes: it identifies the whole checkpoint.
    manifest_sha256: Sha256 | None = None


class CheckpointRefused(GenerationFact, fact="checkpoint_refused", occurrence="generation/step"):
    """A staged checkpoint will never be committed: it did not verify, or it came too late to be kept."""

    step: int
    reason: str
    #: It is whole. But newer ones were committed first, and retention would have deleted it at once.
    superseded: bool = False
    #: The ranks did their part, but the store lacks it or holds something else. It does not count as an attempt.
    infrastructure_failure: bool = False


class CheckpointDeleted(RunFact, fact="checkpoint_deleted", occurrence="uri"):
    """Retention removed the manifest; its blobs go once nothing else names them."""

    uri: ObjectUri
    step: int
    reason: str


class CheckpointPinned(RunFact, fact="checkpoint_pinned", occurrence="request_id"):
    """The checkpoint is pinned: retention does not delete it. Or it is no longer pinned."""

    uri: ObjectUri
    step: int
    pinned: bool
    request_id: str
    reason: str = ""


class CheckpointRotten(RunFact, fact="checkpoint_rotten", occurrence="uri/found_at"):
    """Stored blobs of a committed checkpoint are missing or corrupt. Nodes that have the blobs write them again."""

    uri: ObjectUri
    step: int
    #: Whether nodes shall write them again; otherwise the fact is only a report.
    repair: bool = True
    #: Blobs that are missing or whose bytes do not fit their name.
    blobs: tuple[ObjectUri, ...]
    #: When it was found: each finding is a fact of its own.
    found_at: str


class CheckpointRepaired(RunFact, fact="checkpoint_repaired", occurrence="uri/found_at/blob"):
    """A corrupt blob was written again from a node's copy."""

    uri: ObjectUri
    step: int
    blob: ObjectUri
    node_id: Token
    found_at: str
