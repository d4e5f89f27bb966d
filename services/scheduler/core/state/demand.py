"""What one slot of a run takes from the node on which it lies."""

from __future__ import annotations

import math
from typing import NamedTuple

from contracts.events.train import TrainRequested

#: Thousandths in one whole accelerator.
WHOLE = 1000


class Demand(NamedTuple):
    """Hashable, so that runs with the same needs share what has been found out about them."""

    #: Thousandths of one accelerator; 0: the slot needs none.
    milli: int = WHOLE
    cpu_milli: int = 0
    memory_bytes: int = 0
    #: Kinds of accelerator that will do; empty: any.
    accelerators: frozenset[str] = frozenset()
    #: MIG profile of the slot; '': a whole accelerator, or a share of one.
    profile: str = ""
    #: So many slots lie on one node; and each bundle on a node of its own, or not.
    bundle: int = 1
    apart: bool = False

    @property
    def simple(self) -> bool:
        """Whether any free slot is as good as any other, so that counting them tells what fits."""
        return self == Demand()


SIMPLE = Demand()


def demand_of(spec: TrainRequested) -> Demand:
    """The needs of one slot of this run."""
    needs, gang = spec.resources, spec.gang
    demand = Demand(
        milli=math.ceil(needs.share * WHOLE),
        cpu_milli=math.ceil(needs.cpus * 1000),
        memory_bytes=needs.memory_bytes,
        accelerators=frozenset(needs.accelerators),
        profile=needs.mig_profile or "",
        bundle=gang.bundle,
        apart=gang.apart,
    )
    return SIMPLE if demand == SIMPLE else demand
