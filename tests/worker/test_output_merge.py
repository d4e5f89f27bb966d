"""One checkpoint of what several nodes have written: whose copy of a name it has, and that it can be read."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.checkpoint_ref import CheckpointRef
from contracts.events.checkpoint import CheckpointFile, Chunk
from contracts.events.run import Member, RunPlaced
from contracts.manifest import files_of
from contracts.node_outputs import OUTPUTS_FOLDER, REQUESTED_FOLDER, NodeOutputs, NodeOutputsRef, PackedFile
from contracts.ranks import KeepLine, json_line
from contracts.spec.run import RunSpec
from services.kit.kept_files import KeptLayout, copy_outputs, list_files, pack_node_files, unpack_files
from services.kit.messages import TransientError
from services.worker.checkpoints.output_folder import OutputKeeper
from services.worker.checkpoints.packed_outputs import peer_files_path
from services.worker.checkpoints.peer_outputs import PeerOutputs
from services.worker.core.journal import JournalSource
from services.worker.core.output_merge import PeerListing
from services.worker.ranks.journal_follower import JournalFollower
from tests.worker.test_output_keeper import end, keeper

#: Names that are listed, and names that are packed, among them those of a checkpoint's own files.
NAMES = ("a.pt", "d/b.pt", "d/ü", "trainbus.json", "trainbus-files.1.tar", "trainbus-files.tar")
#: Of one node: names that it has written with their content, names that it has removed.
CHANGES = st.tuples(st.dictionaries(st.sampled_from(NAMES), st.sampled_from("xyz")), st.sets(st.sampled_from(NAMES)))


@dataclass
class Nodes:
    """The other nodes, as ``PeerOutputs`` has them, and the store."""

    listings: tuple[PeerListing, ...] = ()
    blobs: dict[str, bytes] = field(default_factory=dict)
    unfinished: frozenset[str] = frozenset()
    requests: int = 0

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(each.node_id for each in self.listings)

    @property
    def digests(self) -> dict[str, str]:
        return {each.node_id: hashlib.sha256(repr(each).encode()).hexdigest() for each in self.listings}

    def requests_of(self, node_id: str) -> int:
        return self.requests

    def add(
        self, folder: Path, outputs: Mapping[str, str], deleted: Any = (), requested: Mapping[str, str] | None = None
    ) -> None:
        """Add what the next node has written."""
        rank = len(self.listings) + 1
        files = {}
        for kind, contents in ((OUTPUTS_FOLDER, outputs), (REQUESTED_FOLDER, requested or {})):
            for name, content in contents.items():
                path = files[f"{kind}/{name}"] = folder / f"n{rank}" / kind / name
                write(path, content)
        packed = pack_node_files(files, rank, folder / f"packed_{rank}")
        described = {path: PackedFile(sha256=digest(file.read_bytes()), size_bytes=1) for path, file in files.items()}
        listed = NodeOutputs(
            files=tuple(self._store(name, path) for name, path in list_files(folder / f"packed_{rank}")),
            packed={path: described[path] for path in packed},
            deleted=tuple(deleted),
        )
        self.listings += (PeerListing(f"n{rank + 1}", rank, listed),)

    def _store(self, name: str, path: Path) -> CheckpointFile:
        content = path.read_bytes()
        sha256 = digest(content)
        self.blobs[sha256] = content
        chunk = Chunk(sha256=sha256, size_bytes=len(content), uri=f"s3://models/blobs/sha256/{sha256[:2]}/{sha256}")
        return CheckpointFile(path=name, sha256=sha256, size_bytes=len(content), chunks=(chunk,))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


async def publish(fact: Any) -> None:
    raise AssertionError("nothing is to be published")


def begin(folder: Path, base: Mapping[str, str], nodes: Nodes, **changes: Any) -> OutputKeeper:
    """The keeper of rank 0's node, whose folder was laid out with ``base``."""
    for name, content in base.items():
        write(folder / "outputs" / name, content)
        write(folder / "resume" / name, content)
    follower = JournalFollower(JournalSource("r1", 1, "n1"), (0,), folder, publish, time.time, interval_s=1.0)
    kept = keeper(folder, follower, peers=nodes, **changes)
    if base:
        uri = "s3://models/e/r1/checkpoints/epoch_0/step_00000001.g0.json"
        ref = CheckpointRef(uri=uri, step=1, epoch=0, samples_consumed=0)
        kept.continue_from(ref, folder / "resume", KeptLayout())
    return kept


