"""The output folder of a script: what lies in it is kept as the run's checkpoint, a tree of plain files.

Each node copies files that are complete into ``trees/step_<n>`` of the generation's folder (unchanged ones are linked
to the copy before), and gives the tree to the stager. The script may write on meanwhile. A copy happens when files have
changed and settled, when the script asks for one (a ``keep`` line), when the run is stopped, and at its end. That of
rank 0's node is a checkpoint, with the files that the other nodes have listed until then.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field

from contracts.events.run import CheckpointRef, Member, RunPlaced
from contracts.manifest import run_of_manifest
from contracts.ranks import OUTPUT_DIR_VARIABLE, CheckpointLine, KeepLine
from services.kit.concurrency import run_in_thread
from services.kit.kept_files import KeptLayout, list_files
from services.kit.store.files import is_inside
from services.worker.checkpoints.packed_outputs import (
    MAX_NAMED_FILES,
    CopiedFiles,
    describe_conflicts,
    pack_checkpoint,
    pack_node,
)
from services.worker.checkpoints.peer_outputs import PeerOutputs, describe_unfinished
from services.worker.core.journal import RankState
from services.worker.core.output_merge import Conflict, PeerListing
from services.worker.core.output_versions import (
    FileVersion,
    SettledFiles,
    complete_at_stop,
    next_step,
    unambiguous,
    written_before,
)
from services.worker.core.rank_environment import is_command, node_rank_of
from services.worker.launch.executor import log_path
from services.worker.local_files import read_json, suppress_full_disk, write_if_space
from services.worker.ranks.journal_follower import JournalFollower
from services.worker.ranks.open_files import ScriptEndedError, check_scripts_run, find_written_files, has_writer
from services.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)

#: Requested checkpoints that wait for their turn; of more, the oldest are dropped.
MAX_WAITING = 3
#: Keeping files without a request takes at most one part in this many of the time.
TIME_SHARE = 4
#: Copies without a request are this part of the script's time apart.
ELAPSED_SHARE = 20
#: Bytes of the disk that stay free.
FREE_BYTES = 2**30
#: The clock that Linux stamps files with: CLOCK_REALTIME_COARSE, which Python has no name for.
FILE_CLOCK = 5 if sys.platform == "linux" else time.CLOCK_REALTIME
#: Writes in a row that must have different times.
STAMP_TRIALS = 10
#: Problems that a notice names.
MAX_NAMED_PROBLEMS = 3
#: Seconds for which a request on rank 0's node waits until other nodes have stored the same one of theirs, and for
#: which it waits if their scripts have asked for nothing yet: they may never do so.
REQUEST_WAIT_S = 600.0
FIRST_REQUEST_WAIT_S = 30.0


#: Files that another node wrote, too; those of a copy that could not be made; those that came too late.
UnkeptKind = Literal["conflicts", "refused", "late"]


class OutputLimitError(Exception):
    """The files cannot be kept; the text says what to change."""


class KeptState(BaseModel):
    """``outputs.json``: what this generation has kept."""

    model_config = ConfigDict(extra="ignore")

    #: Step of the last kept state, or of the one that was resumed.
    step: int = 0
    epoch: int = 0
    #: Name -> version of the files of the output folder in the last tree.
    versions: dict[str, FileVersion] = Field(default_factory=dict)
    #: Folder of the last tree.
    tree: str | None = None
    #: The files at the root of the tree are those of the script's last request.
    is_requested: bool = False
    artifacts: list[str] = Field(default_factory=list)
    #: The versions with which this generation began: what is still the same, the script has not written here.
    laid_out: dict[str, FileVersion] = Field(default_factory=dict)
    #: How many requests of the script this generation has come to.
    requests: int = 0
    #: Other node -> hash of its listing that the last tree has.
    peer_digests: dict[str, str] = Field(default_factory=dict)
    #: What the last copy lacks, and what to change, by the kind of problem.
    unkept: dict[UnkeptKind, str] = Field(default_factory=dict)
    #: Problems that the run's log has already.
    warnings: list[str] = Field(default_factory=list)
    #: The checkpoint of another run that this one began with, RUN@STEP; None: it began with nothing, or goes on from
    #: what it kept itself.
    origin: str | None = None
    #: The step with which it began so; what it keeps itself is beyond that.
    origin_step: int = 0


class LeaseError(Exception):
    """The file system does not tell whether a file is being written."""


@dataclass(frozen=True, slots=True)
class OutputTree:
    """The files of the output folder: their versions, and which cannot be kept."""

    versions: dict[str, FileVersion]
    refused: tuple[str, ...] = ()
    #: The clock of the file system before the first version was read.
    clock_ns: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """The output folder at one moment, and what the script had reported then."""

    tree: OutputTree
    #: Names of the files that are whole.
    complete: set[str]
    reported: RankState


def scan(folder: Path, max_files: int) -> OutputTree:
    """List the files below a folder. A link to a file in the folder counts as that file; others are refused.

    Raises:
        OutputLimitError: there are too many.
    """
    clock_ns = time.clock_gettime_ns(FILE_CLOCK)
    versions: dict[str, FileVersion] = {}
    refused = []
    for root, folders, names in os.walk(folder):
        refused += [os.path.join(root, name) for name in folders if os.path.islink(os.path.join(root, name))]
        for name in names:
            path = os.path.join(root, name)
            relative = os.path.relpath(path, folder)
            try:
                if os.path.islink(path) and not is_inside(Path(path), folder):
                    refused.append(path)
                    continue
                found = os.stat(path)
            except OSError:
                continue  # removed meanwhile, or a link that leads nowhere
            if not os.path.isfile(path):
                continue
            if len(versions) >= max_files:
                raise OutputLimitError(
                    f"the output folder has more than {max_files:,} files: pack them into fewer, or raise "
                    "TRAINBUS_OUTPUT_MAX_FILES"
                )
            versions[relative] = _version(found)
    return OutputTree(versions, tuple(os.path.relpath(path, folder) for path in refused), clock_ns)


def find_unwritten(folder: Path, names: Iterable[str]) -> dict[str, FileVersion]:
    """Return those of the files that nothing writes, with their versions at that moment.

    Raises:
        LeaseError: that cannot be found out.
    """
    versions = {}
    for name in names:
        try:
            file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue  # removed, or not readable
        try:
            version = _version(os.fstat(file))
            is_written = has_writer(file)
            if is_written is None:
                raise LeaseError
            # A change before the lease is a change of the version: the copy is compared with it.
            if not is_written:
                versions[name] = version
        finally:
            os.close(file)
    return versions


def _version(found: os.stat_result) -> FileVersion:
    return FileVersion(found.st_size, found.st_mtime_ns, found.st_ino)


def stamps_every_write(folder: Path) -> bool:
    """Try whether a file that was looked at has another version after any write, as on Linux from 6.13."""
    path = folder / "outputs.time"
    versions = set()
    for _ in range(STAMP_TRIALS):
        path.write_bytes(b"0")
        versions.add(path.stat().st_mtime_ns)
    path.unlink()
    return len(versions) == STAMP_TRIALS


#: Returns the files of a folder, and which of them are whole; None while that is unknown.
FindComplete = Callable[[OutputTree], Awaitable[tuple[OutputTree, set[str]] | None]]


class OutputKeeper:
    """Keeps the output folder of one generation on one node. It does nothing for tasks."""

    def __init__(
        self,
        settings: WorkerSettings,
        placed: RunPlaced,
        member: Member,
        folder: Path,
        outputs: Path,
        follower: JournalFollower,
        pids: Callable[[], list[int]],
        peers: PeerOutputs | None = None,
    ) -> None:
        """Keep ``outputs``, the output folder.

        Args:
            pids: the processes of the run's scripts on this node; none once one has failed.
            peers: what the other nodes have written; None on a node without rank 0.
        """
        self._settings, self._folder, self._outputs, self._follower = settings, folder, outputs, follower
        self._pids, self._peers = pids, peers
        self._rank, self._node_rank = min(member.ranks), node_rank_of(placed, member)
        # An evaluation has a result, and nothing to keep.
        self._is_active = is_command(placed.spec) and placed.spec.kind == "train"
        self._run_id, self._node_id = placed.run_id, member.node_id
        self._path = folder / "outputs.json"
        self._state = KeptState.model_validate(read_json(self._path) or {})
        self._settled = SettledFiles(settings.output_settle_s)
        self._lock = asyncio.Lock()
        self._next_at = 0.0
        self._began_at = time.monotonic()
        #: When the oldest request began to wait for other nodes, and the nodes for which it did in vain.
        self._waits_since: float | None = None
        self._silent_nodes: set[str] = set()
        #: Whether the file system gives each write its own time; None: not tried yet.
        self._stamps_every_write: bool | None = None

    @property
    def artifacts(self) -> list[str]:
        """Names of the artifacts in the output folder, also of earlier generations."""
        named = [name for state in self._follower.state.ranks.values() for name in state.artifacts]
        return list(dict.fromkeys([*self._state.artifacts, *named]))

    @property
    def has_kept(self) -> bool:
        """Whether this generation or one before has kept anything; true where others keep it."""
        if not self._is_active or self._rank != 0:
            return True
        if any(state.artifacts for state in self._follower.state.ranks.values()):
            return True
        return self._state.step > self._state.origin_step

    @property
    def unkept_notice(self) -> str:
        """Which files the last copy lacks, and what to change; '' if it has all."""
        return "; ".join(self._state.unkept.values())

    @property
    def origin(self) -> str | None:
        """The checkpoint of another run that this generation began with, RUN@STEP; None if there is none."""
        return self._state.origin

    @property
    def problems(self) -> tuple[str, ...]:
        """What could not be kept, and why."""
        return tuple(self._state.warnings)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self._outputs

    def continue_from(self, ref: CheckpointRef, folder: Path, layout: KeptLayout | None) -> None:
        """Continue from a checkpoint in ``folder``; the content of its output folder lies in this one again."""
        self._state.step, self._state.epoch = ref.step, ref.epoch
        if (origin := self._name_origin(ref)) is not None:
            self._state.origin, self._state.origin_step = origin, ref.step
        if layout is not None:
            self._state.artifacts = list(layout.artifacts)
            # What the checkpoint has of requests is rank 0's to keep.
            self._state.is_requested = self._rank == 0 and layout.outputs != ""
            self._state.versions = scan(self._outputs, self._settings.output_max_files).versions
            self._state.laid_out = dict(self._state.versions)
            self._state.tree = str(self._link_resumed(ref.step, folder, layout))
            self._follower.continue_matches(self._rank, layout.matches)
        self._save()

    def begin_with(self, ref: CheckpointRef, folder: Path, layout: KeptLayout | None) -> None:
        """Begin with the files of another run's checkpoint, which are nothing new. The step stays 0.

        Args:
            folder: has the checkpoint's files; the content of its output folder lies in this one.
        """
        self._state.origin = self._name_origin(ref)
        if layout is not None and layout.outputs is not None:
            self._state.versions = scan(self._outputs, self._settings.output_max_files).versions
            self._state.laid_out = dict(self._state.versions)
            tree = self._tree(0)
            shutil.rmtree(tree, ignore_errors=True)
            list(_link_tree(folder / layout.outputs, tree / "outputs"))
            self._state.tree = str(tree)
        self._save()

    def _name_origin(self, ref: CheckpointRef) -> str | None:
        """Return RUN@STEP for a checkpoint of another run."""
        run_id = run_of_manifest(ref.uri)
        return None if run_id in (None, self._run_id) else f"{run_id}@{ref.step}"

    def _link_resumed(self, step: int, folder: Path, layout: KeptLayout) -> Path:
        """Make the tree of the resumed checkpoint: what does not change is linked to it."""
        target = self._tree(step)
        shutil.rmtree(target, ignore_errors=True)
        if layout.outputs == "":
            list(_link_tree(folder, target / "outputs"))
            return target
        list(_link_tree(folder, target / "requested"))
        if layout.outputs is not None and (target / "requested" / layout.outputs).is_dir():
            (target / "requested" / layout.outputs).rename(target / "outputs")
        return target

    async def run(self) -> None:
        """Keep what changes until cancelled."""
        while self._is_active:
            kept = self._state.step
            took_s = await self._poll()
            pause_s = TIME_SHARE * took_s
            if self._state.step != kept:
                elapsed_s = time.monotonic() - self._began_at
                pause_s = max(pause_s, min(elapsed_s / ELAPSED_SHARE, self._settings.output_max_interval_s))
            self._next_at = max(self._next_at, time.monotonic() + pause_s)
            await asyncio.sleep(self._settings.output_interval_s)

    async def finish(
        self, *, ended_at: float, is_complete: bool, stopped_at: float | None, written_at_stop: set[str] | None
    ) -> None:
        """Keep what is there after the script's end.

        Args:
            ended_at: when it ended.
            is_complete: it ended by itself and well, so that no file is half written.
            stopped_at: when it was asked to stop, if it then ended by itself.
            written_at_stop: the files that it was writing at that moment; None: unknown.
        """
        if not self._is_active:
            return

        async def find_complete(tree: OutputTree) -> tuple[OutputTree, set[str]]:
            if is_complete:
                return tree, set(tree.versions)
            complete = written_before(tree.versions, ended_at - self._settings.output_settle_s)
            if stopped_at is not None and written_at_stop is not None:
                complete |= complete_at_stop(tree.versions, stopped_at, self._relative(written_at_stop))
            return tree, complete

        async with self._lock:
            await self._keep_requested(0, find_complete)
            await self._keep_changes(find_complete)

    async def add_last_of_peers(self, *, tells_unfinished: bool) -> None:
        """Keep what other nodes have listed since ``finish``, and note whose last list did not come."""
        if not self._is_active or self._peers is None:
            return

        async def find_complete(tree: OutputTree) -> tuple[OutputTree, set[str]]:
            return tree, set()  # of this node's files the last copies stand

        async with self._lock:
            await self._keep_changes(find_complete)
        if tells_unfinished and (unfinished := self._peers.unfinished):
            self._state.unkept["late"] = describe_unfinished(unfinished)
            self._warn(self._state.unkept["late"])

    async def _poll(self) -> float:
        """Keep what the script asked for, or what has changed; return the seconds it took."""
        began = time.monotonic()
        async with self._lock:
            await self._keep_requested(MAX_WAITING, self._find_complete)
            # A script that asks to keep its checkpoints decides when.
            if self._state.is_requested or self._follower.state.snapshots or began < self._next_at:
                return 0.0
            await self._keep_changes(self._find_complete)
        return time.monotonic() - began

    async def _find_complete(self, tree: OutputTree) -> tuple[OutputTree, set[str]] | None:
        """Return the files that nothing writes: the settled ones, and those that no process has open for writing.

        None: a script has ended or is to end; ``finish`` knows how.
        """
        settled = self._settled.observe(tree.versions, time.monotonic())
        if settled == tree.versions.keys() and tree.versions == self._state.versions:
            return tree, settled  # nothing to keep
        pids = self._pids()
        try:
            tree, unwritten = await run_in_thread(self._find_unwritten, tree, settled, pids)
        except ScriptEndedError:
            return None
        return (tree, settled | unwritten) if pids and self._pids() else None

    def _find_unwritten(self, tree: OutputTree, settled: set[str], pids: list[int]) -> tuple[OutputTree, set[str]]:
        """Return the versions of the files, and those that nothing writes and whose next change will be noticed.

        Raises:
            ScriptEndedError: a script has ended, perhaps in the middle of a file.
        """
        if self._stamps_every_write is None:
            self._stamps_every_write = stamps_every_write(self._folder)
        clock_ns = time.clock_gettime_ns(FILE_CLOCK)
        try:
            versions = find_unwritten(self._outputs, tree.versions.keys() - settled)
            # Only now: a script that runs after that had itself closed those files.
            check_scripts_run(pids)
            unwritten = set(versions)
            tree = replace(tree, versions={**tree.versions, **versions})
        except LeaseError:
            clock_ns = tree.clock_ns
            written = find_written_files(pids)
            unwritten = set() if written is None else tree.versions.keys() - self._relative(written)
        return tree, unwritten if self._stamps_every_write else unwritten & unambiguous(tree.versions, clock_ns)

    async def _observe(self, find_complete: FindComplete, empty: OutputTree | None = None) -> Observation | None:
        """Read the folder, then what the script has reported; None if there is nothing to keep yet.

        In this order: what a script reports before it writes a file is known with that file.

        Args:
            empty: what counts as the folder's content if it cannot be read.
        """
        tree = await self._scan() or empty
        if tree is None:
            return None
        found = await find_complete(tree)
        return None if found is None else Observation(*found, await self._follower.read_ahead(self._rank))

    def _relative(self, paths: set[str]) -> set[str]:
        """Return the names in the output folder of those paths that lie in it."""
        folder = f"{os.path.realpath(self._outputs)}/"
        return {path.removeprefix(folder) for path in paths if path.startswith(folder)}

    async def _scan(self) -> OutputTree | None:
        try:
            tree = await run_in_thread(scan, self._outputs, self._settings.output_max_files)
        except (OutputLimitError, OSError) as error:
            self._note_refused(error)
            self._warn(str(error))
            return None
        if tree.refused:
            self._warn(
                f"{', '.join(sorted(tree.refused)[:3])}: a link out of the output folder, or to a folder, is not kept: "
                "copy the files"
            )
        return tree

    async def _keep_changes(self, find_complete: FindComplete) -> None:
        """Keep the folder if complete files differ from the last kept ones."""
        observed = await self._observe(find_complete)
        if observed is None:
            return
        tree, complete, kept = observed.tree, observed.complete, self._state.versions
        peers = self._peers.digests if self._peers is not None else {}
        changed = any(kept.get(name) != tree.versions[name] for name in complete) or peers != self._state.peer_digests
        all_complete = len(complete) == len(tree.versions)
        if not changed and not (all_complete and kept.keys() - tree.versions.keys()):
            if all_complete:
                self._state.unkept.pop("refused", None)
            return
        if not tree.versions and peers == self._state.peer_digests:
            return  # an emptied folder: the last kept state stays
        reported = observed.reported
        if reported.keeps:
            return  # it asked for this state while the folder was read: its request has the step
        await self._keep_tree(observed, None, reported.step, reported.epoch, reported.values)

    async def _keep_requested(self, max_waiting: int, find_complete: FindComplete) -> None:
        """Keep what the script asked for; leave the oldest out if it asks faster than the store takes it."""
        state = self._follower.state.ranks[self._rank]
        while state.keeps:
            line = state.keeps[0]
            if max_waiting and len(state.keeps) > max_waiting:
                self._state.requests += 1
                self._warn("checkpoints are requested faster than they can be kept: some are left out")
            else:
                is_busy = len(self._follower.state.snapshots) >= max_waiting or self._waits_for_peers()
                if (max_waiting and is_busy) or not await self._keep_request(line, find_complete):
                    return
            self._remove_request(line)
            state.keeps.pop(0)
            await self._follower.save()

    def _waits_for_peers(self) -> bool:
        """Whether other nodes are still to store what their scripts asked to keep at the same moment."""
        if self._peers is None:
            return False
        peers, number = self._peers, self._state.requests + 1
        behind = {node_id for node_id in peers.unfinished if peers.requests_of(node_id) < number}
        self._silent_nodes &= behind
        behind -= self._silent_nodes
        if not behind:
            self._waits_since = None
            return False
        now = time.monotonic()
        self._waits_since = self._waits_since or now
        have_asked = any(map(peers.requests_of, behind))
        limit_s = REQUEST_WAIT_S if have_asked else FIRST_REQUEST_WAIT_S
        # Later requests are not to be left out for nodes that may never ask.
        may_wait = have_asked or len(self._follower.state.ranks[self._rank].keeps) < MAX_WAITING
        if may_wait and now - self._waits_since < limit_s:
            return True
        self._silent_nodes |= behind
        self._waits_since = None
        return False

    async def _keep_request(self, line: KeepLine, find_complete: FindComplete) -> bool:
        """Keep what the script asked for; return False if that has to wait for the script's end."""
        source = self._outputs / line.path
        if not source.exists():
            self._warn(f"{line.path!r} cannot be kept: there is no such file or folder")
            return True
        observed = await self._observe(find_complete, OutputTree({}))
        if observed is None:
            return False
        self._state.requests += 1
        await self._keep_tree(observed, source, line.step, line.epoch or 0, line.metrics or {})
        return True

    def _remove_request(self, line: KeepLine) -> None:
        """Remove the copy that ``trainbus.checkpoint`` made; what another program named is its own."""
        source = Path(line.path)
        if source.is_absolute() and source.parent == (self._folder / "kept"):
            shutil.rmtree(source, ignore_errors=True)

    async def _keep_tree(
        self,
        observed: Observation,
        source: Path | None,
        step: int | None,
        epoch: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Copy the files into a tree, and give it to the stager.

        Args:
            observed: of files that are not complete the last kept copy stands.
            source: what the script asked to keep; None: the output folder is what is kept.
        """
        number = next_step(step, self._state.step)
        # At one moment: the listings may be replaced while the tree is written.
        digests = dict(self._peers.digests) if self._peers is not None else {}
        listings = self._peers.listings if self._peers is not None else ()
        self._state.artifacts = list(dict.fromkeys([*self.artifacts, *observed.reported.artifacts]))
        try:
            versions = await run_in_thread(self._write_tree, number, observed, source, listings)
        except (OutputLimitError, OSError, shutil.Error) as error:
            self._note_refused(error)
            self._warn(f"files are not kept: {error}")
            for leftover in (self._tree(number), self._packed(number)):
                await asyncio.to_thread(shutil.rmtree, leftover, True)
            return
        self._state.peer_digests = digests
        if versions is None:
            return
        old, self._state.tree = self._state.tree, str(self._tree(number))
        self._state.step, self._state.versions = number, versions
        self._state.epoch = max(epoch, self._state.epoch)
        self._state.is_requested = self._state.is_requested or source is not None
        self._follower.state.snapshots[number] = CheckpointLine(
            time=time.time(),
            folder=str(self._packed(number)),
            step=number,
            epoch=self._state.epoch,
            samples_consumed=observed.reported.samples_consumed,
            metrics=dict(metrics),
            step_is_count=number != step,
        )
        self._save()
        await self._follower.save()
        self._follower.news.set()
        if old is not None:
            await asyncio.to_thread(shutil.rmtree, old, True)

    def _note_refused(self, error: Exception) -> None:
        files = "the last files" if self._rank == 0 else f"the last files of node {self._node_id}"
        self._state.unkept["refused"] = f"{files} are not kept: {error}"

    def _write_tree(
        self, step: int, observed: Observation, source: Path | None, listings: Sequence[PeerListing]
    ) -> dict[str, FileVersion] | None:
        """Write the tree and its packed form; return the versions of the output folder's files in it.

        A tree of no files at all is None.
        """
        tree, complete = observed.tree, observed.complete
        target, packed = self._tree(step), self._packed(step)
        for leftover in (target, packed):
            shutil.rmtree(leftover, ignore_errors=True)
        self._check_size(tree, source)
        before = Path(self._state.tree) if self._state.tree is not None else None
        requested: dict[str, Path] = {}
        if source is not None:
            requested = _copy_requested(source, target / "requested", self._outputs)
        elif self._state.is_requested and before is not None:
            # The last requested checkpoint stays what it is; only the output folder has changed.
            requested = dict(_link_tree(before / "requested", target / "requested"))
        versions = dict(self._copy_outputs(tree, complete, before, target / "outputs"))
        laid_out = self._state.laid_out
        files = CopiedFiles(
            requested,
            {name: target / "outputs" / name for name in versions},
            asked_here=self._state.requests > 0,
            written=frozenset(name for name, version in versions.items() if version != laid_out.get(name)),
            deleted=frozenset(laid_out.keys() - versions.keys()),
        )
        if self._rank != 0:
            pack_node(files, self._node_rank, self._state.requests, packed)
        else:
            layout = KeptLayout(artifacts=tuple(self.artifacts), matches=observed.reported.matches_end)
            conflicts = pack_checkpoint(files, listings, layout, packed, self._check_limits)
            if conflicts is None:
                shutil.rmtree(target, ignore_errors=True)
                return None
            self._note_conflicts(conflicts)
        self._state.unkept.pop("refused", None)
        return versions

    def _note_conflicts(self, conflicts: Sequence[Conflict]) -> None:
        had_any = self._state.unkept.pop("conflicts", None) is not None
        if conflicts:
            self._state.unkept["conflicts"] = describe_conflicts(conflicts)
            if not had_any:
                self._warn(self._state.unkept["conflicts"])

    def _copy_outputs(
        self, tree: OutputTree, complete: set[str], before: Path | None, target: Path
    ) -> Iterable[tuple[str, FileVersion]]:
        """Yield what lies in ``target`` then: changed files that are complete are copied, of others the last copy is.

        While a file is incomplete, a file that was removed stays: the one may be about to replace the other. So do all
        files of a folder that is empty now.
        """
        kept = self._state.versions
        is_whole = bool(tree.versions) and complete == set(tree.versions)
        removed = set() if is_whole else kept.keys() - tree.versions.keys()
        for name in [*tree.versions, *sorted(removed)]:
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            version = tree.versions.get(name)
            changed = version is not None and version != kept.get(name) and name in complete
            if version is not None and changed and _copy_whole(self._outputs / name, copy, version):
                yield name, version
            elif name in kept and before is not None and (before / "outputs" / name).exists():
                os.link(before / "outputs" / name, copy)
                yield name, kept[name]

    def _check_size(self, tree: OutputTree, source: Path | None) -> None:
        kept = self._state.versions
        size = sum(version.size_bytes for version in tree.versions.values())
        new = sum(version.size_bytes for name, version in tree.versions.items() if kept.get(name) != version)
        if source is not None:
            asked = sum(path.stat().st_size for _, path in list_files(source)) if source.is_dir() else 0
            size, new = size + asked, new + asked
        self._check_limits(len(tree.versions), size)
        free = shutil.disk_usage(self._folder).free
        if new + FREE_BYTES > free:
            raise OutputLimitError(f"a copy of {new:,} bytes does not fit the node's disk, which has {free:,} free")

    def _check_limits(self, count: int, size_bytes: int, among: str = "") -> None:
        limit, max_files = self._settings.output_max_bytes, self._settings.output_max_files
        if size_bytes > limit:
            raise OutputLimitError(
                f"{among}they take {size_bytes:,} bytes, more than the limit of {limit:,}: remove old ones, or raise "
                "TRAINBUS_OUTPUT_MAX_BYTES"
            )
        if count > max_files:
            raise OutputLimitError(
                f"{among}they are {count:,} files, more than the limit of {max_files:,}: pack them into fewer, or "
                "raise TRAINBUS_OUTPUT_MAX_FILES"
            )

    def _tree(self, step: int) -> Path:
        return self._folder / "trees" / f"step_{step}"

    def _packed(self, step: int) -> Path:
        return self._folder / "checkpoints" / f"kept_{step}"

    def _save(self) -> None:
        write_if_space(self._path, self._state.model_dump_json())

    def _warn(self, text: str) -> None:
        """Write a problem into the run's own log, once."""
        if text in self._state.warnings:
            return
        self._state.warnings.append(text)
        self._save()
        write_to_log(self._folder, text, self._rank)


def describe_unkept(
    working_folder: Path | None, since: float, command: Sequence[str], origin: str | None, problems: Sequence[str]
) -> str:
    """Return what the author of a run that kept nothing should know: which files it wrote elsewhere, and what to do.

    Args:
        since: when the script was started, in seconds since the epoch.
        origin: the checkpoint of another run whose files it began with, RUN@STEP.
        problems: why files that it wrote where it should could not be kept.
    """
    written = []
    for name, path in list_files(working_folder) if working_folder is not None else ():
        if path.suffix != ".pyc" and path.stat().st_mtime >= since:
            written.append((path.stat().st_size, name))
    largest = sorted(written, reverse=True)[:MAX_NAMED_FILES]
    names = ", ".join(f"{name} ({size:,} bytes)" for size, name in largest)
    lost = f"; in its working folder, which is removed, it wrote {names}" if names else ""
    if problems:
        return f"{'; '.join(problems[:MAX_NAMED_PROBLEMS])}{lost}"
    if origin is not None and not names:
        return (
            f"the run wrote nothing new: it began with the files of {origin} and ran {shlex.join(command)!r}, which "
            "seems to have found its work done in them. Give it more to do by another --command or --env, or begin "
            "with an earlier checkpoint"
        )
    return (
        f"the run kept no file{lost}. Write into the folder that {OUTPUT_DIR_VARIABLE} names, or call "
        "trainbus.checkpoint(path)"
    )


def write_to_log(folder: Path, text: str, rank: int = 0) -> None:
    """Append a line of trainbus to a rank's output: its reader is the author of the script."""
    log.info("wrote to the run's output", text=text)
    with suppress_full_disk(), log_path(folder, rank).open("ab") as output:
        output.write(f"trainbus: {text}\n".encode())


def _copy_whole(source: Path, target: Path, version: FileVersion) -> bool:
    """Copy a file; return False, without a copy, if it changed meanwhile."""
    try:
        shutil.copyfile(source, target)
        found = source.stat()
    except FileNotFoundError:
        target.unlink(missing_ok=True)
        return False
    if _version(found) == version:
        return True
    target.unlink(missing_ok=True)
    return False


def _copy_requested(source: Path, target: Path, outputs: Path) -> dict[str, Path]:
    """Copy what a script asked to keep; return its files by name. Links out of it are left out."""
    target.mkdir(parents=True)
    if source.is_file():
        shutil.copyfile(source, target / source.name)
        return {source.name: target / source.name}
    found = {}
    for name in scan(source, 10**9).versions:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
        found[name] = copy
    return found


def _link_tree(source: Path, target: Path) -> Iterable[tuple[str, Path]]:
    for name, path in list_files(source):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)
        yield name, copy
