"""Commands that look: they fold the log themselves, so they work when every service is down."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

from contracts import subjects, topology
from contracts.events import run
from trainbus.client.address import Address
from trainbus.client.connection import Link, Stored, connect
from trainbus.client.errors import FAILED, USAGE, CliError
from trainbus.client.state import Board, RunView, describe, fold
from trainbus.commands import render

#: What a table of runs needs; the many other facts of long runs are left on the server.
RUN_FACTS = tuple(
    subjects.fact("run", subjects.WILDCARD, name)
    for name in (
        "accepted", "rejected", "prepared", "prepare_failed", "queued", "waiting", "placed", "started", "preempting",
        "cancelling", "released", "exited", "completed", "failed", "cancelled", "evaluated", "promoted", "not_promoted",
    )
)  # fmt: skip
CHECKPOINT_FACTS = tuple(
    subjects.fact("run", subjects.WILDCARD, name) for name in ("checkpoint_committed", "checkpoint_deleted")
)
#: The newest messages of PROGRESS that are searched first for where a run is.
NEWEST_PROGRESS = 200
WHY_TIMEOUT_S = 1.0
NODE_FACTS = (subjects.node(), *(subjects.fact("run", subjects.WILDCARD, name) for name in (
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
        print(render.as_json([render.summary(each) for each in views]))
    elif views:
        console = render.console()
        console.print(render.runs(views, render.utc_now(), console.width))
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
        print(render.as_json(render.whole(view)))
        return
    console = render.console()
    console.print(render.details(view, render.utc_now()))
    console.print(render.timeline(view.timeline, view.requested_at))
    if view.log_tail:
        console.print("the last lines of its output:", style="dim")
        console.print(render.visible("\n".join(view.log_tail)), markup=False, soft_wrap=True)


#: What the scheduler says about a run that waits besides the sentence.
WHY_MORE = ("code", "changes", "holders", "start_p10", "start_p50", "start_p90")


async def why(address: Address, name: str, *, as_json: bool) -> None:
    """Print why a run is where it is: in the scheduler's words, or as the log has it if that does not answer."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        view = board_of(await link.read(subjects.run(run_id))).runs[run_id]
        asked = None if view.ended else await link.ask("scheduler", "why", {"run_id": run_id}, WHY_TIMEOUT_S)
    known = asked is not None and asked.get("state") != "unknown"
    answer = str(asked["message"]) if asked is not None and known else recorded_why(view)
    if as_json:
        by = "scheduler" if known else "log"
        more = {name: asked[name] for name in WHY_MORE if name in asked} if asked is not None and known else {}
        print(render.as_json({"run_id": run_id, "state": view.state, "why": answer, "answered_by": by, **more}))
        return
    verb = "" if view.ended else "is "
    name = render.escape(view.name)
    render.console().print(
        f"{run_id} ({name}) {verb}{render.state(view.state)}: {render.escape(answer)}", soft_wrap=True
    )
    if asked is not None and known:
        render.why_it_waits(asked)
    if asked is None and not view.ended:
        print("(as the log has it: the scheduler does not answer; `trainbus doctor` looks closer)", file=sys.stderr)


def recorded_why(view: RunView) -> str:
    """Why a run is where it is, as far as its facts say."""
    match view.state:
        case "accepted":
            return "it was accepted and will be queued at once"
        case "preparing":
            return view.reason or "its data is being ingested and sharded"
        case "queued":
            return view.reason or "the scheduler is about to place it"
        case "starting":
            return f"it was placed on {view.slots_got} slots and its ranks are starting"
        case "running":
            return f"it runs on {view.slots_got} slots of the {view.slots_min} to {view.slots_max} it can use"
        case "preempting" | "cancelling":
            return f"it was asked to let go: {view.reason}"
        case "completed" if not view.verdict:
            return "every rank ended well"
        case "completed":
            return f"{view.verdict}, {view.verdict_reason}"
        case _:
            return view.reason or "no reason was given"


async def logs(address: Address, name: str, *, follow: bool) -> None:
    """Print a run's output; with ``follow`` until the run ends, and fail if it fails."""
    async with connect(address) as link:
        run_id = await resolve(link, name)
        ranks = await _ranks(link, run_id)
        silent = True
        async for stored in _until_ended(link, run_id, topology.LOGS, subjects.log(run_id), follow=follow):
            event: run.RunLog = stored.event
            silent = False
            for line in event.lines:
                print(f"[{event.rank}] {line}" if ranks > 1 else line, flush=follow)
        if silent:
            print(f"run {run_id} has printed nothing; `trainbus events --run {run_id}` is its life", file=sys.stderr)
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
    # Where the text begins with the fact's own name it is not said twice.
    text = describe(stored.event).removeprefix(fact.replace("_", " ")).lstrip(": ")
    return (
        f"[dim]{stored.envelope.time:%H:%M:%S.%f}"[:-3]
        + f"[/] [dim]{stored.sequence:>6}[/] {aggregate:<7} [cyan]{name[:14]:<14}[/] "
        + f"[bold]{fact:<20}[/] {render.escape(text)}"
    ).rstrip()


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


async def nodes(address: Address, *, as_json: bool) -> None:
    """Print the nodes and what runs on them."""
    async with connect(address) as link:
        board = board_of(await link.read(*NODE_FACTS))
    views = sorted(board.nodes.values(), key=lambda each: each.node_id)
    if as_json:
        print(render.as_json(views))
    else:
        found = render.nodes(views, board, render.utc_now())
        render.console().print(found if views else "no node has joined yet: `trainbus service worker` starts one")


async def models(address: Address, *, as_json: bool) -> None:
    """Print each model's champion."""
    async with connect(address) as link:
        board = board_of(await link.read(subjects.model()))
    if as_json:
        print(render.as_json(list(board.models.values())))
    else:
        found = render.models(board.models.values(), render.utc_now())
        render.console().print(found if board.models else "no champions yet: a run with `evaluation` competes for one")


async def resolve(link: Link, name: str) -> str:
    """The id of the run that ``name`` means: an id, the unique start of one, or a run's name.

    Raises:
        CliError: there is none (with the closest names) or more than one.
    """
    exact = await link.read(subjects.run(name)) if name.isalnum() else []
    if exact:
        return name
    board = board_of(
        await link.read(
            subjects.fact("run", subjects.WILDCARD, "accepted"), subjects.fact("run", subjects.WILDCARD, "rejected")
        )
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
    subject = subjects.progress(view.run_id)
    last = await link.last(topology.PROGRESS, subject)
    if last is None or last.event.generation < view.generation:
        return
    reach = NEWEST_PROGRESS
    while True:
        # The newest message may be the node's own measurements, and each tells some of the metrics alone.
        start = max(1, last.sequence - reach)
        stored = await link.read(subject, stream=topology.PROGRESS, start_sequence=start)
        told: list[run.RunProgress] = [
            each.event for each in stored if each.event.kind == "training" and each.event.generation >= view.generation
        ]
        older_ones_remain = start > 1 and (not stored or stored[0].event.generation >= view.generation)
        if told or not older_ones_remain:
            break
        reach *= 10
    for event in told:
        view.step, view.samples_consumed = (
            max(view.step, event.step),
            max(view.samples_consumed, event.samples_consumed),
        )
        view.total_steps, view.epoch = event.total_steps or view.total_steps, max(view.epoch, event.epoch)
        for point in event.points:
            view.metrics.update(point.values)
