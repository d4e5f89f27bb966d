"""Why a run was in its state at a time in the past."""

from __future__ import annotations

from collections.abc import AsyncIterable
from datetime import UTC, datetime

from contracts import subjects, topology
from trainbus.client.errors import NotFoundError, UsageError
from trainbus.client.explanation import Explanation
from trainbus.operate.connection import Connection
from trainbus.operate.history.fact_log import BusLog
from trainbus.operate.history.log import Entry
from trainbus.operate.history.past_state import PastState


async def explain_past(
    connection: Connection, run_id: str, at: datetime, entries: AsyncIterable[Entry] | None = None
) -> Explanation:
    """Return the answer that the scheduler would have given at a time in the past (UTC unless it has a zone).

    It is computed from ``entries`` of the log; without them from the log of the bus.

    Raises:
        UsageError: the time is in the future.
        NotFoundError: the run was not there at that time.
    """
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at > datetime.now(UTC):
        raise UsageError(f"{at:%Y-%m-%d %H:%M:%S} UTC is in the future: give a time in the past")
    past = PastState(at)
    if entries is None:
        entries = (await BusLog.open(connection)).entries()
    async for entry in entries:
        if not past.feed(entry):
            break
    if run_id not in past.cluster.runs:
        raise NotFoundError(await _describe_absence(connection, run_id, at))
    answer = past.why(run_id)
    name, state, reason = (str(answer[key]) for key in ("name", "state", "message"))
    return Explanation(run_id, name, state, reason, "log", answer)


async def _describe_absence(connection: Connection, run_id: str, at: datetime) -> str:
    for fact in ("accepted", "rejected"):
        first = await connection.read_last(topology.FACTS, subjects.fact("run", run_id, fact))
        if first is not None and (fact == "rejected" or first.envelope.time > at):
            return f"run {run_id} was not there at {at.isoformat()}: it was {fact} at {first.envelope.time}"
    return f"run {run_id} was not there at {at.isoformat()}"
