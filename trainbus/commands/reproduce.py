"""``trainbus reproduce``: train a recorded run again and compare the states on the way, to the bit."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from contracts import exactness, streams, subjects
from contracts.events.train import CancelRequested
from contracts.run_states import TERMINAL_STATES
from contracts.texts import describe_milestone
from services.checkpoint.core import digests
from trainbus.client.address import StackAddress
from trainbus.client.checkpoints import StoredCheckpoint
from trainbus.client.client import AsyncClient
from trainbus.client.connection import Connection
from trainbus.client.errors import TrainbusError, UsageError
from trainbus.client.reproduction import (
    RecordedRun,
    ReproductionPlan,
    RunComparison,
    StateComparison,
    first_different_tensor,
    plan_reproduction,
)
from trainbus.client.run_files import read_digests_of
from trainbus.client.runs import FollowedRun, read_end
from trainbus.client.stored_event import StoredEvent
from trainbus.client.views import RunView
from trainbus.commands import render

#: Exit codes; 2 is a run that cannot be reproduced.
SAME, DIFFERS = 0, 1
#: Rows of the table that stand on the screen at a time.
VISIBLE_ROWS = 15
#: Names of differing tensors that are listed.
MAX_LISTED_TENSORS = 8


@dataclass(slots=True)
class ReproductionResult:
    """The outcome of a reproduction."""

    run_id: str
    reproduction: str
    compared: int
    of: int
    final_step: int | None = None
    final_digest: str | None = None
    #: Set where they differ.
    step: int | None = None
    same_up_to: int | None = None
    recorded_digest: str | None = None
    reproduced_digest: str | None = None
    tensor: str | None = None
    #: The step whose tensors were compared: the first difference whose recorded checkpoint is still stored.
    tensor_step: int | None = None
    differing: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def same(self) -> bool:
        return self.step is None


async def reproduce_run(
    client: AsyncClient, name: str, *, start_step: int | None, slots: int | None, as_json: bool
) -> int:
    """Train a run again and compare; return 0 if all states are the same, 1 if not.

    Raises:
        UsageError: the run cannot be repeated, or the repetition ended before its last state.
    """
    connection = client.connection
    recorded = RecordedRun(await client.find_run(name))
    for message in await connection.read(subjects.run(recorded.run_id)):
        recorded.apply(message.event)
    planned = plan_reproduction(recorded, start_step, slots)
    repeated = (await connection.publish_request(planned.request)).run_id
    assert repeated is not None
    screen = ReproductionScreen(repeated, planned, quiet=as_json)
    try:
        await _follow_reproduction(connection, screen)
    except asyncio.CancelledError:
        await asyncio.shield(_cancel_if_running(client, repeated, "the reproduction was interrupted"))
        raise
    result = await _conclude(client, recorded, screen)
    _print(result, as_json=as_json)
    return SAME if result.same else DIFFERS


class ReproductionScreen:
    """The second training as it goes on: its state, the comparison, and the table that shows it."""

    def __init__(self, run_id: str, planned: ReproductionPlan, *, quiet: bool) -> None:
        self.view, self.planned = RunView(run_id), planned
        self.comparison = RunComparison(planned.wanted, planned.kept)
        self._console = render.console()
        self._quiet = quiet
        self.live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal and not quiet else None

    def open(self) -> AbstractContextManager[Any]:
        if not self._quiet:
            slots = self.planned.request.slots
            print(
                f"{self.view.run_id}  {self.planned.request.name}: {len(self.planned.wanted)} states to compare, on "
                f"{slots.min if slots.min == slots.max else f'{slots.min} to {slots.max}'} slots",
                flush=True,
            )
            if self.planned.note:
                print(self.planned.note, flush=True)
        return self.live if self.live is not None else nullcontext()

    def update(self, message: StoredEvent) -> None:
        """Compare what a fact has, and show the change."""
        compared = self.comparison.apply(message.event)
        if self.live is not None:
            self.live.update(Group(self._table(), self._line()), refresh=True)
        elif not self._quiet and (text := _line_of(compared) if compared else describe_milestone(message.event)):
            render.print_moment(message.time, text)

    def _table(self) -> Table:
        made = render.table("step", "recorded", "reproduced", "", right=("step",))
        steps = sorted(self.planned.wanted)
        reached = len([step for step in steps if step <= max(self.comparison.compared, default=0)])
        first = max(0, min(reached - VISIBLE_ROWS // 2, len(steps) - VISIBLE_ROWS))
        for step in steps[first : first + VISIBLE_ROWS]:
            compared = self.comparison.compared.get(step)
            digest = (compared.digest or "none")[:16] if compared else ""
            verdict = ("[green]same[/]" if compared.same else "[bold red]differs[/]") if compared else ""
            made.add_row(str(step), self.planned.wanted[step].digest[:16], digest, verdict)
        return made

    def _line(self) -> str:
        view = self.view
        reason = f": {render.escape(view.reason)}" if view.reason else ""
        done = f"{len(self.comparison.compared)} of {len(self.planned.wanted)} compared"
        return f"{view.run_id} {render.state(view.state)}{reason}, {done}"


def _line_of(compared: StateComparison) -> str:
    digest = (compared.digest or "none")[:16]
    verdict = "same" if compared.same else f"differs from {compared.recorded.digest[:16]}"
    return f"step {compared.recorded.step}: state {digest}, {verdict}"


async def _follow_reproduction(connection: Connection, screen: ReproductionScreen) -> None:
    """Follow the second training until the comparison is complete or the run has ended."""
    followed = FollowedRun(connection, screen.view.run_id)
    with screen.open():
        async for batch in connection.follow(streams.FACTS, subjects.run(screen.view.run_id)):
            await followed.update(batch)
            screen.view = followed.view
            for message in batch:
                screen.update(message)
                if screen.comparison.is_decided:
                    return
            if screen.view.ended and followed.is_complete:
                return


async def _conclude(client: AsyncClient, recorded: RecordedRun, screen: ReproductionScreen) -> ReproductionResult:
    comparison, view = screen.comparison, screen.view
    difference = comparison.difference
    if difference is None and not comparison.reached_end:
        raise UsageError(
            f"the reproduction {view.run_id} {_describe_end(view)} before its last state was reached, so nothing is "
            f"proved: {len(comparison.compared)} of {len(comparison.wanted)} states were compared and the same",
        )
    if view.state not in TERMINAL_STATES and (difference is not None or not screen.planned.to_the_end):
        await _cancel_if_running(client, view.run_id, "compared: it is not needed any more")
    result = ReproductionResult(recorded.run_id, view.run_id, len(comparison.compared), len(comparison.wanted))
    result.note = screen.planned.note
    if difference is None:
        last = comparison.wanted[max(comparison.wanted)]
        result.final_step, result.final_digest = last.step, last.digest
        return result
    result.step, result.same_up_to = difference.recorded.step, comparison.last_same
    result.recorded_digest, result.reproduced_digest = difference.recorded.digest, difference.digest
    ours = comparison.environment(difference.commit.generation)
    result.environment = exactness.differences(recorded.environment(difference.recorded.commit.generation), ours)
    await _find_different_tensors(client.address, comparison.first_comparable_difference or difference, result)
    return result


def _describe_end(view: RunView) -> str:
    """Describe in a phrase how a run ended."""
    return f"is {view.state}" + (f" ({view.reason})" if view.reason else "")


async def _find_different_tensors(
    address: StackAddress, difference: StateComparison, result: ReproductionResult
) -> None:
    """Add which tensors differ, from the hashes that are stored with both checkpoints."""
    pair = [StoredCheckpoint(commit) for commit in (difference.recorded.commit, difference.commit)]
    try:
        recorded, repeated = await read_digests_of(address, pair)
    except TrainbusError as error:
        result.note = " ".join(filter(None, (result.note, f"the tensors cannot be compared: {error}")))
        return
    result.differing = [name for name, _ in digests.differences(recorded, repeated)]
    result.tensor, result.tensor_step = first_different_tensor(result.differing), difference.recorded.step


async def _cancel_if_running(client: AsyncClient, run_id: str, reason: str) -> None:
    if await read_end(client.connection, run_id) is not None:
        return
    try:
        await client.connection.publish_request(CancelRequested(run_id=run_id, reason=reason))
    except TrainbusError:
        if await read_end(client.connection, run_id) is None:  # else it was done sooner than the request arrived
            raise


def _print(result: ReproductionResult, *, as_json: bool) -> None:
    if as_json:
        print(render.as_json({"same": result.same, **asdict(result)}))
        return
    console = render.console()
    if result.same:
        missing = f" (of {result.of})" if result.compared < result.of else ""
        console.print(
            f"[green]identical[/] at {result.compared}{missing} checkpoints, final digest {result.final_digest} "
            f"at step {result.final_step}",
            soft_wrap=True,
        )
        return
    since = f"the same up to step {result.same_up_to}" if result.same_up_to is not None else "never the same"
    console.print(f"[bold red]differs[/] at step {result.step}, {since}", soft_wrap=True)
    console.print(f"  recorded   {result.recorded_digest}\n  reproduced {result.reproduced_digest}", soft_wrap=True)
    if result.tensor is not None:
        more = [name for name in result.differing if name != result.tensor]
        others = ", ".join(more[:MAX_LISTED_TENSORS]) + (" ..." if len(more) > MAX_LISTED_TENSORS else "")
        where = f" (at step {result.tensor_step})" if result.tensor_step != result.step else ""
        console.print(f"  first differing tensor{where}: [bold]{render.escape(result.tensor)}[/]", soft_wrap=True)
        if more:
            console.print(f"  {len(more)} more: {render.escape(others)}", style="dim", soft_wrap=True)
    for line in result.environment:
        console.print(f"  another environment: {render.escape(line)}", soft_wrap=True)
    if result.note:
        print(result.note, file=sys.stderr)
