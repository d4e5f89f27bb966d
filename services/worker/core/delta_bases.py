"""Which chunks are stored as a difference to the last committed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.events.checkpoint import Chunk

#: The largest difference, as a part of its chunk: decoding it at a restore costs more than a larger one saves.
MAX_DELTA_SHARE = 0.85
#: Smaller chunks cost a request either way.
MIN_DELTA_BYTES = 64 * 2**10
#: Bytes that are compressed first, to see whether the rest is worth it.
SAMPLE_BYTES = 512 * 2**10


@dataclass(frozen=True, slots=True)
class DeltaBases:
    """The chunks of a committed checkpoint, by the part of the state that they hold."""

    step: int = -1
    chunks: Mapping[str, Chunk] = field(default_factory=dict)

    def find(self, key: str, size_bytes: int, sha256: str, *, max_depth: int) -> Chunk | None:
        """Return the chunk to store a difference to; None: store the new one whole."""
        base = self.chunks.get(key) if key else None
        if base is None or base.size_bytes != size_bytes or base.sha256 == sha256 or size_bytes < MIN_DELTA_BYTES:
            return None
        return base if _depth(base) < max_depth else None


def is_worthwhile(delta_bytes: int, chunk_bytes: int) -> bool:
    return delta_bytes < MAX_DELTA_SHARE * chunk_bytes


def _depth(chunk: Chunk) -> int:
    return 0 if chunk.base is None else 1 + _depth(chunk.base)
