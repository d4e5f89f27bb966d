"""How sure a difference between two models is: statistics of scores that are paired by their samples. Pure.

numpy is imported when the first comparison is made: a service that waits should be small.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

#: Confidence of the gate and of the intervals that a report shows, where the model's gates name none.
DEFAULT_CONFIDENCE = 0.95
RESAMPLES = 4000
#: Differences with at most so many distinct values are resampled by their counts, whatever the number of samples.
MAX_DISTINCT = 512
#: More samples than this are first summed in as many random groups of one size.
MAX_GROUPS = 10_000
#: Values that are drawn at once.
DRAWN_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """How much better the candidate's score is than the champion's in the mean, over the same samples."""

    mean: float
    #: The lower and the upper end of the one-sided intervals at ``confidence``.
    low: float
    high: float
    confidence: float
    samples: int
    better: int
    worse: int
    #: How often two equal models differ by as much in favour of the candidate (sign-flip test).
    p_value: float


def seed_for(*names: str) -> int:
    """Return the seed of a comparison: the same runs give the same intervals."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big")


def compare_paired(differences: Floats, confidence: float, seed: int) -> PairedDifference:
    """Return the mean of paired differences with its percentile bootstrap interval.

    The bootstrap (Efron 1979) resamples whole samples, so that what makes a sample hard for both models cancels out.
    The sign-flip test is exact for two equal models at any number of samples, where percentiles are a little too
    narrow for few or skewed ones.
    """
    import numpy as np

    values = np.asarray(differences, np.float64)
    if not len(values):
        raise ValueError("there is no sample to compare")
    random = np.random.default_rng(seed)
    means = resample_means(values, random)
    low, high = np.quantile(means, (1 - confidence, confidence))
    return PairedDifference(
        mean=float(values.mean()),
        low=float(low),
        high=float(high),
        confidence=confidence,
        samples=len(values),
        better=int((values > 0).sum()),
        worse=int((values < 0).sum()),
        p_value=flip_signs(values, random),
    )


def resample_means(values: Floats, random: Any, resamples: int = RESAMPLES) -> Floats:
    """Return the means of ``resamples`` bootstrap samples of n values."""
    import numpy as np

    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= MAX_DISTINCT:
        drawn = random.multinomial(len(values), counts / len(values), size=resamples)
        return np.asarray(drawn @ distinct / len(values))
    groups = _sum_groups(values, random)
    n = len(groups)
    means = np.empty(resamples)
    step = max(1, DRAWN_AT_ONCE // n)
    for start in range(0, resamples, step):
        chosen = random.integers(0, n, (min(step, resamples - start), n))
        means[start : start + step] = groups[chosen].mean(axis=1)
    return means


def flip_signs(values: Floats, random: Any, resamples: int = RESAMPLES) -> float:
    """Return how likely two equal models differ by the mean of ``values`` or more: one-sided, never 0.

    If the models are equal, each difference has either sign with the same probability (Fisher's randomization test).
    """
    import numpy as np

    size, counts = np.unique(np.abs(values), return_counts=True)
    if len(size) <= MAX_DISTINCT:
        sums = (2 * random.binomial(counts, 0.5, (resamples, len(size))) - counts) @ size
        observed = values.sum()
    else:
        groups = _sum_groups(values, random)
        n = len(groups)
        sums = np.empty(resamples)
        step = max(1, DRAWN_AT_ONCE // n)
        for start in range(0, resamples, step):
            signs = random.integers(0, 2, (min(step, resamples - start), n), dtype=np.int8)
            sums[start : start + step] = (2.0 * signs - 1) @ groups
        observed = groups.sum()
    # Sums of the same values in another order differ in their last bits.
    slack = 1e-9 * float(np.abs(values).sum()) / max(len(values), 1)
    return float((1 + (sums >= observed - slack).sum()) / (1 + resamples))


def _sum_groups(values: Floats, random: Any) -> Floats:
    """Return at most ``MAX_GROUPS`` means of random groups of one size; what is left over is dropped at random."""
    size = -(-len(values) // MAX_GROUPS)
    if size == 1:
        return values
    whole = len(values) // size * size
    grouped: Floats = random.permutation(values)[:whole].reshape(-1, size).mean(axis=1)
    return grouped
