"""What runs ask of one node, counted over those submitted so far: what is left of a node is worth what they can use.

Folded like everything else, so that a replay sees at each time what was known then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from services.scheduler.core.state.slot_spec import SlotSpec

#: Slots of the largest piece in which a divisible gang is counted.
LARGEST_PIECE = 8
#: How many shapes stand for all: more of them place no better (measured on the openb traces), only slower.
TYPICAL = 60
#: After this many submissions all counts are halved: old submissions matter less and less.
WINDOW = 20_000
#: Share of the workload that must change before the typical shapes are computed again.
DRIFT = 0.1
#: Weights add up to about this. They are whole numbers, so that equal scores are equal to the bit.
PARTS = 1_000_000
#: Shapes are alike when they take about as much; of their processors a difference matters less.
PROCESSOR_WEIGHT = 1 / 160


class Shape(NamedTuple):
    """What a bundle of a gang takes from one node."""

    accelerators: int
    #: Thousandths of each of them; 1000 is a whole one.
    milli: int
    cpu_milli: int
    memory_bytes: int
    #: Kinds of accelerator that will do; empty: any.
    models: frozenset[str] = frozenset()
    #: MIG profile; '': none.
    profile: str = ""

    @property
    def milli_total(self) -> int:
        return self.accelerators * self.milli


def shape_of(slot_spec: SlotSpec, slots: int) -> Shape:
    """The shape of ``slots`` slots on one node."""
    return Shape(
        accelerators=slots if slot_spec.milli else 0,
        milli=slot_spec.milli,
        cpu_milli=slots * slot_spec.cpu_milli,
        memory_bytes=slots * slot_spec.memory_bytes,
        models=slot_spec.accelerators,
        profile=slot_spec.profile,
    )


def piece_of(slot_spec: SlotSpec, slots: int) -> Shape:
    """Return the shape in which a gang of ``slots`` slots reaches most nodes: its bundle, or as much as fits on one."""
    whole = slot_spec.bundle > 1 or slot_spec.one_bundle_per_node
    return shape_of(slot_spec, slot_spec.bundle if whole else min(slots, LARGEST_PIECE))


@dataclass(slots=True)
class Workload:
    """How often each shape was submitted, and which of them stand for all."""

    counts: dict[Shape, int] = field(default_factory=dict)
    total: int = 0
    #: Typical shapes with their weights. The tuple is replaced as a whole, so that caches can compare
    #: its identity.
    typical: tuple[tuple[Shape, int], ...] = ()
    #: The counts that ``typical`` was made from.
    basis: dict[Shape, int] = field(default_factory=dict)
    #: The total at which ``typical`` is checked again.
    update_at: int = 1

    def add(self, shape: Shape) -> None:
        """Count a submission. Shapes without accelerators do not fragment them."""
        if not shape.accelerators:
            return
        self.counts[shape] = self.counts.get(shape, 0) + 1
        self.total += 1
        if self.total >= self.update_at:
            self._update_typical()

    def _update_typical(self) -> None:
        if self.total >= WINDOW:
            self.counts = {shape: count // 2 for shape, count in self.counts.items() if count > 1}
            self.total = sum(self.counts.values())
        self.update_at = min(self.total + max(self.total // 4, 8), WINDOW)
        if self.drift() > DRIFT:
            self.basis = dict(self.counts)
            self.typical = typical_of(self.counts)

    def drift(self) -> float:
        """Which share of the workload has become different since ``typical`` was found: 0 to 1."""
        before, now = sum(self.basis.values()), self.total
        if not before or not now:
            return 1.0 if before or now else 0.0
        shapes = self.basis.keys() | self.counts.keys()
        moved = sum(abs(self.counts.get(each, 0) * before - self.basis.get(each, 0) * now) for each in shapes)
        return moved / (2 * before * now)

    def to_state(self) -> dict[str, Any]:
        """Everything in it, for a snapshot; JSON."""
        return {
            "counts": [[_plain(shape), count] for shape, count in self.counts.items()],
            "total": self.total,
            "typical": [[_plain(shape), weight] for shape, weight in self.typical],
            "basis": [[_plain(shape), count] for shape, count in self.basis.items()],
            "update_at": self.update_at,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """The workload that ``to_state`` gave this of."""
        return cls(
            counts={_shape(plain): count for plain, count in state["counts"]},
            total=state["total"],
            typical=tuple((_shape(plain), weight) for plain, weight in state["typical"]),
            basis={_shape(plain): count for plain, count in state["basis"]},
            update_at=state["update_at"],
        )


def typical_of(counts: dict[Shape, int]) -> tuple[tuple[Shape, int], ...]:
    """The shapes that ask for most, all in all, each with the share of those that are most like it."""
    ranked = sorted(counts, key=lambda shape: (-counts[shape] * shape.milli_total, _sortable(shape)))
    kept, rest = ranked[:TYPICAL], ranked[TYPICAL:]
    totals = {shape: counts[shape] for shape in kept}
    for shape in rest:
        alike = [each for each in kept if (each.models, each.profile) == (shape.models, shape.profile)]
        if alike:
            totals[min(alike, key=lambda each: _unlike(each, shape))] += counts[shape]
    total = sum(totals.values())
    return tuple((shape, max(count * PARTS // total, 1)) for shape, count in totals.items())


def _unlike(one: Shape, other: Shape) -> float:
    cpu = abs(one.cpu_milli / one.accelerators - other.cpu_milli / other.accelerators)
    return abs(one.milli_total - other.milli_total) + cpu * PROCESSOR_WEIGHT


def _sortable(shape: Shape) -> tuple[Any, ...]:
    return (*shape[:4], sorted(shape.models), shape.profile)


def _plain(shape: Shape) -> list[Any]:
    return list(_sortable(shape))


def _shape(plain: list[Any]) -> Shape:
    accelerators, milli, cpu_milli, memory_bytes, models, profile = plain
    return Shape(accelerators, milli, cpu_milli, memory_bytes, frozenset(models), profile)
