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

from contracts import exactness, subjects, topology
from contracts.events.train import CancelRequested
from trainbus.client import runs as reading
from trainbus.client.address import Address
from trainbus.client.connection import Link, connect, run_id_of
from trainbus.client.errors import CliError
from trainbus.client.reproduction import CannotReproduce, Compared, Comparison, Plan, Recorded, first_differing, plan
from trainbus.client.state import ENDED, RunView, narrate
from trainbus.commands import render

SAME, DIFFERS, CANNOT = 0, 1, 2
#: Rows of the table that stand on the screen at a time.
SHOWN = 15
#: Names of differing tensors that are listed.
LISTED = 8


@dataclass(slots=True)
class Result:
    """How a reproduction came out."""

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
    #: Where it was looked at: the first difference whose recorded checkpoint is still there.
    tensor_step: int | None = None
    differing: list[str] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def same(self) -> bool:
        return self.step is None


async def reproduce(address: Address, name: str, *, start_step: int | None, slots: int | None, as_json: bool) -> int:
    """Train a run again and compare; 0 the same, 1 not the same. Raises CliError (2) where it cannot be told."""
    async with connect(address) as link:
        run_id = await reading.resolve(link, name)
        recorded = Recorded(run_id)
        for stored in await link.read(subjects.run(run_id)):
            recorded.apply(stored.event)
        try:
            planned = plan(recorded, start_step, slots)
        except CannotReproduce as error:
            raise CliError(str(error), CANNOT) from None
        new = run_id_of(await link.request(planned.request))
        watching = Watching(new, planned, quiet=as_json)
        try:
            await _follow(link, watching)
        except asyncio.CancelledError:
            await asyncio.shield(_stop(link, new, "the reproduction was given up"))
            raise
        result = await _conclude(address, link, recorded, watching)
    _print(result, as_json=as_json)
    return SAME if result.same else DIFFERS


class Watching:
    """The second training as it goes on: folds its facts and shows the comparison."""

    def __init__(self, run_id: str, planned: Plan, *, quiet: bool) -> None:
        self.view, self.planned = RunView(run_id), planned
        self.comparison = Comparison(planned.wanted, planned.kept)
        self._board = reading.board_of([])
        self._board.runs[run_id] = self.view
        self._console = render.console()
        self._quiet = quiet
        self.live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal and not quiet else None

    def screen(self) -> AbstractContextManager[Any]:
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

    def take(self, stored: Any) -> None:
        """Fold one fact and show what it changes."""
        self._board.apply(stored.sequence, stored.envelope.time, stored.event)
        compared = self.comparison.apply(stored.event)
        if self.live is not None:
            self.live.update(Group(self._table(), self._line()), refresh=True)
        elif not self._quiet and (text := _line_of(compared) if compared else narrate(stored.event)):
            self._console.print(f"[dim]{stored.envelope.time:%H:%M:%S}[/] {render.escape(text)}", soft_wrap=True)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        # Where retention has deleted the recorded checkpoint, the next one that is there tells the tensor.
        return self.comparison.nameable is not None or self.comparison.done or self.view.state in ENDED

    def _table(self) -> Table:
        made = render.table("step", "recorded", "reproduced", "", right=("step",))
        steps = sorted(self.planned.wanted)
        reached = len([step for step in steps if step <= max(self.comparison.compared, default=0)])
        first = max(0, min(reached - SHOWN // 2, len(steps) - SHOWN))
        for step in steps[first : first + SHOWN]:
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


def _line_of(compared: Compared) -> str:
    digest = (compared.digest or "none")[:16]
    verdict = "same" if compared.same else f"differs from {compared.recorded.digest[:16]}"
    return f"step {compared.recorded.step}: state {digest}, {verdict}"


async def _follow(link: Link, watching: Watching) -> None:
    """Follow the second training until it is told whether it is the same."""
    with watching.screen():
        async for batch in link.follow(topology.FACTS, subjects.run(watching.view.run_id)):
            for stored in batch:
                watching.take(stored)
                if watching.over:
                    return


async def _conclude(address: Address, link: Link, recorded: Recorded, watching: Watching) -> Result:
    comparison, view = watching.comparison, watching.view
    difference = comparison.difference
    if difference is None and not comparison.done:
        raise CliError(
            f"the reproduction {view.run_id} {_end_of(view)} before its last state was reached, so nothing is proved: "
            f"{len(comparison.compared)} of {len(comparison.wanted)} states were compared and the same",
            CANNOT,
        )
    if view.state not in ENDED and (difference is not None or not watching.planned.to_the_end):
        await _stop(link, view.run_id, "compared: it is not needed any more")
    result = Result(recorded.run_id, view.run_id, len(comparison.compared), len(comparison.wanted))
    result.note = watching.planned.note
    if difference is None:
        last = comparison.wanted[max(comparison.wanted)]
        result.final_step, result.final_digest = last.step, last.digest
        return result
    result.step, result.same_up_to = difference.recorded.step, comparison.last_same
    result.recorded_digest, result.reproduced_digest = difference.recorded.digest, difference.digest
    ours = comparison.environment(difference.commit.generation)
    result.environment = exactness.differences(recorded.environment(difference.recorded.commit.generation), ours)
    await _name_tensor(address, comparison.nameable or difference, result)
    return result


def _end_of(view: RunView) -> str:
    """How a run ended, in a phrase."""
    return f"is {view.state}" + (f" ({view.reason})" if view.reason else "")


async def _name_tensor(address: Address, difference: Compared, result: Result) -> None:
    """Find which tensors differ, from the lists of hashes that lie with both checkpoints."""
    from services.checkpoint.core.digests import differences
    from trainbus.client.checkpoints import Kept, load, store, tensor_digests

    commits = (difference.recorded.commit, difference.commit)
    try:
        async with store(address) as objects:
            recorded, ours = [await tensor_digests(objects, await load(objects, Kept(commit))) for commit in commits]
    except CliError as error:
        result.note = " ".join(filter(None, (result.note, f"the tensor cannot be named: {error}")))
        return
    result.differing = [name for name, _ in differences(recorded, ours)]
    result.tensor, result.tensor_step = first_differing(result.differing), difference.recorded.step


async def _stop(link: Link, run_id: str, reason: str) -> None:
    if await reading.ended_fact(link, run_id) is None:
        await link.request(CancelRequested(run_id=run_id, reason=reason))


def _print(result: Result, *, as_json: bool) -> None:
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
    since = f"the same up to step {result.same_up_to}" if result.same_up_to is not None else "not once the same"
    console.print(f"[bold red]differs[/] at step {result.step}, {since}", soft_wrap=True)
    console.print(f"  recorded   {result.recorded_digest}\n  reproduced {result.reproduced_digest}", soft_wrap=True)
    if result.tensor is not None:
        more = [name for name in result.differing if name != result.tensor]
        others = ", ".join(more[:LISTED]) + (" ..." if len(more) > LISTED else "")
        where = f" (at step {result.tensor_step})" if result.tensor_step != result.step else ""
        console.print(f"  first differing tensor{where}: [bold]{render.escape(result.tensor)}[/]", soft_wrap=True)
        if more:
            console.print(f"  {len(more)} more: {render.escape(others)}", style="dim", soft_wrap=True)
    for line in result.environment:
        console.print(f"  another environment: {render.escape(line)}", soft_wrap=True)
    if result.note:
        print(result.note, file=sys.stderr)
