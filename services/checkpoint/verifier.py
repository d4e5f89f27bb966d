"""Whether the store holds what a checkpoint names. Bytes are read back only where the store cannot vouch for them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from contracts.events.checkpoint import CheckpointFile
from contracts.manifest import Blob
from services.checkpoint import metrics
from services.checkpoint.settings import CheckpointSettings
from services.kit.concurrency import run_ahead
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

#: (uri, etag) of blobs that were read back are remembered up to this many.
MAX_REMEMBERED = 100_000


class Verifier:
    """Compares blobs with their names.

    The agent sends each blob under its hash and the store checks it against the bytes that arrive
    (``x-amz-checksum-sha256``), so a blob whose recorded hash is its name needs no reading. Where a store keeps no
    such hash, or another program wrote the object without one, it is read back and hashed, once for each ETag.
    """

    def __init__(self, objects: ObjectStore, settings: CheckpointSettings) -> None:
        self._objects, self._settings = objects, settings
        self._slots = asyncio.Semaphore(settings.checkpoint_verify_parallel)
        self._verified: set[tuple[str, str]] = set()

    async def problem(self, blobs: Mapping[Blob, str]) -> str:
        """The first thing wrong with blobs of files (blob -> the file's path), in words; '' if they are there."""
        checks = (self._blob(path, blob) for blob, path in blobs.items())
        # Not all of them as tasks at once: a terabyte is more than a hundred thousand blobs.
        async with aclosing(run_ahead(checks, limit=self._settings.checkpoint_verify_parallel)) as problems:
            async for problem in problems:
                if problem:
                    return problem
        return ""

    async def _blob(self, path: str, blob: Blob) -> str:
        async with self._slots:
            try:
                info = await self._objects.head(blob.uri)
                if info.size_bytes != blob.size_bytes:
                    return f"{path!r} has {info.size_bytes} bytes in the store, {blob.size_bytes} were announced"
                known = (blob.uri, info.etag)
                digest = info.sha256
                if not digest:
                    if info.size_bytes > self._settings.checkpoint_verify_bytes or known in self._verified:
                        return ""
                    digest = await self._objects.hash(blob.uri)
                    metrics.VERIFIED_BYTES.inc(info.size_bytes)
            except ObjectNotFound:
                return f"{path!r} is not in the store: {blob.uri} is missing"
            if digest != blob.sha256:
                return f"{path!r} is corrupt in the store: its hash is {digest}, {blob.sha256} was announced"
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.clear()
            self._verified.add(known)
            return ""

    async def contents(self, files: Sequence[CheckpointFile]) -> dict[str, bytes] | str:
        """The bytes of small plain files by their path, or what is wrong with one, in words."""
        found: dict[str, bytes] = {}
        for file in files:
            try:
                content = b"".join([await self._objects.get(chunk.uri) for chunk in file.chunks])
            except ObjectNotFound as error:
                return f"{file.path!r} is not in the store: {error} is missing"
            if hashlib.sha256(content).hexdigest() != file.sha256:
                return f"{file.path!r} is corrupt in the store: its hash is not {file.sha256}"
            found[file.path] = content
        return found
