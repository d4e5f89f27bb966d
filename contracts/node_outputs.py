"""What the nodes without rank 0 have in their output folders: a blob that lists it, and the key that names the blob.

The agent of rank 0 adds it to the checkpoints of the script, see ``services/worker/core/output_merge.py``.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field

from contracts.base import Sha256, Token
from contracts.events.checkpoint import CheckpointFile, FileListing

#: Folders in a listing: of the output folder, and of what the script asked to keep.
OUTPUTS_FOLDER = "outputs"
REQUESTED_FOLDER = "requested"
#: The pack of a node in a checkpoint; that of rank 0's node has no number.
NODE_PACK_NAME = re.compile(r"trainbus-files\.\d+\.tar")


class PackedFile(BaseModel):
    """A file in the pack of a node."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sha256: Sha256
    size_bytes: int = Field(ge=0)


class NodeOutputs(BaseModel):
    """What a node's script has written since the folder was laid out. Paths begin with one of the two folders."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Those with blobs of their own, and the pack, whose path has no folder.
    files: tuple[CheckpointFile, ...] = ()
    packed: dict[str, PackedFile] = Field(default_factory=dict)
    #: Files of the output folder that the node began with, and that are gone.
    deleted: tuple[str, ...] = ()

    def contents(self, folder: str) -> dict[str, PackedFile]:
        """Return name -> content of all files in one of the two folders, whether packed or not."""
        listed = {each.path: PackedFile(sha256=each.sha256, size_bytes=each.size_bytes) for each in self.files}
        prefix = f"{folder}/"
        return {
            path.removeprefix(prefix): content
            for path, content in {**listed, **self.packed}.items()
            if path.startswith(prefix)
        }


class NodeOutputsRef(BaseModel):
    """The value of ``<run>.<generation>.<node>`` in the bucket OUTPUTS: where the node's newest listing is."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    generation: int
    node_id: Token
    #: None: the node has written nothing yet.
    listing: FileListing | None = None
    #: How many of the script's requests to keep something the listing is beyond.
    requests: int = 0
    #: The node's ranks have ended, and this is all that they left.
    is_final: bool = False

    @property
    def key(self) -> str:
        """The key in the bucket."""
        return f"{self.run_id}.{self.generation}.{self.node_id}"


def node_pack_name(node_rank: int) -> str:
    """Return the name of a node's pack in a checkpoint."""
    return f"trainbus-files.{node_rank}.tar"
