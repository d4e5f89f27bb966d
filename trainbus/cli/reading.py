"""Commands that look: they fold the log themselves, so they work when every service is down."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

from contracts import subjects, topology
from contracts.events import run
from trainbus.cli import render
from trainbus.cli.address import Address
from trainbus.cli.board import Board, RunView, describe, fold
from trainbus.cli.errors import FAILED, USAGE, CliError
from trainbus.cli.link import Link, Stored, connect

#: What a table of runs needs; the many other facts of long runs are left on the server.
RUN_FACTS = tuple(
    subjects.fact("run", subjects.ANY, name)
    for name in (
        "accepted", "rejected", "prepared", "prepare_failed", "queued", "waiting", "placed", "started", "preempting",
        "released", "exited", "completed", "failed", "cancelled", "evaluated", "promoted", "not_promoted",
    )
)  # fmt: skip
CHECKPOINT_FACTS = tuple(
    subjects.fact("run", subjects.ANY, name) for name in ("checkpoint_committed", "checkpoint_deleted")
)
NODE_FACTS = (subjects.node(), *(subjects.fact("run", subjects.ANY, name) for name in (
    "accepted", "placed", "released", "exited", "completed", "failed", "cancelled", "queued",
)))  # fmt: skip


def board_of(stored: Iterable[Stored]) -> Board:
    return fold((each.sequence, each.envelope.time, each.event) for each in stored)


async def ps(address: Address, *, everything: bool, as_json: bool) -> None:
    """Print the runs: those at work and the newest that ended."""
    async with connect(address) as link:
        board = board_of(await link.read(*RUN_FACTS, *CHECKPOINT_FACTS))
        views = list(board.runs.values())
        if not everything:
            views = [each for each in views if not each.ended] + [each for each in views if each.ended][-20:]
            views.sort(key=lambda each: list(board.runs).index(each.run_id))
        for view in views:
            if not view.ended:
                await add_progress(link, view)
    if as_json:
        print(render.as_json([{**render._plain(each), "timeline": None} for each in views]))
    elif views:
        render.console().print(render.runs(views, render.utc_now()))
    else:
        print("no runs yet: `trainbus submit PROJECT task:Class`, or publish train.requested")


async def show(address: Address, name: str, *, as_json: bool) -> None:
    """Print all there is to know about one run."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        view = board_of(await link.read(subjects.run(run_id))).runs[run_id]
        if not view.ended:
            await add_progress(link, view)
    if as_json:
        print(render.as_json(view))
        return
    console = render.console()
    console.print(render.details(view, render.utc_now()))
    console.print(render.timeline(view.timeline, view.requested_at))
    if view.log_tail:
        console.print("the last lines of its output:", style="dim")
        console.print("\n".join(view.log_tail), markup=False)


async def why(address: Address, name: str, *, as_json: bool) -> None:
    """Print why a run is where it is."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        view = board_of(await link.read(subjects.run(run_id))).runs[run_id]
    answer = {
        "accepted": "it was accepted and will be queued at once",
        "preparing": "its data is being ingested and sharded",
        "queued": view.reason or "the scheduler is about to place it",
        "starting": f"it was placed on {view.slots_got} slots and its ranks are starting",
        "running": f"it runs on {view.slots_got} slots of the {view.slots_min} to {view.slots_max} it can use",
        "preempting": f"it was asked to let go: {view.reason}",
        "completed": f"it completed{'; ' + view.verdict + ': ' + view.verdict_reason if view.verdict else ''}",
    }.get(view.state, f"it was {view.state}: {view.reason}" if view.state != "failed" else f"it failed: {view.reason}")
    if as_json:
        print(render.as_json({"run_id": run_id, "state": view.state, "why": answer}))
        return
    render.console().print(f"{run_id} ({view.name}) is {render.state(view.state)}: {render.escape(answer)}")


async def logs(address: Address, name: str, *, follow: bool) -> None:
    """Print a run's output; with ``follow`` until the run ends, and fail if it fails."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        ranks = await _ranks(link, run_id)
        async for stored in _until_ended(link, run_id, topology.LOGS, subjects.log(run_id), follow=follow):
            event: run.RunLog = stored.event
            for line in event.lines:
                print(f"[{event.rank}] {line}" if ranks > 1 else line, flush=follow)
        if follow:
            await exit_as_run(link, run_id)


async def _ranks(link: Link, run_id: str) -> int:
    placed = await link.last(topology.FACTS, subjects.fact("run", run_id, "placed"))
    return placed.event.world_size if placed is not None else 1


async def _until_ended(
    link: Link, run_id: str, stream: topology.Stream, subject: str, *, follow: bool
) -> AsyncIterator[Stored]:
    """What is on a subject now or, with ``follow``, until the run has ended and nothing more comes."""
    idle = 0
    async for batch in link.follow(stream, subject, until_caught_up=not follow):
        for stored in batch:
            yield stored
        idle = 0 if batch else idle + 1
        if idle >= 2 and await ended_fact(link, run_id) is not None:
            return


async def ended_fact(link: Link, run_id: str) -> Any | None:
    """The fact that ended a run, if it has ended."""
    for fact in run.TERMINAL:
        stored = await link.last(topology.FACTS, subjects.fact("run", run_id, fact.fact))
        if stored is not None:
            return stored.event
    return None


