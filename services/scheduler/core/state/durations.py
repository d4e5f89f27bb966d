"""How long runs take, from those that are over: a distribution for every kind of run, causal and quick.

A run's kind is who submitted what, on which data, on how many slots. The newest durations of each kind are kept,
for keys from narrow to wide; the prediction for a run mixes its keys' durations, and a key counts the more, the more
it has seen. Unseen durations have a heavy tail: a run that has outlived all known ones continues, on
average, for about as long again.

Durations are the times that runs had slots, all generations added up, whether they completed, failed or were
cancelled: a run that is stopped gives its slots back too.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Protocol

from contracts.scheduling import Predict
from contracts.spec.data import DatasetRef
from contracts.spec.run import RunSpec

#: Durations kept of one key, for any window of the policy.
MAX_PER_KEY = 1_000
#: Durations kept of all keys together; the keys that were not added to for longest go first.
MAX_DURATIONS = 200_000
#: Joins the parts of a key; a user's name does not contain it.
SEPARATOR = "\x1f"
#: The widest key of all.
EVERYTHING = "*"

DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class RunKind:
    """What runs that should take about equally long have in common."""

    user: str = ""
    team: str = ""
    #: What runs: the task, or the name with its numbers left out, since sweeps count their runs.
    task: str = ""
    dataset: str = ""
    slots: int = 1

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """From narrow to wide."""
        size = str(self.slots)
        return (
            SEPARATOR.join(("k", self.user, self.team, self.task, self.dataset, size)),
            SEPARATOR.join(("t", self.user, self.task, size)),
            SEPARATOR.join(("z", self.user, size)),
            SEPARATOR.join(("u", self.user)),
            SEPARATOR.join(("s", size)),
            EVERYTHING,
        )


def run_kind_of(spec: RunSpec) -> RunKind:
    """The kind of a run that was asked for like this."""
    named = [data for _, data in sorted(spec.datasets.items())] if spec.data is None else [spec.data]
    dataset = ",".join(each.dataset_id if isinstance(each, DatasetRef) else str(each.source) for each in named)
    task = spec.task or DIGITS.sub("#", spec.name)
    return _kind(spec.user or "", spec.team or "", f"{spec.kind}:{task}", dataset, spec.slots.min)


@lru_cache(maxsize=10_000)
def _kind(user: str, team: str, task: str, dataset: str, slots: int) -> RunKind:
    """One for all runs of the kind: there may be a hundred thousand of them."""
    return RunKind(user, team, task, dataset, slots)


@dataclass(frozen=True)
class WaitKind:
    """What waits in the line that should take about equally long have in common."""

    slots: int = 1
    #: Decade of the slot-seconds that the run has had.
    level: int = 0

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """From narrow to wide."""
        return (
            SEPARATOR.join(("w", str(self.level), str(self.slots))),
            SEPARATOR.join(("l", str(self.level))),
            EVERYTHING,
        )


def wait_kind_of(slots: int, served_slot_s: float) -> WaitKind:
    """The kind of a wait."""
    return WaitKind(slots, int(math.log10(served_slot_s)) if served_slot_s > 1 else 0)


class DurationKeys(Protocol):
    """A subject with a history: a kind of run, a kind of wait."""

    @property
    def keys(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Durations, some of them perhaps not over yet, as a survival function with a heavy tail.

    ``steps[i]`` is the share that outlives the first ``i`` of ``values``. What outlives all of them falls off as
    ``((scale + last) / (scale + t)) ** 2``.
    """

    values: tuple[float, ...]
    steps: tuple[float, ...]
    #: Integral of the survival function from each value on.
    beyond: tuple[float, ...]
    scale_s: float
    #: How many runs it is made of.
    runs: int = 0

    def survival(self, s: float) -> float:
        """The share that takes longer than ``s``."""
        index = bisect_right(self.values, s)
        share = self.steps[index]
        if index < len(self.values) or share == 0:
            return share
        last = self.values[-1] if self.values else 0.0
        return share * ((self.scale_s + last) / (self.scale_s + max(s, last))) ** 2

    def excess(self, s: float) -> float:
        """Integral of the survival function from ``s`` on."""
        index = bisect_right(self.values, s)
        if index == len(self.values):
            return self.survival(s) * (self.scale_s + s)
        return self.steps[index] * (self.values[index] - s) + self.beyond[index]


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of runs besides the durations of those that ended within a window of time."""

    #: For how long runs that go on have had their slots.
    running: Sequence[float] = ()
    #: How old each run was that began before the window, when that began.
    entered: Sequence[float] = ()


def sample(ended: Iterable[float], scale_s: float, seen: Observation | None = None) -> Sample:
    """The sample of these durations. ``seen`` says which part of each run's time was looked at, if not all of it.

    It is Kaplan and Meier's estimate: at each age, the share that ends there of those that were seen at that age.
    Those that go on count as far as they have come, and those that began before the window as from there. Without
    that, the newest runs to end would be the short ones, and the work that is to come taken for half of what it is.
    """
    values = sorted(ended)
    if seen is None:
        return _whole(values, scale_s)
    entered, left = sorted(seen.entered), sorted([*values, *seen.running])
    steps, share, late = [1.0], 1.0, len(left) - len(entered)
    kept: list[float] = []
    for value, many in _counted(values):
        at_risk = late + bisect_left(entered, value) - bisect_left(left, value)
        # Few are at risk at some ages: that all of these ended does not mean that no run lasts longer.
        if many >= at_risk and value < left[-1]:
            at_risk = many + 1
        share *= max(at_risk - many, 0) / max(at_risk, 1)
        kept.append(value)
        steps.append(share)
    if left and left[-1] > (kept[-1] if kept else 0.0) and share > 0:
        # No run ended since: the tail begins at the age of the runs that continue.
        kept.append(left[-1])
        steps.append(share)
    return Sample(tuple(kept), tuple(steps), _beyond(kept, steps, scale_s), scale_s, len(left))


def _whole(values: Sequence[float], scale_s: float) -> Sample:
    """The sample of ascending durations that were all seen from beginning to end."""
    count = len(values)
    steps = _even_steps(count)
    # From the value at ``index`` on, the others exceed it by their sum less their number times it.
    sums = list(accumulate(reversed(values), initial=0.0))
    beyond = [(sums[count - 1 - index] - (count - 1 - index) * value) / count for index, value in enumerate(values)]
    return Sample(tuple(values), steps, tuple(beyond), scale_s, count)


@lru_cache(maxsize=MAX_PER_KEY + 1)
def _even_steps(count: int) -> tuple[float, ...]:
    return tuple((count - index) / count for index in range(count + 1)) if count else (1.0,)


def _counted(values: Sequence[float]) -> Iterable[tuple[float, int]]:
    """Each value once, and how often it is there; ``values`` ascend."""
    index = 0
    while index < len(values):
        after = bisect_right(values, values[index], index)
        yield values[index], after - index
        index = after


def _beyond(values: Sequence[float], steps: Sequence[float], scale_s: float) -> tuple[float, ...]:
    if not values:
        return ()
    total = steps[-1] * (scale_s + values[-1])
    found = [total]
    for index in range(len(values) - 1, 0, -1):
        total += steps[index] * (values[index] - values[index - 1])
        found.append(total)
    found.reverse()
    return tuple(found)


class Distribution:
    """How long a run takes, as a mixture of samples. ``attained_s`` is how long it has had its slots already.

    Every answer is about what is then still possible: of the runs that came so far.
    """

    def __init__(self, parts: Sequence[tuple[float, Sample]]) -> None:
        self._parts = tuple(part for part in parts if part[0] > 0)
        #: Quantiles of runs that have had no slots yet: all that wait share them.
        self._from_the_start: dict[float, float] = {}

    def survival(self, s: float) -> float:
        """The probability that such a run takes longer than ``s``."""
        return sum(weight * part.survival(s) for weight, part in self._parts)

    def mean_remaining_s(self, attained_s: float = 0.0) -> float:
        """The time that it will still take, on average."""
        excess = sum(weight * part.excess(attained_s) for weight, part in self._parts)
        return excess / self.survival(attained_s)

    def quantile(self, q: float, attained_s: float = 0.0) -> float:
        """How long it takes, all in all, with probability ``q`` at the most."""
        if attained_s == 0:
            if q not in self._from_the_start:
                self._from_the_start[q] = self._quantile(q, 0.0)
            return self._from_the_start[q]
        return self._quantile(q, attained_s)

    def _quantile(self, q: float, attained_s: float) -> float:
        share = (1.0 - q) * self.survival(attained_s)
        values = self._values
        # The survival function descends: look for the first value that at most this share outlives.
        place = bisect_left(values, -share, bisect_right(values, attained_s), key=lambda s: -self.survival(s))
        if place < len(values):
            return values[place]
        return self._tail(share, max(attained_s, values[-1] if values else 0.0))

    @cached_property
    def _values(self) -> list[float]:
        """All values of all parts, in order."""
        return sorted(value for _, part in self._parts for value in part.values)

    def _tail(self, share: float, begin_s: float) -> float:
        """Where the survival function, which is smooth from ``begin_s`` on, falls to ``share``."""
        scale_s = self._parts[-1][1].scale_s
        ratio = math.sqrt(max(self.survival(begin_s) / max(share, 1e-12), 1.0))
        return (scale_s + begin_s) * ratio - scale_s


@dataclass(slots=True)
class Window:
    """The newest durations of one key, and when each was over, in seconds since the epoch."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PER_KEY))
    ended_at: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PER_KEY))
    #: How many there ever were, and how many of all kinds when the newest was added.
    added: int = 0
    version: int = 0
    _sample: Sample | None = None
    _of: tuple[int, int, float] = (0, 0, 0.0)

    def add(self, run_s: float, at: float, version: int) -> None:
        self.newest.append(run_s)
        self.ended_at.append(at)
        self.added, self.version = self.added + 1, version

    def sample(self, config: Predict) -> Sample:
        """What has ended, alone: it changes only when something is added."""
        of = (self.version, config.window, config.prior_s)
        if self._sample is None or self._of != of:
            self._sample, self._of = sample(self._last(self.newest, config), config.prior_s), of
        return self._sample

    def sample_beside(self, config: Predict, running: Sequence[float], now: float) -> Sample:
        """With the runs that go on: for how long each has had its slots."""
        ended, ended_at = self._last(self.newest, config), self._last(self.ended_at, config)
        if len(ended) == self.added:
            return sample(ended, config.prior_s, Observation(running) if running else None)
        since = ended_at[0]
        ages = [run_s - (at - since) for run_s, at in zip(ended, ended_at, strict=True)]
        ages += [run_s - (now - since) for run_s in running]
        return sample(ended, config.prior_s, Observation(running, [age for age in ages if age > 0]))

    @staticmethod
    def _last(kept: deque[float], config: Predict) -> list[float]:
        return list(kept)[-config.window :]


