"""The packed form of a copied output folder: a checkpoint on rank 0's node, and a part of one on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contracts.events.checkpoint import CheckpointFile
from contracts.formats import plural
from contracts.manifest import encode_listing
from contracts.node_outputs import OUTPUTS_FOLDER, REQUESTED_FOLDER, PackedFile
from services.kit.kept_files import KeptLayout, pack_files, pack_node_files
from services.kit.store.files import hash_file
from services.worker.core.output_merge import Conflict, PeerListing, merge_names, place_files

#: Files that a notice names.
MAX_NAMED_FILES = 3

#: Raises for a number of files, and bytes of them, beyond the limits; the text says among what they are counted.
CheckLimits = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class CopiedFiles:
    """The copies on this node, by name."""

    #: Of what the script asked to keep.
    requested: Mapping[str, Path]
    #: Of the output folder.
    outputs: Mapping[str, Path]
    #: Whether the script has asked for these in this generation: others are those of the checkpoint that it resumed.
    asked_here: bool
    #: Names in the output folder that the script has written in this generation, and that it has removed.
    written: frozenset[str]
    deleted: frozenset[str]


class NodeSnapshot(BaseModel):
    """What a node without rank 0 has beside a packed tree: the part of its listing that no upload tells."""

    model_config = ConfigDict(extra="ignore")

    packed: dict[str, PackedFile]
    deleted: tuple[str, ...]
    requests: int


def peer_files_path(packed: Path) -> Path:
    """Return where the list of other nodes' files is that belong to a packed tree."""
    return packed.with_name(f"{packed.name}.peers.json")


def node_snapshot_path(packed: Path) -> Path:
    """Return where the ``NodeSnapshot`` of a packed tree is."""
    return packed.with_name(f"{packed.name}.node.json")


def pack_checkpoint(
    files: CopiedFiles, peers: Sequence[PeerListing], layout: KeptLayout, packed: Path, check_limits: CheckLimits
) -> list[Conflict] | None:
    """Write a checkpoint with the files of all nodes; return which files are not in it, None without any file.

    Args:
        layout: what it says of places is set here.
    """
    requested, outputs = files.requested, files.outputs
    asked_here = dict.fromkeys(requested, files.asked_here)
    asked = merge_names(asked_here, peers, REQUESTED_FOLDER, lambda name: hash_file(requested[name]))
    written = {name: name in files.written for name in outputs}
    merged = merge_names(written, peers, OUTPUTS_FOLDER, lambda name: hash_file(outputs[name]))
    root_names = asked.own.union(*asked.peers.values())
    prefix = _free_folder_name(root_names) if root_names else ""
    taken = [place_files(peer, merged.peers[peer.node_rank], asked.peers[peer.node_rank], prefix) for peer in peers]
    own = {name: requested[name] for name in asked.own}
    own |= {f"{prefix}/{name}" if prefix else name: outputs[name] for name in merged.own}
    count = len(own) + sum(each.count for each in taken)
    if count == 0:
        return None
    if taken:
        size_bytes = sum(path.stat().st_size for path in own.values()) + sum(each.size_bytes for each in taken)
        check_limits(count, size_bytes, f"with those of {plural(len(taken), 'other node')} ")
    has_outputs = bool(merged.own or any(merged.peers.values()))
    places = {
        "outputs": prefix if has_outputs or not root_names else None,
        "node_packs": {name: left_out for each in taken for name, left_out in each.packs.items()},
    }
    pack_files(own, layout.model_copy(update=places), packed)
    _write_peer_files([file for each in taken for file in each.files], packed)
    return [*asked.conflicts, *merged.conflicts]


def pack_node(files: CopiedFiles, node_rank: int, requests: int, packed: Path) -> None:
    """Write what a node without rank 0 adds to checkpoints.

    Args:
        requests: how many requests of the script the files are beyond.
    """
    paths = {f"{REQUESTED_FOLDER}/{name}": path for name, path in files.requested.items()}
    paths |= {f"{OUTPUTS_FOLDER}/{name}": files.outputs[name] for name in files.written}
    in_pack = pack_node_files(paths, node_rank, packed)
    snapshot = NodeSnapshot(
        packed={
            path: PackedFile(sha256=hash_file(paths[path]), size_bytes=paths[path].stat().st_size)
            for path in sorted(in_pack)
        },
        deleted=tuple(sorted(files.deleted)),
        requests=requests,
    )
    node_snapshot_path(packed).write_text(snapshot.model_dump_json())


def describe_conflicts(conflicts: Sequence[Conflict]) -> str:
    """Return which files are not in a checkpoint, and what to change."""
    names = ", ".join(f"{each.name} of node {each.node_id}" for each in conflicts[:MAX_NAMED_FILES])
    return (
        f"{plural(len(conflicts), 'file')} of other nodes will not be kept ({names}): a node of a lower rank wrote "
        "other content under the same name, so have each node write names of its own, for example with NODE_RANK"
    )


def _write_peer_files(files: Sequence[CheckpointFile], packed: Path) -> None:
    path = peer_files_path(packed)
    path.unlink(missing_ok=True)
    if files:
        path.write_bytes(encode_listing(files))


def _free_folder_name(files: Iterable[str]) -> str:
    """Return the folder for the content of the output folder, beside what the script asked to keep."""
    taken = {name.split("/", 1)[0] for name in files}
    name = OUTPUTS_FOLDER
    while name in taken:
        name += "_"
    return name
