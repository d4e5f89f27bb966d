"""Commands about runs: submit, list, explain, follow and cancel them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from trainbus.client.errors import TrainbusError
from trainbus.client.submit_options import SubmitOptions
from trainbus.commands import render, submit_flags
from trainbus.commands.options import (
    MILESTONES,
    Json,
    Rank,
    Run,
    command,
    flags_of,
    open_bus,
    parse_rank,
)
from trainbus.commands.times import parse_duration, parse_since, parse_time

if TYPE_CHECKING:
    from trainbus.client.client import AsyncClient
    from trainbus.client.stored_event import StoredEvent
    from trainbus.client.views import RunView, StudyView

app = typer.Typer()
PANEL = "Runs"


@command(
    app,
    options=flags_of(SubmitOptions, submit_flags.SUBMIT_FLAGS),
    announce=submit_flags.print_check,
    rich_help_panel=PANEL,
    context_settings={"allow_extra_args": True},
)
async def submit(
    client: AsyncClient,
    context: typer.Context,
    project: Annotated[Path | None, typer.Argument(help="The folder with the code; it is packed and uploaded.")] = None,
    task: Annotated[str | None, typer.Argument(help="What to train, module:Class. Or give --command.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print output and progress until the run ends; exit 1 if it fails.")
    ] = False,
    rank: Rank = "0",
    as_json: Json = False,
    **options: Unpack[SubmitOptions],
) -> None:
    """Pack a project, upload it and request its training: `trainbus submit ./project task:MyTask`."""
    submit_flags.parse_options(options, context.args)
    submitted = await client.submit(project, task, **options)
    submit_flags.print_findings(submitted.notes, submitted.unchecked)
    if as_json:
        named = {"run_id": submitted.run_id, "name": submitted.name, "event_id": submitted.event_id}
        print(render.as_json({**named, "code": submitted.request.code}))
    else:
        print(f"{submitted.run_id}  {submitted.name}{submit_flags.describe_package(submitted.package)}", flush=True)
    if follow:
        from trainbus.commands.run_output import print_run

        # JSON stays alone on stdout.
        await print_run(client, submitted.run_id, parse_rank(rank), stderr=as_json)
        return
    from contracts import subjects
    from trainbus.client.capacity import PATIENCE_S, find_shortage
    from trainbus.client.runs import find_rejection

    shortage, rejection = await asyncio.gather(
        find_shortage(client.connection, submitted.request),
        find_rejection(client.connection, subjects.run(submitted.run_id), PATIENCE_S),
    )
    if rejection:
        raise TrainbusError(f"run {submitted.run_id} was {rejection}")
    if shortage:
        print(f"{submitted.run_id}: {shortage}", file=sys.stderr)


@command(app, rich_help_panel=PANEL)
async def attach(client: AsyncClient, name: Run, rank: Rank = "0") -> None:
    """Follow a run as `submit --follow` does: its output, its progress and what happens to it."""
    from trainbus.commands.run_output import print_run

    await print_run(client, await client.find_run(name), parse_rank(rank))


@command(app, rich_help_panel=PANEL)
async def wait(
    client: AsyncClient,
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs, unique starts of them, or names.")],
    until: Annotated[
        str, typer.Option("--for", metavar="STATE", help=f"What to wait for: ended, or {', '.join(MILESTONES)}.")
    ] = "ended",
    limit: Annotated[str | None, typer.Option("--timeout", help="Give up after 90s, 10m or 2h: exit 124.")] = None,
    as_json: Json = False,
) -> int:
    """Wait for runs; exit 0 if each completed (or got as far as --for says), 1 if one did not, 124 after --timeout."""
    from trainbus.commands.run_wait import wait_for_runs

    timeout_s = None if limit is None else parse_duration(limit)
    return await wait_for_runs(client, names, until, timeout_s, as_json=as_json)


@command(app, rich_help_panel=PANEL)
async def ps(
    client: AsyncClient,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also all runs that ended.")] = False,
    states: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only runs in this state; may be given again.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Only runs of this user.")] = None,
    team: Annotated[str | None, typer.Option(help="Only runs of this team and its parts.")] = None,
    model: Annotated[str | None, typer.Option(help="Only runs for this registered model.")] = None,
    name: Annotated[str | None, typer.Option(help="Only runs of this name; * is anything: 'digits*'.")] = None,
    study: Annotated[
        str | None, typer.Option(help="Only the trials of this study (its id or name), one by one; '*': of all.")
    ] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only runs of this kind: train or evaluate.")] = None,
    evaluates: Annotated[str | None, typer.Option(help="Only the evaluations of the run of this id.")] = None,
    search: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only runs with this in their name, user, team or model.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only runs requested since: 10m, 2h, 1d, or a time (UTC).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the newest N.")] = None,
    as_json: Json = False,
) -> None:
    """List the runs: those that have not ended and the newest 20 that have; with a filter, all that it selects.

    The trials of a study are one row, but for --study and --json.
    """
    from trainbus.client.run_filter import RunFilter
    from trainbus.client.run_list import by_request, list_studies
    from trainbus.commands import run_tables

    now = render.utc_now()
    start = None if since is None else parse_since(since, now)
    is_folded = study is None and not as_json
    chosen = RunFilter(
        states=tuple(states or ()),
        user=user,
        team=team,
        model=model,
        name=name,
        since=start,
        limit=limit,
        kind=kind,
        study=study,
        text=search,
        evaluates=evaluates,
        trials=not is_folded,
    )
    include_ended = everything or not chosen.is_empty
    views = await client.runs(include_ended=include_ended, matching=chosen)
    if as_json:
        print(render.as_json(list(map(run_tables.summarize_run, views))))
        return
    folded = await list_studies(client.connection, include_ended=include_ended, matching=chosen) if is_folded else []
    rows: list[RunView | StudyView] = [*views, *folded]
    if rows:
        newest = sorted(rows, key=by_request)[-limit if limit else 0 :]
        console = render.console()
        console.print(run_tables.render_runs(newest, now, console.width))
    elif chosen.is_empty:
        print("no runs yet: `trainbus submit PROJECT task:Class`, or publish train.requested")
    else:
        print("no such runs: `trainbus ps --all` lists every run")


@command(app, rich_help_panel=PANEL)
async def show(client: AsyncClient, name: Run, as_json: Json = False) -> None:
    """Show one run with its parameters, metrics, pages and timeline."""
    from trainbus.commands import run_tables

    view = await client.run(name)
    links = run_tables.find_links(view, client.address)
    if as_json:
        print(render.as_json({**run_tables.run_to_plain(view), "links": links}))
        return
    console = render.console()
    console.print(run_tables.render_run(view, links))
    if view.timeline:
        console.print(run_tables.render_timeline(view.timeline, view.requested_at))
    if view.is_timeline_cut:
        console.print(f"(its newest facts; all of them: `trainbus events {view.run_id}`)", style="dim")
    if view.log_tail and view.state != "completed":
        of = "its output" if view.ended else "the attempt before"
        console.print(f"the last lines of {of}:", style="dim")
        console.print(render.visible("\n".join(view.log_tail)), markup=False, soft_wrap=True)


@command(app, rich_help_panel=PANEL)
async def why(
    client: AsyncClient,
    name: Run,
    at: Annotated[
        str | None, typer.Option("--at", help="At a time in the past: 2026-11-20T14:00 (UTC), 14:00 or '2 h ago'.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain why a run is in its state, or was at a time in the past."""
    if at is not None:
        await _print_past_reason(client, name, at, as_json=as_json)
        return
    found = await client.why(name)
    if as_json:
        named = {"run_id": found.run_id, "state": found.state, "why": found.reason, "answered_by": found.answered_by}
        print(render.as_json({**named, **found.details, "warnings": found.warnings}))
        return
    from contracts.run_states import TERMINAL_STATES
    from trainbus.commands.run_tables import print_wait

    verb = "" if found.state in TERMINAL_STATES else "is "
    head = f"{found.run_id} ({render.escape(found.name)}) {verb}{render.state(found.state)}"
    render.console().print(f"{head}: {render.escape(found.reason)}", soft_wrap=True)
    if found.state == "failed":
        from contracts.tracebacks import find_failure_lines

        for line in find_failure_lines((await client.run(found.run_id)).log_tail, found.reason):
            render.console().print(render.visible(line), markup=False, soft_wrap=True)
    print_wait(found.details)
    for text in found.warnings:
        render.console().print(f"[yellow]warning:[/] {render.escape(text)}", soft_wrap=True)
    if found.unanswered:
        print("(from the log: the scheduler does not answer; `trainbus doctor` shows what is wrong)", file=sys.stderr)


