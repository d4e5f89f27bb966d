"""How long a process computes a batch, by its size: from that follows how long a request will wait."""

from __future__ import annotations

from dataclasses import dataclass

#: Weight of the newest batch.
WEIGHT = 0.1


@dataclass(slots=True)
class BatchTimes:
    """A line through the newest batches: seconds = ``per_batch_s`` + ``per_sample_s`` * samples.

    A batch of 32 may take as long as one of a single sample, or 32 times as long; which of them decides how long 100
    samples take. As long as every batch has the same size, all of its time counts as that of a batch.
    """

    max_batch: int
    _samples: float = 0.0
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, samples: int, seconds: float) -> None:
        """Add a batch."""
        weight = WEIGHT if self._samples else 1.0
        off_samples, off_seconds = samples - self._samples, seconds - self._seconds
        self._samples += weight * off_samples
        self._seconds += weight * off_seconds
        kept = (1 - weight) * weight
        self._variance = (1 - weight) * self._variance + kept * off_samples**2
        self._covariance = (1 - weight) * self._covariance + kept * off_samples * off_seconds

    @property
    def per_sample_s(self) -> float:
        if self._variance < 1e-3:
            return 0.0
        return min(max(0.0, self._covariance / self._variance), self._seconds / self._samples)

    @property
    def per_batch_s(self) -> float:
        return max(0.0, self._seconds - self.per_sample_s * self._samples)

    def estimate_s(self, samples: int) -> float:
        """Return for how long the process computes so many samples; 0 before the first batch."""
        batches = -(-samples // self.max_batch)
        return batches * self.per_batch_s + samples * self.per_sample_s


@dataclass(slots=True)
class FullBatchTime:
    """The longest time that a full batch should take: a smaller one that was computed counts as often as it fits."""

    max_batch: int
    #: None before the first batch.
    seconds: float | None = None
    _samples: int = 0

    def observe(self, samples: int, seconds: float) -> None:
        """Add a batch. Of one with fewer samples than another before it, the time alone counts."""
        if samples >= self._samples:
            seconds *= max(1.0, self.max_batch / samples)
            self._samples = samples
        self.seconds = max(self.seconds or 0.0, seconds)
