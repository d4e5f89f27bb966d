"""Which blobs the store has, as far as this node has seen: what is known need not be asked again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import datetime

from services.kit.store.objects import is_young

#: Blobs remembered, about 100 bytes each; of a run that holds more, the oldest are asked for again.
MOST = 200_000


class KnownBlobs:
    """Blobs with the time when they were last written, which garbage collection goes by.

    What is here and young is safe to rely upon: garbage collection spares what is younger than its grace, which is
    longer. Whoever learns that the store is not as was thought says ``forget`` or ``distrust``.
    """

    def __init__(self) -> None:
        self._written_at: OrderedDict[str, datetime] = OrderedDict()
        self._distrusted: set[str] = set()

    def has(self, sha256: str) -> bool:
        """Whether an upload may rely on the blob."""
        written_at = self._written_at.get(sha256)
        return written_at is not None and is_young(written_at)

    def distrusts(self, sha256: str) -> bool:
        """Whether the blob must be written anew, whatever the store says of it."""
        return sha256 in self._distrusted

    def add(self, sha256: str, written_at: datetime) -> None:
        self._distrusted.discard(sha256)
        self._written_at[sha256] = written_at
        self._written_at.move_to_end(sha256)
        while len(self._written_at) > MOST:
            self._written_at.popitem(last=False)

    def distrust(self, blobs: Iterable[str]) -> None:
        for sha256 in blobs:
            self._written_at.pop(sha256, None)
            self._distrusted.add(sha256)

    def forget(self) -> None:
        self._written_at.clear()