async def _print_past_reason(client: AsyncClient, name: str, at: str, *, as_json: bool) -> None:
    """Print why a run was in its state at a time in the past."""
    from trainbus.commands.progress import entries_with_bar

    time = parse_time(at, render.utc_now())
    run_id = await client.find_run(name)
    async with open_bus(client.address) as bus:
        from trainbus.operate.history.explanation import explain_past
        from trainbus.operate.history.fact_log import BusLog

        entries = entries_with_bar(await BusLog.open(bus), f"folding up to {time:%Y-%m-%d %H:%M:%S}")
        found = await explain_past(bus, run_id, time, entries)
    if as_json:
        print(render.as_json(found.details))
        return
    policy = f"[dim](policy {render.escape(found.details['policy']['name'])}, sequence {found.details['sequence']})[/]"
    head = f"{run_id} ({render.escape(found.name)}) was {render.state(found.state)}"
    text = f"{head} at {time:%Y-%m-%d %H:%M:%S} UTC {policy}: {render.escape(found.reason)}"
    render.console().print(text, soft_wrap=True)


@command(app, rich_help_panel=PANEL)
async def logs(
    client: AsyncClient,
    name: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends; exit 1 if it fails.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="The last N lines, and with --follow those that come.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Lines printed since: 10m, 2h, 1d, or a time (UTC).")] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Lines with this text (a regular expression).")
    ] = None,
    rank: Rank = "all",
    raw: Annotated[
        bool, typer.Option("--raw", help="On a terminal, too, print control characters as they are.")
    ] = False,
) -> None:
    """Print a run's output.

    On a terminal its colours stay and all other control characters are made visible.
    """
    from contracts import streams, subjects
    from contracts.events.run import RunCompleted
    from contracts.texts import describe
    from trainbus.client.runs import read_end

    run_id = await client.find_run(name)
    number = parse_rank(rank)
    start = None if since is None else parse_since(since, render.utc_now())
    placed = await client.connection.read_last(streams.FACTS, subjects.fact("run", run_id, "placed"))
    has_several_ranks = placed is not None and placed.event.world_size > 1 and number is None
    silent = True
    try:
        async for line_rank, line in client.logs(
            run_id, follow=follow, rank=number, tail=tail, since=start, pattern=grep
        ):
            silent = False
            line = line if raw or not sys.stdout.isatty() else render.make_safe(line)
            print(f"[{line_rank}] {line}" if has_several_ranks else line, flush=follow)
    except asyncio.CancelledError:
        from trainbus.commands.run_output import describe_departure

        print(describe_departure(run_id), file=sys.stderr, flush=True)
        raise
    if silent:
        chosen = (tail, start, grep, number) != (None, None, None, None)
        what = "no such line" if chosen else "nothing"
        print(f"run {run_id} has printed {what}; `trainbus events --run {run_id}` shows its facts", file=sys.stderr)
    if follow and not isinstance(end := await read_end(client.connection, run_id), RunCompleted):
        raise TrainbusError(f"run {run_id} {describe(end)}")


