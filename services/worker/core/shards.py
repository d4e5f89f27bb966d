"""Which shard of a dataset is fetched next, and which one goes: by when the ranks of this node need them.

What is needed last goes first (L. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 1966): ranks say what they will read, so that the future need not be guessed. What nobody has announced
goes before all that is announced, oldest use first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

#: Samples a second of a rank that has not said how fast it is.
NOMINAL_PER_S = 1000.0
#: Seconds until something is needed that is worth having here though nobody said that it will be.
SOMETIME_S = 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's way through a split."""

    #: Position, in samples of the run, that it loads now; and how many it gets on in a second, 0: not known.
    at: int
    per_s: float
    #: (shard, first and last position that needs it), by first.
    needs: tuple[tuple[int, int, int], ...]

    def dues(self) -> Iterator[tuple[int, float]]:
        """Each need that lies ahead: the shard, and the seconds until it is needed."""
        per_s = self.per_s or NOMINAL_PER_S
        for shard, first, last in self.needs:
            if last >= self.at:
                yield shard, max(0, first - self.at) / per_s


def earliest(dues: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The first need of each."""
    found: dict[str, float] = {}
    for sha256, due_s in dues:
        if due_s < found.get(sha256, float("inf")):
            found[sha256] = due_s
    return found


@dataclass(frozen=True, slots=True)
class Present:
    """A shard that is here."""

    size_bytes: int
    #: When it came or was asked for last.
    used_s: float


def victims(
    present: Mapping[str, Present],
    dues: Mapping[str, float],
    spared: Collection[str],
    over_bytes: int,
    due_s: float,
    ahead_s: float = float("inf"),
) -> list[str]:
    """What has to go to free ``over_bytes`` for a shard that is needed in ``due_s``; as much as may go, if less.

    What is needed before it, or at the same time, stays. What is needed at all stays as long as the shard is not
    needed within ``ahead_s``: by then something better to lose may have been used for the last time (P. Cao et al.,
    "A Study of Integrated Prefetching and Caching Strategies", SIGMETRICS 1995).
    """
    kept_s = due_s if due_s <= ahead_s else SOMETIME_S
    candidates = [
        (-dues.get(sha256, float("inf")), each.used_s, sha256)
        for sha256, each in present.items()
        if sha256 not in spared and dues.get(sha256, float("inf")) > kept_s
    ]
    chosen: list[str] = []
    for _, _, sha256 in sorted(candidates):
        if over_bytes <= 0:
            break
        chosen.append(sha256)
        over_bytes -= present[sha256].size_bytes
    return chosen
