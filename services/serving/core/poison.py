"""Inputs on which a model's process ended: they are not given to it again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from contracts.model_process import Sample

#: Inputs that are remembered of each version.
MAX_INPUTS = 1000


def digest_samples(samples: Sequence[Sample]) -> bytes:
    """Return the digest of a request's samples."""
    found = hashlib.blake2b(digest_size=16)
    for sample in samples:
        for name, content in sample.items():
            for part in (name.encode(), content):
                found.update(len(part).to_bytes(8, "little"))
                found.update(part)
        found.update(b"\xff" * 8)
    return found.digest()


class PoisonedInputs:
    """The newest inputs on which a process ended."""

    def __init__(self, max_inputs: int = MAX_INPUTS) -> None:
        self._max_inputs = max_inputs
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, samples: Sequence[Sample]) -> None:
        """Remember the samples of a request; forget the oldest ones beyond the bound."""
        self._digests[digest_samples(samples)] = None
        while len(self._digests) > self._max_inputs:
            self._digests.popitem(last=False)

    def __contains__(self, samples: Sequence[Sample]) -> bool:
        return bool(self._digests) and digest_samples(samples) in self._digests
