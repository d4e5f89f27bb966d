"""Whether a version that answers users does worse than the one before: by errors, latency and memory.

Inputs differ from minute to minute, so errors count only in pairs: the version fails on an input, or refuses it, and
the version before answers the same one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

#: Latencies that are kept of each version.
WINDOW = 2000


@dataclass(slots=True)
class RequestTally:
    """What became of the requests to one version."""

    answered: int = 0
    #: Errors of the model itself: exceptions, timeouts, crashes.
    errors: int = 0
    #: Requests whose input the model's code did not take.
    refused: int = 0
    last_error: str = ""
    #: Of the requests that it failed on or refused: those that the version before was asked, and answered.
    compared: int = 0
    worse: int = 0
    #: Of these, the ones on which its process ended.
    worse_ends: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    #: Samples of the largest request that it answered.
    largest_request: int = 0
    #: What a full batch took at the warm-up; None: it had no samples.
    full_batch_s: float | None = None
    #: Resident bytes when it was loaded, and now.
    loaded_bytes: int = 0
    resident_bytes: int = 0

    @property
    def total(self) -> int:
        return self.answered + self.errors + self.refused

    def percentile_s(self, share: float) -> float:
        """Return a percentile of the latencies; 0 where there are none."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """From when on a version is taken back."""

    #: Requests that the version before would have answered.
    max_error_share: float = 0.02
    #: Of the 99th percentile of the version before.
    max_latency_ratio: float = 3.0
    #: Samples that are computed together, at most; a larger request is a batch of its own.
    max_batch: int = 32
    #: A latency below this is never too high.
    min_latency_s: float = 0.1
    max_growth_bytes: int = 512 * 2**20
    #: Pairs before errors, and answers before latencies, are compared.
    min_worse: int = 3
    min_latencies: int = 100


def find_regression(new: RequestTally, old: RequestTally | None, limits: WatchLimits) -> str:
    """Return why the new version must not go on, '' if it may."""
    if new.worse_ends:
        return "its process ended on an input that the version before answers"
    if new.worse >= limits.min_worse:
        # Not every failure is compared: those that are stand for all.
        failed = new.errors + new.refused
        share = failed / new.total * new.worse / new.compared
        if share > limits.max_error_share:
            return (
                f"{failed} of {new.total} requests failed or were refused; the version before answers {new.worse} of "
                f"the {new.compared} that it was asked; the last: {new.last_error}"
            )
    if old is not None and (reason := _find_slowness(new, old, limits)):
        return reason
    if new.loaded_bytes and new.resident_bytes - new.loaded_bytes > limits.max_growth_bytes:
        grown = (new.resident_bytes - new.loaded_bytes) / 2**20
        return f"its process has grown by {grown:.0f} MiB over {new.total} requests"
    return ""


def _find_slowness(new: RequestTally, old: RequestTally, limits: WatchLimits) -> str:
    """Compare the latencies of two versions; return why the new one is too slow, '' if it is not.

    Where the version before has given too few answers, its warm-up stands for them. Its samples are not the users', so
    a full batch is the baseline: an answer takes no longer, however many requests are computed with it. A request that
    is larger than a batch takes as many times as long.
    """
    if len(new.latencies_s) < limits.min_latencies:
        return ""
    now_s, before_s, what = new.percentile_s(0.99), old.percentile_s(0.99), "of the version before"
    if len(old.latencies_s) < limits.min_latencies:
        if old.full_batch_s is None:
            return ""
        full_batches = max(1.0, new.largest_request / limits.max_batch)
        before_s = max(before_s, full_batches * old.full_batch_s)
        what = "of the version before, by the full batches of its warm-up,"
    if now_s <= max(limits.min_latency_s, limits.max_latency_ratio * before_s):
        return ""
    return f"99% of its answers take up to {now_s * 1000:.0f} ms, {what} {before_s * 1000:.0f} ms"