async def exit_as_run(link: Link, run_id: str) -> None:
    """Fail if the run did."""
    end = await ended_fact(link, run_id)
    if not isinstance(end, run.RunCompleted):
        raise CliError(f"run {run_id} {describe(end)}", FAILED)


async def events(
    address: Address, *, follow: bool, run_name: str | None, start: int | None, tail: int, as_json: bool
) -> None:
    """Print the log of facts, one line each."""
    async with connect(address) as link:
        filters: tuple[str, ...] = ()
        if run_name is not None:
            filters = (subjects.run(await resolve(link, run_name)),)
        elif start is None:
            start = max(1, await link.last_sequence(topology.FACTS) - tail + 1)
        console = render.console()
        async for batch in link.follow(topology.FACTS, *filters, start_sequence=start or 1, until_caught_up=not follow):
            for stored in batch:
                if as_json:
                    print(json.dumps(cloud_event(stored)), flush=True)
                else:
                    console.print(event_line(stored), soft_wrap=True)
            sys.stdout.flush()


def event_line(stored: Stored) -> str:
    """One event for people: when, its place in the log, about what, what."""
    aggregate, name, fact = stored.subject.split(".")[:3]
    return (
        f"[dim]{stored.envelope.time:%H:%M:%S.%f}[/]"[:-6]
        + f"[/] [dim]{stored.sequence:>6}[/] {aggregate} [cyan]{name[:16]}[/] "
        + f"[bold]{fact}[/] {render.escape(describe(stored.event))}"
    )


def cloud_event(stored: Stored) -> dict[str, Any]:
    """The event in CloudEvents' structured form, with its sequence."""
    envelope = stored.envelope
    return {
        "specversion": "1.0",
        "id": envelope.id,
        "source": envelope.source,
        "type": envelope.type,
        "time": envelope.time.isoformat(),
        "subject": envelope.subject,
        "correlationid": envelope.correlation_id,
        "causationid": envelope.causation_id,
        "sequence": stored.sequence,
        "natssubject": stored.subject,
        "data": stored.event.model_dump(mode="json", exclude_defaults=True),
    }


async def checkpoints(address: Address, name: str, *, as_json: bool) -> None:
    """Print a run's checkpoints that can be restored."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        view = board_of(await link.read(subjects.run(run_id))).runs[run_id]
    found = sorted(view.checkpoints.values(), key=lambda each: each.step)
    if as_json:
        print(render.as_json(found))
        return
    made = render.table("step", "epoch", "samples", "manifest", right=("step", "epoch", "samples"))
    for each in found:
        made.add_row(str(each.step), str(each.epoch), f"{each.samples_consumed:,}", each.uri)
    render.console().print(made if found else f"run {run_id} has no committed checkpoint")


async def nodes(address: Address, *, as_json: bool) -> None:
    """Print the nodes and what runs on them."""
    async with connect(address) as link:
        board = board_of(await link.read(*NODE_FACTS))
    views = sorted(board.nodes.values(), key=lambda each: each.node_id)
    if as_json:
        print(render.as_json(views))
    else:
        render.console().print(render.nodes(views, board, render.utc_now()))


async def datasets(address: Address, *, as_json: bool) -> None:
    """Print what was ingested and sharded."""
    async with connect(address) as link:
        board = board_of(await link.read(subjects.dataset()))
    if as_json:
        print(render.as_json(list(board.datasets.values())))
    else:
        render.console().print(render.datasets(board.datasets.values()))


async def models(address: Address, *, as_json: bool) -> None:
    """Print each model's champion."""
    async with connect(address) as link:
        board = board_of(await link.read(subjects.model()))
    if as_json:
        print(render.as_json(list(board.models.values())))
    else:
        render.console().print(render.models(board.models.values(), render.utc_now()))


async def resolve(link: Link, name: str) -> str:
    """The id of the run that ``name`` means: an id, the unique start of one, or a run's name.

    Raises:
        CliError: there is none (with the closest names) or more than one.
    """
    exact = await link.read(subjects.run(name)) if name.isalnum() else []
    if exact:
        return name
    board = board_of(
        await link.read(subjects.fact("run", subjects.ANY, "accepted"), subjects.fact("run", subjects.ANY, "rejected"))
    )
    found = board.find(name)
    if len(found) == 1:
        return found[0].run_id
    if found:
        listed = "\n".join(f"  {each.run_id}  {each.name}" for each in found[:10])
        raise CliError(f"{name!r} is the start of {len(found)} runs; give more of it:\n{listed}", USAGE)
    known = {each.run_id: each.run_id for each in board.runs.values()}
    known |= {each.name: each.name for each in board.runs.values() if each.name}
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "; `trainbus ps` lists them"
    raise CliError(f"there is no run {name!r}{hint}", USAGE)


async def add_progress(link: Link, view: RunView) -> None:
    """Complete a view of a running run with where its training is now."""
    stored = await link.last(topology.PROGRESS, subjects.progress(view.run_id))
    if stored is None or stored.event.generation < view.generation:
        return
    event: run.RunProgress = stored.event
    if event.kind == "training":
        view.step, view.total_steps, view.epoch = event.step, event.total_steps, event.epoch
        view.samples_consumed = event.samples_consumed
        for point in event.points:
            view.metrics.update(point.values)
