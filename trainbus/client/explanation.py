"""Why a run is in its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.formats import DEFAULT_REASONS, format_reason, plural
from trainbus.client.connection import Connection
from trainbus.client.run_list import read_run
from trainbus.client.views import RunView

#: What the scheduler's answer about a waiting run holds besides the sentence.
DETAILS = ("code", "changes", "holders", "start_p10", "start_p50", "start_p90")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a run is in its state."""

    run_id: str
    name: str
    state: str
    #: One sentence.
    reason: str
    #: ``log``: the scheduler did not answer or does not know the run, so this is what the facts say.
    answered_by: Literal["scheduler", "log"]
    #: What else the scheduler knows. Of a waiting run: ``code``, ``changes``, ``holders`` and, in UTC, ``start_p10``,
    #: ``start_p50``, ``start_p90``. Of a time in the past: the whole answer, with ``at``, ``sequence`` and ``policy``.
    details: dict[str, Any] = field(default_factory=dict)
    #: Whether the scheduler was asked and did not answer.
    unanswered: bool = False
    #: What is probably a mistake in its request.
    warnings: tuple[str, ...] = ()


async def explain_run(connection: Connection, run_id: str) -> Explanation:
    """Return the scheduler's answer, or what the log says if the scheduler does not answer."""
    view = await read_run(connection, run_id)
    if view.state == "requested":
        return Explanation(run_id, view.name, view.state, view.reason, "log")
    found = {} if view.ended else await connection.get(f"/training-runs/{run_id}/why")
    answered, answer = found.get("answered_by") == "scheduler", found.get("answer") or {}
    if not answered or answer.get("state") == "unknown":
        unanswered = not answered and not view.ended
        return Explanation(run_id, view.name, view.state, recorded_reason(view), "log", {}, unanswered, view.warnings)
    details = {name: answer[name] for name in DETAILS if name in answer}
    message = str(answer["message"])
    return Explanation(run_id, view.name, view.state, message, "scheduler", details, warnings=view.warnings)


def recorded_reason(view: RunView) -> str:
    """Return why a run is in its state, as far as its facts say."""
    match view.state:
        case "accepted":
            return "it was accepted and will be queued at once"
        case "preparing":
            return view.reason or "its data is being ingested and sharded"
        case "queued":
            return view.reason or "the scheduler is about to place it"
        case "placed":
            return view.reason or f"it was placed on {plural(view.slots_got, 'slot')} and its ranks are starting"
        case "running":
            return view.reason or f"it runs on {plural(view.slots_got, 'slot')} of the {_format_range(view)} it can use"
        case "stopping" | "cancelling":
            return f"it was asked to stop{format_reason(view.reason)}"
        case "completed" if not view.verdict:
            return "every rank succeeded"
        case "completed":
            return f"{view.verdict}, {view.verdict_reason}"
        case "cancelled" if view.reason in DEFAULT_REASONS:
            return "by request"
        case _:
            return view.reason or "no reason was given"


def _format_range(view: RunView) -> str:
    return str(view.slots_max) if view.slots_min == view.slots_max else f"{view.slots_min} to {view.slots_max}"
