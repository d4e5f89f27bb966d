"""Which pieces are worth to be told as a difference to the checkpoint before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.events.checkpoint import Chunk

#: A difference must save so much of the piece: less is not worth what decoding costs whoever restores.
WORTH = 0.85
#: Smaller pieces cost a request either way.
LEAST_BYTES = 64 * 2**10
#: Packed first, to see whether the rest is worth packing.
SAMPLE_BYTES = 512 * 2**10


@dataclass(frozen=True, slots=True)
class DeltaBases:
    """What a committed checkpoint has for each part of the state."""

    step: int = -1
    pieces: Mapping[str, Chunk] = field(default_factory=dict)

    def of(self, key: str, size_bytes: int, sha256: str, *, most_depth: int) -> Chunk | None:
        """The piece to tell a difference from; None: store it whole."""
        base = self.pieces.get(key) if key else None
        if base is None or base.size_bytes != size_bytes or base.sha256 == sha256 or size_bytes < LEAST_BYTES:
            return None
        return base if _depth(base) < most_depth else None


def is_worth(difference_bytes: int, piece_bytes: int) -> bool:
    return difference_bytes < WORTH * piece_bytes


def _depth(chunk: Chunk) -> int:
    return 0 if chunk.base is None else 1 + _depth(chunk.base)
