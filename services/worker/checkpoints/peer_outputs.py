"""The output folders of a generation's other nodes, for the agent of rank 0, which adds them to its checkpoints.

Each other agent stores its files by content, a list of them, and the list's address in the bucket OUTPUTS. Here the
lists are followed and kept on disk: a restarted agent makes no checkpoint without what earlier ones had.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from contracts import subjects, topology
from contracts.events.node import NodeLost
from contracts.events.run import Member, RunExited, RunPlaced, RunReleased
from contracts.manifest import MAX_LISTING_BYTES
from contracts.node_outputs import NodeOutputs, NodeOutputsRef
from services.kit.messages import TransientError
from services.kit.store.errors import ObjectCorrupted, ObjectNotFound
from services.kit.store.uris import blob_key
from services.worker.checkpoints.uploader import CheckpointUploader
from services.worker.core.output_merge import PeerListing
from services.worker.core.rank_environment import node_rank_of
from services.worker.local_files import write_if_space
from services.worker.node_context import NodeContext

log = structlog.get_logger(__name__)

#: Seconds between two looks at the bus where nothing comes from it.
IDLE_S = 1.0
#: Seconds after which the blobs of the lists are renewed: garbage collection spares them for 48 hours.
RENEW_S = 6 * 3600.0
#: Seconds that the last list of a node may come after its report.
LATE_LISTING_S = 5.0


class _Known(BaseModel):
    """``peers/<node>.json``: the newest listing of a node that could be read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ref: NodeOutputsRef
    outputs: NodeOutputs = NodeOutputs()


