"""Facts about requests themselves: those that cannot be done."""

from __future__ import annotations

from contracts.base import Fact, Token
from contracts.problems import FieldProblem


class RequestFact(Fact, aggregate="request", id_field="request_id"):
    """A fact about one request; ``request_id_for`` computes its id from the request's source, type and id."""

    request_id: Token


class RequestRefused(RequestFact, fact="refused"):
    """The request is not done; ``reason`` says what to change. Nobody has to mend anything but its sender."""

    #: What the request came with: its ``ce-source``, ``ce-type`` and ``ce-id``.
    source: str
    request_type: str
    ce_id: str
    reason: str
    problems: tuple[FieldProblem, ...] = ()
