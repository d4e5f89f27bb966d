"""``trainbus why RUN --at TIME``: the answer as it would have been then, out of the log."""

from __future__ import annotations

from typing import Any

from contracts import subjects, topology
from services.scheduler.replay.past_state import PastState
from trainbus.client.address import Address
from trainbus.client.connection import connect
from trainbus.client.errors import USAGE, CliError
from trainbus.client.fact_log import BusLog
from trainbus.client.runs import resolve
from trainbus.commands import render
from trainbus.commands.times import moment


async def why_at(address: Address, name: str, when: str, *, as_json: bool) -> None:
    """Print why a run was where it was at a time in the past."""
    now = render.utc_now()
    then = PastState(moment(when, now))
    if then.at > now:
        raise CliError(f"{then.at:%Y-%m-%d %H:%M:%S} UTC is yet to come: --at asks about the past", USAGE)
    async with connect(address) as link:
        run_id = await resolve(link, name)
        past = BusLog(link, await link.last_sequence(topology.FACTS))
        async for entry in past.entries(f"folding up to {then.at:%Y-%m-%d %H:%M:%S}"):
            if not then.feed(entry):
                break
        if run_id not in then.cluster.runs:
            raise CliError(await _not_there(link, run_id, then), USAGE)
    said = then.why(run_id)
    if as_json:
        print(render.as_json(said))
    else:
        head = f"{run_id} ({render.escape(str(said['name']))}) was {render.state(str(said['state']))} at "
        policy = f"[dim](policy {render.escape(then.policy.name)}, sequence {then.cluster.sequence})[/]"
        text = f"{head}{then.at:%Y-%m-%d %H:%M:%S} UTC {policy}: {render.escape(str(said['message']))}"
        render.console().print(text, soft_wrap=True)


async def _not_there(link: Any, run_id: str, then: PastState) -> str:
    for fact in ("accepted", "rejected"):
        first = await link.last(topology.FACTS, subjects.fact("run", run_id, fact))
        if first is not None and (fact == "rejected" or first.envelope.time > then.at):
            return f"run {run_id} was not there at {then.at.isoformat()}: it was {fact} at {first.envelope.time}"
    return f"run {run_id} was not there at {then.at.isoformat()}"