class RunningTimes:
    """The runs that have slots now, by the keys of their kinds: for how long they had them, all in all."""

    def __init__(self, now: datetime) -> None:
        self.now = now.timestamp()
        self.by_key: dict[str, list[float]] = {}

    def add(self, kind: DurationKeys, attained_s: float) -> None:
        for key in kind.keys:
            self.by_key.setdefault(key, []).append(attained_s)


class History:
    """The durations of all runs that are over, as far as they are kept. Only ``add`` changes what it predicts."""

    def __init__(self) -> None:
        #: In the order of their last addition.
        self._windows: dict[str, Window] = {}
        self._kept = 0
        self.added = 0
        self._known: dict[tuple[DurationKeys, Predict], tuple[tuple[int, ...], Distribution]] = {}

    def add(self, kind: DurationKeys, run_s: float, at: datetime) -> None:
        """A run of this kind is over; it had slots for ``run_s``, all in all."""
        ended_at = at.timestamp()
        self.added += 1
        for key in kind.keys:
            window = self._windows.pop(key, None) or Window()
            self._windows[key] = window
            self._kept -= len(window.newest)
            window.add(run_s, ended_at, self.added)
            self._kept += len(window.newest)
        while self._kept > MAX_DURATIONS:
            self._kept -= len(self._windows.pop(next(iter(self._windows))).newest)

    def predict(self, kind: DurationKeys, config: Predict) -> Distribution:
        """How long a run of this kind takes, by what is known now."""
        windows = [window for window, _ in self._with_keys(kind, ())]
        version = tuple(window.version for window in windows)
        known = self._known.get((kind, config))
        if known is not None and known[0] == version:
            return known[1]
        if len(self._known) > 10_000:
            self._known.clear()
        made = _mix([window.sample(config) for window in windows], config)
        self._known[kind, config] = (version, made)
        return made

    def predict_beside(self, kind: DurationKeys, config: Predict, running: RunningTimes) -> Distribution:
        """``predict``, with runs that have slots as evidence too.

        A user's jobs that run for days, and none of which has ended yet, say a lot about the next one.
        """
        windows = self._with_keys(kind, running.by_key)
        parts = [window.sample_beside(config, running.by_key.get(key, ()), running.now) for window, key in windows]
        return _mix(parts, config)

    def rate_per_s(self, now: datetime, within_s: float, least: int = 1, key: str = EVERYTHING) -> float:
        """How many a second were added of late, as far as they are kept; 0 if fewer than ``least``."""
        window = self._windows.get(key)
        if window is None:
            return 0.0
        now_s = now.timestamp()
        begin_s = now_s - within_s
        if window.added > len(window.ended_at):
            begin_s = max(begin_s, window.ended_at[0])
        recent = sum(at > begin_s for at in window.ended_at)
        return recent / (now_s - begin_s) if now_s > begin_s and recent >= least else 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self.to_state() == other.to_state()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def to_state(self) -> dict[str, Any]:
        """Everything in it, for a snapshot; JSON."""
        return {
            "added": self.added,
            "windows": [
                [key, each.added, each.version, list(each.newest), list(each.ended_at)]
                for key, each in self._windows.items()
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """The history that ``to_state`` gave this of."""
        history = cls()
        history.added = state["added"]
        for key, added, version, newest, ended_at in state["windows"]:
            kept = deque(newest, maxlen=MAX_PER_KEY), deque(ended_at, maxlen=MAX_PER_KEY)
            history._windows[key] = Window(*kept, added, version)
            history._kept += len(newest)
        return history

    def _with_keys(self, kind: DurationKeys, also: Iterable[str]) -> list[tuple[Window, str]]:
        """The windows of a kind's keys, those left out that have seen the very same runs as the one before."""
        found: list[tuple[Window, str]] = []
        before = 0
        for key in kind.keys:
            window = self._windows.get(key)
            if window is None:
                if key in also:
                    found.append((Window(), key))
            elif window.added != before:
                found.append((window, key))
                before = window.added
        return found


def _mix(samples: Sequence[Sample], config: Predict) -> Distribution:
    """The mixture of samples from narrow to wide.

    Each takes its part of what the narrower ones left: half of it with ``enough`` runs, nearly all with many more.
    """
    parts: list[tuple[float, Sample]] = []
    left = 1.0
    for part in samples:
        weight = left * part.runs / (part.runs + config.enough)
        parts.append((weight, part))
        left -= weight
    parts.append((left, sample((), config.prior_s)))
    return Distribution(parts)