def read(folder: Path, kept: OutputKeeper, nodes: Nodes) -> tuple[dict[str, str], dict[str, str]] | None:
    """The files of the last checkpoint, and those of the output folder among them; None without a checkpoint."""
    snapshots = kept._follower.state.snapshots
    if not snapshots:
        return None
    packed = Path(snapshots[max(snapshots)].folder)
    peers = peer_files_path(packed)
    for file in files_of(peers.read_bytes()) if peers.is_file() else ():
        assert not (packed / file.path).exists()
        (packed / file.path).parent.mkdir(parents=True, exist_ok=True)
        (packed / file.path).write_bytes(nodes.blobs[file.sha256])
    layout = unpack_files(packed)
    assert layout is not None
    copy_outputs(packed, layout, folder / "restored")
    return contents(packed), contents(folder / "restored")


def contents(folder: Path) -> dict[str, str]:
    return {name: path.read_text() for name, path in list_files(folder)}


@given(base=st.dictionaries(st.sampled_from(NAMES), st.just("old")), own=CHANGES, others=st.lists(CHANGES, max_size=3))
def test_each_name_has_the_content_of_the_node_that_wrote_it(
    base: dict[str, str], own: tuple[dict[str, str], set[str]], others: list[tuple[dict[str, str], set[str]]]
) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, nodes = Path(temporary), Nodes()
        kept = begin(folder, base, nodes)
        written = [own[0], *(files for files, _ in others)]
        removed = [(gone & base.keys()) - files.keys() for files, gone in (own, *others)]
        for name in removed[0]:
            (folder / "outputs" / name).unlink()
        for name, content in own[0].items():
            (folder / "outputs" / name).unlink(missing_ok=True)
            write(folder / "outputs" / name, content)
        for files, gone in zip(written[1:], removed[1:], strict=True):
            nodes.add(folder, files, gone)
        is_emptied = removed[0] == base.keys() and not own[0]
        asyncio.run(end(kept))
        found = read(folder, kept, nodes)
        if found is None:
            return
        expected, lost = {}, set()
        for name in NAMES:
            values = [files[name] for files in written if name in files]
            gone = removed[1:] if is_emptied else removed
            if values:
                expected[name] = values[0]
            elif name in base and not any(name in each for each in gone):
                expected[name] = "old"
            if len(set(values)) > 1:
                lost.add(name)
        assert found[1] == expected
        assert all(name in kept.unkept_notice for name in sorted(lost)[:1]), kept.unkept_notice
        assert bool(lost) == bool(kept.unkept_notice)


@pytest.mark.parametrize(
    ("own", "other", "kept_names"),
    [("a", "a/b", {"a"}), ("a/b", "a", {"a/b"}), ("ü", "ü/b", {"ü"}), ("a/b/c", "a/b", {"a/b/c"})],
)
def test_a_file_is_not_kept_where_another_node_has_a_folder(
    tmp_path: Path, own: str, other: str, kept_names: set[str]
) -> None:
    nodes = Nodes()
    kept = begin(tmp_path, {}, nodes)
    write(tmp_path / "outputs" / own, "x")
    nodes.add(tmp_path, {other: "x"})
    asyncio.run(end(kept))
    found = read(tmp_path, kept, nodes)
    assert found is not None
    assert set(found[1]) == kept_names
    assert f"{other} of node n2" in kept.unkept_notice


def test_what_nodes_ask_to_keep_lies_beside_their_folders(tmp_path: Path) -> None:
    nodes = Nodes()
    kept = begin(tmp_path, {}, nodes)
    write(tmp_path / "outputs/log 0", "x")
    write(tmp_path / "asked/shard_0.pt", "x")
    line = KeepLine(path=str(tmp_path / "asked"), step=7)
    (tmp_path / "rank_0.jsonl").write_bytes(json_line(line))
    nodes.add(tmp_path, {"log 1": "y"}, requested={"shard_1.pt": "y", "shard_0.pt": "other", "outputs": "z"})

    async def keep() -> None:
        await kept._follower.poll()
        await end(kept)

    asyncio.run(keep())
    found = read(tmp_path, kept, nodes)
    assert found is not None
    files = {"shard_0.pt": "x", "shard_1.pt": "y", "outputs": "z"}
    assert found[0] == {**files, "outputs_/log 0": "x", "outputs_/log 1": "y"}
    assert found[1] == {"log 0": "x", "log 1": "y"}
    assert "(shard_0.pt of node n2)" in kept.unkept_notice


