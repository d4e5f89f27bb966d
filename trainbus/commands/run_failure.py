"""The failure of a followed run, told once: the project's lines of the traceback, the reason, and what to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from contracts.events.dataset import DatasetIngestFailed, DatasetShardFailed
from contracts.events.run import RunExited, RunFailed, RunPrepareFailed
from contracts.ranks import is_about_lost_peer
from contracts.texts import describe_milestone
from contracts.tracebacks import FAILURE_PREFIX, begins_failure, find_failure_lines, find_last_traceback
from trainbus.client.views import RunView

#: Facts of which several have one reason.
FAILURES = (DatasetIngestFailed, DatasetShardFailed, RunPrepareFailed, RunExited, RunFailed)
#: Seconds for which a traceback waits for the fact that tells it: a script may print one and go on.
MAX_HELD_S = 5.0
#: Lines of a rank that wait; more are printed.
MAX_HELD_LINES = 300


class HeldOutput:
    """The output of each rank from a traceback on, until a fact tells the failure or time shows that none does."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[int, list[str]] = {}
        self._held_since: dict[int, float] = {}

    def add(self, rank: int, line: str) -> list[str]:
        """Take over a line of output; return the lines that are due."""
        held = self._lines.get(rank)
        if held is None:
            if not begins_failure(line):
                return [line]
            self._lines[rank], self._held_since[rank] = [line], self._clock()
            return []
        held.append(line)
        return self._lines.pop(rank) if len(held) > MAX_HELD_LINES else []

    def poll(self) -> Iterator[tuple[int, list[str]]]:
        """Yield what has waited for too long, by rank."""
        for rank in list(self._lines):
            if self._clock() - self._held_since[rank] > MAX_HELD_S:
                yield rank, self._lines.pop(rank)

    def release(self, reason: str) -> Iterator[tuple[int, list[str]]]:
        """Yield all that waits, by rank, without the failure that ``reason`` tells and what followed from it."""
        for rank in list(self._lines):
            yield rank, _without_failure(self._lines.pop(rank), reason)


def _without_failure(lines: list[str], reason: str) -> list[str]:
    end = len(lines)
    # Of a run that is followed late, the output of several attempts comes before the fact that ends the first.
    while (found := find_last_traceback(lines[:end])) is not None:
        end = found.begins_at
        if found.is_told_by(reason) or is_about_lost_peer(found.text):
            lines = [*lines[:end], *lines[found.ends_at :]]
    return [line for line in lines if not (line.startswith(FAILURE_PREFIX) and line[len(FAILURE_PREFIX) :] in reason)]


class ToldFailure:
    """The reason that was told last: facts that repeat it do not tell it again."""

    def __init__(self) -> None:
        self._reason = ""

    def describe(self, event: Any) -> tuple[list[str], str]:
        """Return the project's lines of the traceback that led to a fact, and the line about the fact; '' for none."""
        reason = event.reason if isinstance(event, FAILURES) else ""
        if not reason:
            return [], describe_milestone(event)
        is_told = bool(self._reason) and reason.startswith(self._reason)
        before, self._reason = self._reason, self._reason if is_told else reason
        if not is_told:
            return find_failure_lines(getattr(event, "log_tail", ()), reason), describe_milestone(event)
        match event:
            case RunFailed():
                return [], f"failed{reason.removeprefix(before).removeprefix(';')}"
            case RunExited():
                step = f" at step {event.step}" if event.step else ""
                return [], f"failed on {event.node_id}{step} in the same way"
        return [], ""


def describe_next_step(view: RunView) -> str:
    """Return what to do about a run that did not complete, whose reason was told."""
    if view.state == "rejected":
        return f"run {view.run_id} rejected: correct the request and submit it again"
    if view.state != "failed":
        return f"run {view.run_id} {view.state}"
    resume = f", or `trainbus resume {view.run_id}` to go on from its last checkpoint" if view.last_checkpoint else ""
    return (
        f"run {view.run_id} failed: `trainbus logs {view.run_id}` has its whole output; "
        f"mend it and submit it again{resume}"
    )
