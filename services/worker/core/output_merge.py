"""One checkpoint of the output folders of all nodes: which copy of a name stands.

Each node begins with the same files. A node that has not touched a file since says nothing about it, so a file that
another node changed or removed is taken from there. Where two nodes have written one name, that of the lower rank
stands, and the other one is told of if its content differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.events.checkpoint import CheckpointFile
from contracts.node_outputs import OUTPUTS_FOLDER, REQUESTED_FOLDER, NodeOutputs, PackedFile, node_pack_name


@dataclass(frozen=True, slots=True)
class PeerListing:
    """The newest listing of another node."""

    node_id: str
    node_rank: int
    outputs: NodeOutputs


@dataclass(frozen=True, slots=True)
class Conflict:
    """A file of a node that is not kept, since another node wrote other content under its name."""

    name: str
    node_id: str


@dataclass(slots=True)
class MergedNames:
    """Whose files stand, by name."""

    #: Names of the own node.
    own: set[str] = field(default_factory=set)
    #: Rank of another node -> names.
    peers: dict[int, set[str]] = field(default_factory=dict)
    conflicts: list[Conflict] = field(default_factory=list)


@dataclass(slots=True)
class _Tree:
    """Names that stand, and the folders that they need."""

    digests: dict[str, Callable[[], str]] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def add(self, name: str, digest: Callable[[], str]) -> bool:
        """Add a file; return False if its name, or that of a folder above it, is taken."""
        if name in self.digests or name in self.folders or any(each in self.digests for each in _folders_of(name)):
            return False
        self.digests[name] = digest
        self.folders.update(_folders_of(name))
        return True

    def has(self, name: str, sha256: str) -> bool:
        """Whether the name stands with this content."""
        return name in self.digests and self.digests[name]() == sha256


def merge_names(
    own: Mapping[str, bool], peers: Sequence[PeerListing], folder: str, own_digest: Callable[[str], str]
) -> MergedNames:
    """Decide for each name in one folder of the listings whose file stands.

    Args:
        own: name -> whether this node has written the file since its folder was laid out.
        peers: in the order of their ranks.
        own_digest: returns the SHA-256 of an own file; called for names that other nodes have, too.
    """
    tree, merged = _Tree(), MergedNames()
    for name, is_changed in own.items():
        if is_changed and tree.add(name, lambda name=name: own_digest(name)):  # type: ignore[misc]
            merged.own.add(name)
    deleted: set[str] = set()
    for peer in peers:
        stands = merged.peers.setdefault(peer.node_rank, set())
        for name, content in sorted(peer.outputs.contents(folder).items()):
            if tree.add(name, lambda content=content: content.sha256):  # type: ignore[misc]
                stands.add(name)
            elif not tree.has(name, content.sha256):
                merged.conflicts.append(Conflict(name, peer.node_id))
        deleted.update(peer.outputs.deleted if folder == OUTPUTS_FOLDER else ())
    for name, is_changed in own.items():
        if not is_changed and name not in deleted and tree.add(name, lambda name=name: own_digest(name)):  # type: ignore[misc]
            merged.own.add(name)
    return merged


@dataclass(frozen=True, slots=True)
class PlacedFiles:
    """The files of another node under their paths in the checkpoint."""

    files: tuple[CheckpointFile, ...]
    #: Name of the pack -> paths in it that do not stand; empty without a pack.
    packs: Mapping[str, tuple[str, ...]]
    #: Number and bytes of the files that stand.
    count: int
    size_bytes: int


def place_files(peer: PeerListing, outputs: Collection[str], requested: Collection[str], prefix: str) -> PlacedFiles:
    """Return what a checkpoint takes over of a node.

    Args:
        outputs: names of the output folder that stand.
        requested: of what the script asked to keep, those that stand.
        prefix: folder of the checkpoint with the content of the output folder; '': all of it is.
    """
    standing = {
        **{f"{OUTPUTS_FOLDER}/{name}": f"{prefix}/{name}" if prefix else name for name in outputs},
        **{f"{REQUESTED_FOLDER}/{name}": name for name in requested},
    }
    listed = peer.outputs
    files = [each.model_copy(update={"path": standing[each.path]}) for each in listed.files if each.path in standing]
    packs: dict[str, tuple[str, ...]] = {}
    if standing.keys() & listed.packed.keys():
        name = node_pack_name(peer.node_rank)
        files += [each.model_copy(update={"path": name}) for each in listed.files if "/" not in each.path]
        packs[name] = tuple(sorted(listed.packed.keys() - standing.keys()))
    sizes = [content.size_bytes for content in _standing_contents(listed, standing)]
    return PlacedFiles(tuple(files), packs, len(sizes), sum(sizes))


def _standing_contents(listed: NodeOutputs, standing: Collection[str]) -> Iterator[PackedFile]:
    for folder in (OUTPUTS_FOLDER, REQUESTED_FOLDER):
        for name, content in listed.contents(folder).items():
            if f"{folder}/{name}" in standing:
                yield content


def _folders_of(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name
