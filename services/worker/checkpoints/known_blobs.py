"""The blobs that this node knows to be in the store, so that uploads need not ask for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import datetime

from services.kit.store.objects import is_young

#: Blobs remembered, about 100 bytes each. The oldest of more are asked for again.
MAX_BLOBS = 200_000


class KnownBlobs:
    """Blobs with the time at which the store last wrote them.

    An upload may rely on a young blob: garbage collection spares blobs for longer. ``clear`` and ``distrust`` are
    called when the store turns out to lack blobs, or to have corrupted ones.
    """

    def __init__(self) -> None:
        self._written_at: OrderedDict[str, datetime] = OrderedDict()
        self._distrusted: set[str] = set()

    def has(self, sha256: str) -> bool:
        """Whether an upload may rely on the blob."""
        written_at = self._written_at.get(sha256)
        return written_at is not None and is_young(written_at)

    def is_distrusted(self, sha256: str) -> bool:
        """Whether the blob must be written again, even if the store has it."""
        return sha256 in self._distrusted

    def add(self, sha256: str, written_at: datetime) -> None:
        """Note that the store has a blob."""
        self._distrusted.discard(sha256)
        self._written_at[sha256] = written_at
        self._written_at.move_to_end(sha256)
        while len(self._written_at) > MAX_BLOBS:
            self._written_at.popitem(last=False)

    def distrust(self, blobs: Iterable[str]) -> None:
        """Note that the store has corrupted blobs."""
        for sha256 in blobs:
            self._written_at.pop(sha256, None)
            self._distrusted.add(sha256)

    def clear(self) -> None:
        """Know nothing of the store any more."""
        self._written_at.clear()