@command(app, rich_help_panel=PANEL)
async def events(
    client: AsyncClient,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events come.")] = False,
    of_run: Annotated[str | None, typer.Option("--run", help="Only the events of this run.")] = None,
    start: Annotated[int | None, typer.Option("--from", min=1, help="Start at this sequence number.")] = None,
    tail: Annotated[int, typer.Option(min=0, help="Without --run and --from: the last N events.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one CloudEvent (JSON) per line.")] = False,
) -> None:
    """Print the log of facts."""
    console = render.console()
    async for message in client.events(of_run, follow=follow, start_sequence=start, tail=tail):
        if as_json:
            print(json.dumps(message.to_cloud_event()), flush=True)
        else:
            console.print(_format_event(message), soft_wrap=True)
            sys.stdout.flush()


def _format_event(message: StoredEvent) -> str:
    """Return one line about an event: its time, its sequence number, its subject and its text."""
    aggregate, name, fact = message.subject.split(".")[:3]
    # A text that begins with the fact's name does not repeat it.
    text = message.text.removeprefix(fact.replace("_", " ")).lstrip(": ")
    return (
        f"[dim]{message.time:%H:%M:%S.%f}"[:-3]
        + f"[/] [dim]{message.sequence:>6}[/] {aggregate:<7} [cyan]{name[:14]:<14}[/] "
        + f"[bold]{fact:<20}[/] {render.escape(text)}"
    ).rstrip()


@command(app, rich_help_panel=PANEL)
async def cancel(
    client: AsyncClient,
    name: Run,
    reason: Annotated[str, typer.Option(help="Why; it is written into the log.")] = "cancelled by request",
) -> None:
    """Stop a run for good. Its checkpoints stay."""
    run_id = await client.find_run(name)
    answer = await client.cancel(run_id, reason)
    print(f"{run_id}: {answer or 'cancellation requested; the scheduler has not answered yet'}")


@command(app, rich_help_panel=PANEL)
async def reproduce(
    client: AsyncClient,
    name: Run,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="Start from the run's checkpoint of this step.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots for it; default: as the run requested.")] = None,
    as_json: Json = False,
) -> int:
    """Train a run again and compare its states to the bit; exit 0 if all are the same, 1 if not, 2 if it cannot be."""
    from trainbus.commands.reproduce import reproduce_run

    return await reproduce_run(client, name, start_step=start, slots=slots, as_json=as_json)