async def test_a_request_waits_for_nodes_that_may_make_it_too(tmp_path: Path) -> None:
    nodes = Nodes(unfinished=frozenset({"n2"}))
    kept = begin(tmp_path, {}, nodes)
    snapshots = kept._follower.state.snapshots

    async def request(step: int) -> None:
        write(tmp_path / f"step_{step}", "x")
        with (tmp_path / "rank_0.jsonl").open("ab") as journal:
            journal.write(json_line(KeepLine(path=str(tmp_path / f"step_{step}"), step=step)))
        await kept._follower.poll()
        await kept._poll()

    await request(1)
    assert not snapshots
    await request(2)
    nodes.requests = 1
    await kept._poll()
    assert list(snapshots) == [1]  # the node has not stored its second one
    nodes.requests = 2
    await kept._poll()
    assert list(snapshots) == [1, 2]


async def test_requests_do_not_pile_up_behind_a_node_that_makes_none(tmp_path: Path) -> None:
    nodes = Nodes(unfinished=frozenset({"n2"}))
    kept = begin(tmp_path, {}, nodes)
    for step in (1, 2, 3):
        write(tmp_path / f"step_{step}", "x")
        with (tmp_path / "rank_0.jsonl").open("ab") as journal:
            journal.write(json_line(KeepLine(path=str(tmp_path / f"step_{step}"), step=step)))
        assert not kept._follower.state.snapshots
        await kept._follower.poll()
        await kept._poll()
    assert list(kept._follower.state.snapshots) == [1, 2, 3]
    assert not kept.problems


async def test_a_bus_that_is_away_does_not_end_the_wait_for_other_nodes(tmp_path: Path) -> None:
    members = tuple(Member(node_id=f"n{rank + 1}", slots=(0,), ranks=(rank,)) for rank in (0, 1))
    placed = RunPlaced(
        run_id="r1",
        generation=1,
        members=members,
        world_size=2,
        spec=RunSpec.model_validate({"name": "script", "command": ["python", "train.py"]}),
        decided_at_sequence=0,
        decided_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    asked = asyncio.Event()

    class Bus:
        async def read_history(self, *filters: str) -> Any:
            asked.set()
            raise TransientError("NATS does not answer")

    peers = PeerOutputs(SimpleNamespace(bus=Bus()), placed, members[0], tmp_path)  # type: ignore[arg-type]
    waiting = asyncio.create_task(peers.wait_until_final())
    await asked.wait()
    ref = NodeOutputsRef(run_id="r1", generation=1, node_id="n2", is_final=True)
    assert await peers._read(ref)
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"output_max_bytes": 2}, "with those of 1 other node they take 3 bytes, more than the limit of 2: remove"),
        ({"output_max_files": 2}, "with those of 1 other node they are 3 files, more than the limit of 2: pack"),
    ],
)
def test_the_limits_hold_for_the_files_of_all_nodes(tmp_path: Path, limit: dict[str, int], text: str) -> None:
    nodes = Nodes()
    kept = begin(tmp_path, {}, nodes, **limit)
    write(tmp_path / "outputs/a", "x")
    nodes.add(tmp_path, {"b": "x", "ü": "x"})
    asyncio.run(end(kept))
    assert read(tmp_path, kept, nodes) is None
    assert text in kept.unkept_notice
    assert not list((tmp_path / "trees").iterdir())

    nodes.listings = ()
    nodes.add(tmp_path / "again", {"b": "x"})
    asyncio.run(kept.add_last_of_peers(tells_unfinished=True))
    found = read(tmp_path, kept, nodes)
    assert found is not None
    assert (set(found[1]), kept.unkept_notice) == ({"b"}, "")
