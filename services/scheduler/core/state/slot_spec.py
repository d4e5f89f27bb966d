"""What one slot of a run takes from the node on which it lies."""

from __future__ import annotations

import math
from typing import NamedTuple

from contracts.spec.run import RunSpec

#: Thousandths in one whole accelerator.
SLOT_MILLI = 1000


class SlotSpec(NamedTuple):
    """Hashable, so that runs with the same needs share what has been found out about them."""

    #: Thousandths of one accelerator; 0: the slot needs none.
    milli: int = SLOT_MILLI
    cpu_milli: int = 0
    memory_bytes: int = 0
    #: Kinds of accelerator that will do; empty: any.
    accelerators: frozenset[str] = frozenset()
    #: MIG profile of the slot; '': a whole accelerator, or a share of one.
    profile: str = ""
    #: Slots that must lie on one node; and whether each bundle needs a node of its own.
    bundle: int = 1
    one_bundle_per_node: bool = False

    @property
    def simple(self) -> bool:
        """Whether any free slot is as good as any other, so that counting them tells what fits."""
        return self == SlotSpec()


SIMPLE = SlotSpec()


def slot_spec_of(spec: RunSpec) -> SlotSpec:
    """The needs of one slot of this run."""
    needs, gang = spec.resources, spec.gang
    slot_spec = SlotSpec(
        milli=math.ceil(needs.share * SLOT_MILLI),
        cpu_milli=math.ceil(needs.cpus * 1000),
        memory_bytes=needs.memory_bytes,
        accelerators=frozenset(needs.accelerators),
        profile=needs.mig_profile or "",
        bundle=gang.bundle,
        one_bundle_per_node=gang.apart,
    )
    return SIMPLE if slot_spec == SIMPLE else slot_spec
