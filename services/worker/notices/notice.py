"""Notices that a machine will be taken away: what they contain, where they come from, and their facts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

import structlog

from contracts.events.node import NodeNotice
from contracts.grace import LEAST_GRACE_S, NOTICE_MARGIN_S
from services.worker import metrics

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine will be taken away (``leave``), or may be."""

    source: str
    kind: str
    #: Seconds until then; None if the source gives none.
    grace_s: float | None = None
    detail: str = ""
    #: False: a recommendation; runs go on until there is a better place.
    leave: bool = True
    #: The source's own id of the notice.
    token: str = ""


class NoticeSource(ABC):
    """One origin of notices."""

    name: ClassVar[str]

    @abstractmethod
    async def applies(self) -> bool:
        """Whether this source exists on this machine; takes a second or two at most."""

    @abstractmethod
    def watch(self) -> AsyncIterator[Notice]:
        """Yield every notice once, for ever; errors are retried."""

    async def acknowledge(self, notice: Notice) -> None:  # noqa: B027
        """Report to the source that no run is left on the machine. Most sources expect no acknowledgement."""


class NodeNotices:
    """All notices since the agent started. Each incarnation publishes them under its own name."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        #: Each with the time (monotonic) at which it came.
        self._notices: list[tuple[Notice, float]] = []

    def add(self, notice: Notice) -> None:
        """Note that the machine will be taken away, or may be."""
        metrics.NOTICES.labels(notice.source).inc()
        log.warning("notice", source=notice.source, kind=notice.kind, grace_s=notice.grace_s, detail=notice.detail)
        self._notices.append((notice, time.monotonic()))

    @property
    def must_leave(self) -> bool:
        """Whether it is certain that the machine will be taken away."""
        return any(notice.leave for notice, _ in self._notices)

    def grace_s(self, notice: Notice, requested_s: float) -> float:
        """Return the seconds of a run that asks for ``requested_s`` to save its state."""
        if notice.grace_s is None:
            return requested_s
        return min(requested_s, max(notice.grace_s - NOTICE_MARGIN_S, LEAST_GRACE_S))

    def facts(self, incarnation: str) -> list[NodeNotice]:
        """Return the facts with the time that remains now. Published again, they are the same facts."""
        now_s = time.monotonic()
        return [
            NodeNotice(
                node_id=self._node_id,
                incarnation=incarnation,
                source=notice.source,
                kind=notice.kind,
                grace_s=None if notice.grace_s is None else max(notice.grace_s - (now_s - at_s), 0.0),
                detail=notice.detail,
            )
            for notice, at_s in self._notices
        ]
