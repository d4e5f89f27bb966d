"""The streams of the bus. Apart from the events in them, which take longer to import than most commands run."""

from __future__ import annotations

from dataclasses import dataclass

from contracts import subjects

DAY_S = 86_400.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Stream:
    """A JetStream stream. Limits retention always: a work queue would delete what replay needs."""

    name: str
    subjects: tuple[str, ...]
    doc: str
    #: None keeps everything.
    max_bytes: int | None = None
    max_age_s: float | None = None
    max_messages_per_subject: int | None = None
    #: How long the server remembers message ids. Beyond it, expected sequences do the same job.
    duplicate_window_s: float = 120.0
    compress: bool = True
    #: Whether several messages may be published at once, all of them or none.
    atomic: bool = False
    #: Whether a message without an id gets its sequence for one. Then one that is made anew uses none of them again.
    names_messages: bool = False

    @property
    def retention(self) -> str:
        """How long its messages stay, in words."""
        age = f"{self.max_age_s / DAY_S:g} days" if self.max_age_s else ""
        size = f"{self.max_bytes / GIB:g} GiB" if self.max_bytes else ""
        return " or ".join(filter(None, (age, size))) or "for ever"


REQUESTS = Stream("REQUESTS", subjects.ALL_REQUESTS, "Requests: train, cancel, ingest, restore...", names_messages=True)
FACTS = Stream("FACTS", subjects.ALL_FACTS, "What has happened, in one total order. The source of truth.", atomic=True)
PROGRESS = Stream(
    "PROGRESS", subjects.ALL_PROGRESS, "Metric points of running trainings.", max_bytes=4 * GIB, max_age_s=14 * DAY_S
)
LOGS = Stream("LOGS", subjects.ALL_LOGS, "Output lines of ranks.", max_bytes=4 * GIB, max_age_s=14 * DAY_S)
DEAD_LETTERS = Stream(
    "DEAD_LETTERS",
    subjects.ALL_DEAD,
    "What could not be handled, with the reason and where it came from.",
    max_bytes=1 * GIB,
    max_age_s=90 * DAY_S,
)
SHADOW = Stream("SHADOW", subjects.ALL_SHADOW, "What a candidate policy would do.", max_bytes=GIB, max_age_s=30 * DAY_S)
STREAMS: tuple[Stream, ...] = (REQUESTS, FACTS, PROGRESS, LOGS, DEAD_LETTERS, SHADOW)
