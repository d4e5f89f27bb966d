"""Nodes of an embedded stack: a file for each says that it shall be there, and the stack's supervisor makes it so."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from contracts.scheduling import Pool
from services.autoscaler.adapters import labels_of
from services.autoscaler.core.decide import Machine


class LocalAdapter:
    """Starts and stops worker nodes beside itself. The files outlive it, so that its end ends no node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def nodes(self, pool: Pool) -> list[Machine]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            content = json.loads(path.read_bytes())
            if content["labels"]["pool"] == pool.name:
                found.append(Machine(path.stem, datetime.fromisoformat(content["started_at"])))
        return found

    async def start(self, pool: Pool, count: int) -> list[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {
            "slots": pool.slots_per_node,
            "labels": labels_of(pool),
            "started_at": datetime.now(UTC).isoformat(),
        }
        started: list[str] = []
        number = 0
        while len(started) < count:
            path = self._folder / f"{pool.name}-{number}.json"
            number += 1
            if path.exists():
                continue
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            os.replace(partial, path)
            started.append(path.stem)
        return started

    async def stop(self, pool: Pool, node_ids: Sequence[str]) -> None:
        for node_id in node_ids:
            (self._folder / f"{node_id}.json").unlink(missing_ok=True)
