"""The files of a checkpoint, read from the object store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contracts.events.checkpoint import CheckpointFile
from contracts.spec.run import Code
from services.kit.chunks import restore_file
from services.kit.store.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A ``ModelSource`` of services: they read the object store themselves."""

    objects: ObjectStore

    async def write_file(self, file: CheckpointFile, target: Path) -> None:
        await restore_file(self.objects, file, target)

    async def write_code(self, run_id: str, code: Code, target: Path) -> None:
        await self.objects.download(code.uri, target)