class PeerOutputs:
    """The newest listings of the other nodes of one generation."""

    def __init__(self, context: NodeContext, placed: RunPlaced, member: Member, folder: Path) -> None:
        """Begin with what an earlier life of this agent knew. ``folder``: of the generation."""
        self._context, self._placed = context, placed
        self._folder = folder / "peers"
        peers = [each for each in placed.members if each.ranks and each != member]
        self._node_ranks = {each.node_id: node_rank_of(placed, each) for each in peers}
        self.node_ids = tuple(self._node_ranks)
        self._known: dict[str, _Known] = {}
        self._pending: dict[str, NodeOutputsRef] = {}
        self._changed = asyncio.Event()
        self._renewed_at = time.monotonic()
        for node_id in self.node_ids:
            path = self._folder / f"{node_id}.json"
            if path.is_file():
                self._known[node_id] = _Known.model_validate_json(path.read_bytes())

    @property
    def listings(self) -> tuple[PeerListing, ...]:
        """The listings of the nodes that have written anything, in the order of their ranks."""
        has_any = {node_id: each.outputs for node_id, each in self._known.items() if each.outputs != NodeOutputs()}
        found = [PeerListing(node_id, self._node_ranks[node_id], outputs) for node_id, outputs in has_any.items()]
        return tuple(sorted(found, key=lambda each: each.node_rank))

    @property
    def digests(self) -> dict[str, str]:
        """Node -> hash of its listing: what changes with any of its files."""
        return {node_id: each.ref.listing.sha256 for node_id, each in self._known.items() if each.ref.listing}

    @property
    def unfinished(self) -> set[str]:
        """The nodes whose last listing is not here."""
        return {node_id for node_id in self.node_ids if not self._is_final(node_id)}

    def requests_of(self, node_id: str) -> int:
        """Return how many of its script's requests to keep something the listing of a node is beyond."""
        return self._known[node_id].ref.requests if node_id in self._known else 0

    async def follow(self) -> None:
        """Follow the listings until cancelled."""
        pattern = f"{self._placed.run_id}.{self._placed.generation}.*"
        async for entries in self._context.bus.follow_bucket(topology.OUTPUTS, pattern, idle_s=IDLE_S):
            for entry in entries:
                self._note(entry.value)
            for node_id, ref in list(self._pending.items()):
                if await self._read(ref):
                    del self._pending[node_id]
            if time.monotonic() - self._renewed_at > RENEW_S:
                await self._renew()

    async def wait_until_final(self) -> None:
        """Wait until each node's last listing is here, except of nodes that are lost or have ended without one."""
        ended_since: dict[str, float] = {}
        while self.unfinished:
            now = time.monotonic()
            try:
                for node_id in await self._reported_nodes():
                    ended_since.setdefault(node_id, now)
                late = {node_id for node_id, since in ended_since.items() if now - since > LATE_LISTING_S}
                if self.unfinished <= late | await self._lost_nodes():
                    return
            except TransientError as error:
                log.warning("whether other nodes have ended is unknown", error=str(error))
            self._changed.clear()
            if self.unfinished:
                await _wait_for(self._changed, IDLE_S)

    def _is_final(self, node_id: str) -> bool:
        return node_id in self._known and self._known[node_id].ref.is_final

    def _note(self, value: bytes | None) -> None:
        if value is None:
            return
        try:
            ref = NodeOutputsRef.model_validate_json(value)
        except ValidationError as error:
            log.warning("what a node says of its output folder cannot be read", error=str(error))
            return
        if ref.node_id in self.node_ids:
            self._pending[ref.node_id] = ref

    async def _read(self, ref: NodeOutputsRef) -> bool:
        """Read a listing; return False if the store does not give it now."""
        known, outputs = self._known.get(ref.node_id), NodeOutputs()
        if ref.listing is not None:
            if known is not None and known.ref.listing == ref.listing:
                outputs = known.outputs
            else:
                try:
                    outputs = await self._read_outputs(ref)
                except TransientError as error:
                    log.warning("the list of a node's files does not come", node=ref.node_id, error=str(error))
                    return False
                except (ObjectNotFound, ObjectCorrupted, ValueError) as error:
                    # The one before stays what is known of the node.
                    log.error("the list of a node's files cannot be used", node=ref.node_id, error=str(error))
                    return True
        self._known[ref.node_id] = _Known(ref=ref, outputs=outputs)
        path = self._folder / f"{ref.node_id}.json"
        await asyncio.to_thread(write_if_space, path, self._known[ref.node_id].model_dump_json(exclude_defaults=True))
        self._changed.set()
        return True

    async def _read_outputs(self, ref: NodeOutputsRef) -> NodeOutputs:
        listing = ref.listing
        assert listing is not None
        if listing.size_bytes > MAX_LISTING_BYTES:
            raise ValueError(f"it has {listing.size_bytes:,} bytes, more than the {MAX_LISTING_BYTES:,} that are read")
        if listing.uri != f"s3://{self._context.settings.bucket_models}/{blob_key(listing.sha256)}":
            raise ValueError(f"it must be a blob by its hash, not {listing.uri}")
        content = await self._context.objects.get(listing.uri, size_bytes=listing.size_bytes)
        return await asyncio.to_thread(_parse, content, listing.sha256)

    async def _renew(self) -> None:
        """Keep garbage collection from what the listings name: a node that has ended does not do so itself."""
        self._renewed_at = time.monotonic()
        context = self._context
        uploader = CheckpointUploader(
            context.objects, context.settings.bucket_models, context.cache, context.known_blobs
        )
        try:
            await uploader.renew([file for each in self.listings for file in each.outputs.files])
        except (TransientError, ValueError) as error:
            log.warning("files of other nodes are not renewed yet", error=str(error))
            self._renewed_at -= RENEW_S - 60

    async def _lost_nodes(self) -> set[str]:
        found = set()
        for node_id in self.unfinished:
            lost = await self._context.bus.get_last_message(subjects.fact("node", node_id, NodeLost.fact))
            if lost is not None and lost.sequence > self._placed.decided_at_sequence:
                found.add(node_id)
        return found

    async def _reported_nodes(self) -> set[str]:
        """Return the nodes that have reported the end of this generation."""
        found = set()
        for kind in (RunExited, RunReleased):
            for message in await self._context.bus.read_history(subjects.fact("run", self._placed.run_id, kind.fact)):
                end = message.event
                if isinstance(end, RunExited | RunReleased) and end.generation == self._placed.generation:
                    found.add(end.node_id)
        return found


def describe_unfinished(node_ids: Iterable[str]) -> str:
    """Return what is told of nodes whose last files did not come."""
    return (
        f"what the script wrote last on {', '.join(sorted(node_ids))} did not arrive before the end: of it the "
        "files that came before are kept"
    )


def _parse(content: bytes, sha256: str) -> NodeOutputs:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ObjectCorrupted(f"the store has another list than {sha256}")
    return NodeOutputs.model_validate_json(content)


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
