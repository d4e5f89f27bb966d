"""``trainbus demo``: two competing trainings end to end on this machine, shown live and checked at the end.

The demo is a client of the stack: it fills the lake, publishes two requests, and then only reads the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from contracts import subjects, topology
from contracts.base import run_id_for
from contracts.envelope import ANONYMOUS_SOURCE
from contracts.events import dataset, model, node, run
from contracts.pace import TrainingPace
from examples.demo import lake as demo_lake
from examples.demo.project import BROKEN_TASK, EXAMPLE, HELD_TASK, describe_holds, pack_demo_project
from examples.demo.screen import Board, Screen
from examples.demo.served_model import ServedDemo, Wait, show_answer, show_refusal
from services.kit.concurrency import cancel_and_wait
from trainbus.client.address import StackAddress, find_data_dir
from trainbus.client.client import AsyncClient
from trainbus.client.connection import Connection
from trainbus.client.errors import TrainbusError
from trainbus.client.run_list import read_run
from trainbus.client.runs import apply_progress
from trainbus.client.stored_event import StoredEvent
from trainbus.client.submission import upload_package
from trainbus.client.views import RunView
from trainbus.commands import render, run_tables
from trainbus.embedded.launch import (
    READY_TIMEOUT_S,
    StackError,
    StackInfo,
    StackProcess,
    describe_lock,
    is_locked,
)
from trainbus.embedded.layout import DEFAULT_DATA_DIR, StackOptions
from trainbus.operate.connection import connect
from trainbus.operate.stack_settings import read_settings
from trainbus.ranks.step_hold import StepHold

#: Seconds without an event after which the demo fails; a loaded machine is slow, but not silent.
SILENCE_S = 90.0
#: The share of run one after which the second request arrives, and the shares at which run one waits until it has been
#: shrunk, and until it has grown back. Progress is reported some steps late: the first must be reported before the
#: second is reached.
HALF_WAY, SHRINKS_AT, GROWS_AT = 0.4, 0.5, 0.8
STRAGGLER_FACTOR = 20.0
FIRST, SECOND, BROKEN = "digits", "digits-urgent", "digits-broken"
#: Long enough for a second run in the middle, short enough to watch.
TRAINING = {
    "epochs": 24,
    "global_batch": 64,
    # Exact mode: four processes, then two, then four end with the bits of an undisturbed run.
    "logical_ranks": 4,
    "clip_norm": 1.0,
    "precision": "fp32",
    "checkpoint_every_steps": 50,
    "seed": 1,
}
#: So much shorter that the first run is surely better: the default gate promotes nothing less.
SECOND_TRAINING = {**TRAINING, "epochs": 4, "seed": 2}
#: Just a checkpoint: its promotion is refused.
BROKEN_TRAINING = {"max_steps": 2, "global_batch": 64, "seed": 3}


@dataclass(slots=True)
class Demo:
    """The demo's state."""

    board: Board
    screen: Screen
    first: str = ""
    second: str = ""
    broken: str = ""
    #: Ingestion, whose id is its run's -> files in quarantine.
    quarantined: dict[str, int] = field(default_factory=dict)
    #: None: this stack serves no models.
    served: ServedDemo | None = None
    problems: list[str] = field(default_factory=list)

    def view(self, run_id: str) -> RunView:
        return self.board.runs.get(run_id) or RunView(run_id)

    @property
    def is_finished(self) -> bool:
        """Whether both runs have a verdict and a page in MLflow, or have ended without."""
        return all(_is_settled(self.view(run_id)) for run_id in (self.first, self.second))


def run_demo(data_dir: Path | None, *, keep: bool = False) -> int:
    """Run the demo on its own stack; return 0 if everything that it promises was seen."""
    folder = find_data_dir(data_dir)
    if is_locked(folder):
        raise TrainbusError(describe_lock(folder))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _as_interrupt)
    demo = _demo()
    stack = StackProcess(StackOptions(folder), output=folder / "supervisor.log")
    try:
        # The scans are drawn while the stack starts.
        with stack, ThreadPoolExecutor(1) as pool:
            scans = pool.submit(demo_lake.draw_scans)
            with demo.screen.shown():
                _wait_for_stack(demo, stack)
                asyncio.run(_play_demo(demo, folder, scans))
            problems = _check(demo)
            _last_screen(demo, problems, _next_steps(folder))
            if keep and not problems:
                _wait_until_interrupted(stack)
    except StackError as error:
        raise TrainbusError(str(error)) from error
    except TimeoutError:
        _last_screen(demo, [_silent(), *_check(demo)])
        return 1
    return 1 if problems else 0


def run_demo_on_running_stack(data_dir: Path | None) -> int:
    """Run the demo on a stack that runs already: the embedded one, or the one that TRAINBUS_* names."""
    demo = _demo()
    try:
        with ThreadPoolExecutor(1) as pool, demo.screen.shown():
            asyncio.run(_play_demo(demo, data_dir, pool.submit(demo_lake.draw_scans)))
        problems = _check(demo)
    except TimeoutError:
        problems = [_silent(), *_check(demo)]
    _last_screen(demo, problems)
    return 1 if problems else 0


def _demo() -> Demo:
    board = Board()
    return Demo(board, Screen(board, render.console()))


def _next_steps(folder: Path) -> str:
    """Return the commands to try next, as they can be typed here."""
    command = "trainbus" if shutil.which("trainbus") else "python -m trainbus"
    where = "" if folder == DEFAULT_DATA_DIR else f" --data-dir {folder}"
    lines = [
        (f"{command} up{where}", "the same stack again, with this history; then, in another terminal:"),
        (f"{command} show {FIRST}{where}", "one run; also ps, why, logs, checkpoints ls, models, datasets"),
        (f"{command} reproduce {FIRST} --slots 1{where}", "train it again on one slot and compare the bits"),
        (f"{command} events -f{where}", "every fact as it comes"),
        (f"{command} ui{where}", "MLflow's pages and the gateway's"),
    ]
    width = max(len(what) for what, _ in lines) + 3
    typed = "\n".join(f"  {what:<{width}}[dim]{why}[/]" for what, why in lines)
    return f"\n[bold]Next[/] (the data stays in {folder})\n{typed}\n"


def _silent() -> str:
    return f"nothing has happened for {SILENCE_S:.0f} s"


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _wait_until_interrupted(stack: StackProcess) -> None:
    print("\nthe stack keeps running; Ctrl-C stops it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        while stack.poll() is None:
            time.sleep(0.2)


def _wait_for_stack(demo: Demo, stack: StackProcess) -> None:
    stage = demo.screen.stage("embedded stack")
    stage.detail = "NATS, S3, eight services, two nodes of two slots"
    deadline = time.monotonic() + READY_TIMEOUT_S
    info: StackInfo | None = None
    while info is None:
        # In short waits, so that the screen lives.
        try:
            info = stack.wait_ready(0.1)
        except StackError:
            if stack.poll() is not None or time.monotonic() > deadline:
                raise
        demo.screen.draw()
    demo.screen.done(stage, f"{len(info.processes)} processes are ready; two nodes of two slots")


async def _play_demo(demo: Demo, data_dir: Path | None, scans: Future[dict[str, bytes]]) -> None:
    """Fill the lake, request both runs, and follow them until both have a verdict."""
    async with AsyncClient(data_dir) as client:
        connection = client.connection
        start = await connection.last_sequence(topology.FACTS) + 1
        await _read_nodes(demo, client)
        await _read_models(demo, client)
        await _fill_lake(demo, client.address, scans)
        code = await _upload_code(demo, client.address)
        changed = asyncio.Event()
        followers = [
            asyncio.create_task(_follow_facts(demo, client, start, changed)),
            asyncio.create_task(_follow_progress(demo, connection, changed)),
            asyncio.create_task(_redraw(demo)),
        ]
        try:
            await _play_runs(demo, client, code, lambda holds: _wait_until(changed, followers, holds))
            if client.address.serving_url:
                await _show_serving(demo, client, scans.result(), lambda holds: _wait_until(changed, followers, holds))
        finally:
            await cancel_and_wait(*followers)


async def _play_runs(demo: Demo, client: AsyncClient, code: dict[str, Any], wait: Wait) -> None:
    """Request the runs, and see the first one shrink for the second, grow back, and both get a verdict."""
    with (
        tempfile.TemporaryDirectory(prefix="trainbus-demo-") as folder,
        StepHold(Path(folder, "until-shrunk")) as until_shrunk,
        StepHold(Path(folder, "until-grown")) as until_grown,
    ):
        first = example_request(FIRST, code, TRAINING, {"min": 1, "max": 4}, 0)
        first["env"] = describe_holds({until_shrunk.path: SHRINKS_AT, until_grown.path: GROWS_AT})
        demo.first = await _request_run(demo, client.address, {**first, "task": HELD_TASK})
        await wait(lambda: _has_ended_or(_is_half_way, demo.view(demo.first)))
        demo.screen.print_line(f"half-way: {SECOND!r} has priority 10 and needs two slots")
        second = example_request(SECOND, code, SECOND_TRAINING, {"min": 2, "max": 2}, 10)
        demo.second = await _request_run(demo, client.address, second)
        await wait(lambda: _has_ended_or(_has_shrunk, demo.view(demo.first)))
        until_shrunk.release()
        await wait(lambda: _has_ended_or(_has_grown_back, demo.view(demo.first)))
        until_grown.release()
        if client.address.serving_url:
            await wait(lambda: demo.view(demo.first).ended)
            demo.broken = await _publish(client.address, broken_request(code))
        await wait(lambda: demo.is_finished)


async def _request_run(demo: Demo, address: StackAddress, body: dict[str, Any]) -> str:
    """Publish a request for a run that the screen shows; return the run's id."""
    run_id = await _publish(address, body)
    demo.screen.runs[run_id] = body["name"]
    demo.screen.print_line(f"published train.requested for {body['name']!r}: {run_id}")
    return run_id


async def _show_serving(demo: Demo, client: AsyncClient, scans: dict[str, bytes], wait: Wait) -> None:
    """See the champion answer, and a broken promotion refused."""
    url, board = client.address.serving_url or "", demo.board
    demo.served = ServedDemo()
    await show_answer(demo.served, board, demo.screen, url, scans, wait)
    await wait(lambda: demo.view(demo.broken).ended)
    if demo.view(demo.broken).state == "completed":
        await show_refusal(demo.served, board, demo.screen, client.connection, url, demo.broken, scans, wait)


def broken_request(code: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the run that cannot be served."""
    body = example_request(BROKEN, code, BROKEN_TRAINING, {"min": 1, "max": 1}, 0)
    # Nothing measures it, so no gate keeps it away: an operator promotes it.
    del body["evaluation"], body["retention"]
    return {**body, "task": BROKEN_TASK}


async def _fill_lake(demo: Demo, address: StackAddress, scans: Future[dict[str, bytes]]) -> None:
    stage = demo.screen.stage("data lake")
    files = await asyncio.wrap_future(scans)

    def report_stored(count: int) -> None:
        if count % 100 == 0:
            stage.detail = f"{count:,} of {len(files):,} files"
            demo.screen.draw()

    new = await demo_lake.fill_lake(read_settings(address), "lake", files, report_stored)
    what = f"{len(files) - len(demo_lake.BROKEN):,} handwritten digits and {len(demo_lake.BROKEN)} broken files"
    demo.screen.done(stage, f"{what} in s3://lake/{demo_lake.PREFIX}" + ("" if new else " (there already)"))


async def _upload_code(demo: Demo, address: StackAddress) -> dict[str, Any]:
    stage = demo.screen.stage("code package")
    package = pack_demo_project()
    code = package.code(await upload_package(address, package))
    demo.screen.done(stage, f"examples/digits, {render.size(len(package.body))}, sha256 {package.sha256[:12]}")
    return code


def example_request(
    name: str, code: dict[str, Any], training: dict[str, Any], slots: dict[str, int], priority: int
) -> dict[str, Any]:
    """Return the body of a request: the example's, with the demo's changes."""
    body: dict[str, Any] = json.loads((EXAMPLE / "train.json").read_text())
    body.update(name=name, code=code, slots=slots, priority=priority, training=training)
    body["data"]["source"] = f"s3://lake/{demo_lake.PREFIX}"
    # The ranks share this machine's cores with every service: only a rank that hardly runs is a straggler.
    body["watch"] = {"straggler_factor": STRAGGLER_FACTOR}
    if priority:
        body["params"] = {**body.get("params", {}), "width": 8, "lr": 0.005}
    return body


async def _publish(address: StackAddress, body: dict[str, Any]) -> str:
    """Publish a bare JSON body with plain nats-py, as any other system would; return the run's id."""
    async with connect(address) as bus:
        ack = await bus.js.publish("train.requested", json.dumps(body).encode())
    # A message without an id is known by its place in the stream.
    return run_id_for(ANONYMOUS_SOURCE, f"{ack.stream}:{ack.seq}")


async def _read_nodes(demo: Demo, client: AsyncClient) -> None:
    demo.board.nodes = await client.nodes()


async def _read_models(demo: Demo, client: AsyncClient) -> None:
    demo.board.models = {each.model: each for each in await client.models()}


async def _follow_facts(demo: Demo, client: AsyncClient, start: int, changed: asyncio.Event) -> None:
    async for batch in client.connection.follow(topology.FACTS, start_sequence=start):
        if batch:
            await _update_board(demo, client, batch)
        for message in batch:
            demo.screen.on_event(message)
            if isinstance(message.event, dataset.DatasetIngested):
                demo.quarantined[message.event.ingestion_id] = sum(kind.count for kind in message.event.quarantined)
        if batch:
            changed.set()


async def _update_board(demo: Demo, client: AsyncClient, batch: list[StoredEvent]) -> None:
    """Read again what facts are about."""
    facts = [message.event for message in batch]
    has_model_facts = any(isinstance(fact, model.ModelFact) for fact in facts)
    # A promotion changes what is said of the run that was champion before.
    about = [*(demo.screen.runs if has_model_facts else ()), *(f.run_id for f in facts if isinstance(f, run.RunFact))]
    for run_id in dict.fromkeys(about):
        demo.board.runs[run_id] = await read_run(client.connection, run_id)
    if any(isinstance(fact, run.RunFact | node.NodeFact) for fact in facts):
        await _read_nodes(demo, client)
    if has_model_facts:
        await _read_models(demo, client)


async def _follow_progress(demo: Demo, connection: Connection, changed: asyncio.Event) -> None:
    start = await connection.last_sequence(topology.PROGRESS) + 1
    paces: dict[str, TrainingPace] = {}
    async for batch in connection.follow(topology.PROGRESS, subjects.progress(), start_sequence=start):
        for message in batch:
            event: run.RunProgress = message.event
            view = demo.board.runs.get(event.run_id)
            if view is None or event.kind != "training" or event.generation < view.generation:
                continue
            apply_progress(view, event, paces.setdefault(event.run_id, TrainingPace()))
            demo.screen.on_progress(view)
            # Measurements of the node do not count: they come from a hanging run, too.
            changed.set()


async def _redraw(demo: Demo) -> None:
    while True:
        demo.screen.draw()
        await asyncio.sleep(0.2)


async def _wait_until(
    changed: asyncio.Event, followers: list[asyncio.Task[None]], condition: Callable[[], bool]
) -> None:
    """Wait until ``condition`` holds; it is checked after every event."""
    while not condition():
        changed.clear()
        waiting = asyncio.create_task(changed.wait())
        done, _ = await asyncio.wait({waiting, *followers}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            raise TimeoutError
        for follower in followers:
            if follower.done():
                follower.result()


def _has_ended_or(condition: Callable[[RunView], bool], view: RunView) -> bool:
    """Whether there is nothing more to wait for: the condition holds, or the run has ended without."""
    return view.ended or condition(view)


def _is_half_way(view: RunView) -> bool:
    return view.state == "running" and bool(view.total_steps) and view.step >= HALF_WAY * (view.total_steps or 0)


def _shrunk_at(view: RunView) -> int | None:
    """Return after which placement the run got fewer slots; None: it did not."""
    pairs = itertools.pairwise(view.resizes)
    return next((number for number, (before, after) in enumerate(pairs) if after < before), None)


def _has_shrunk(view: RunView) -> bool:
    return _shrunk_at(view) is not None


def _has_grown_back(view: RunView) -> bool:
    """Whether the run got more slots again after it had shrunk."""
    shrunk_at = _shrunk_at(view)
    later = () if shrunk_at is None else view.resizes[shrunk_at + 1 :]
    return any(after > before for before, after in itertools.pairwise(later))


def _is_settled(view: RunView) -> bool:
    if view.state == "completed":
        return bool(view.verdict and view.mlflow_run_id)
    return view.ended


# -- the end ----------------------------------------------------------------------------


def _check(demo: Demo) -> list[str]:
    """Return what the demo promises and did not show."""
    problems: list[str] = []
    for called, run_id in ((FIRST, demo.first), (SECOND, demo.second)):
        view = demo.view(run_id)
        if view.state != "completed":
            problems.append(f"{called} is {view.state}: {view.reason}")
        elif not view.evaluation or not view.verdict:
            problems.append(f"{called} was not evaluated and judged")
        elif not view.mlflow_run_id:
            problems.append(f"{called} was not tracked")
        elif view.exactness != "exact":
            problems.append(f"{called} is {view.exactness or 'not said to be exact'}: {view.exactness_reason}")
    first = demo.view(demo.first)
    if not _has_shrunk(first):
        problems.append(f"{FIRST} did not shrink (its sizes: {first.resizes})")
    elif not _has_grown_back(first):
        problems.append(f"{FIRST} did not grow back (its sizes: {first.resizes})")
    bad = demo.quarantined.get(demo.first)
    if bad != len(demo_lake.BROKEN):
        problems.append(f"{bad} files are in quarantine, {len(demo_lake.BROKEN)} were broken")
    if demo.served is not None:
        problems += demo.served.problems()
    if "digits" not in demo.board.models:
        problems.append("the model 'digits' has no champion")
    return problems


def _last_screen(demo: Demo, problems: list[str], closer: str = "") -> None:
    console, now = demo.screen.console, render.utc_now()
    mine = [view for view in demo.board.runs.values() if {view.run_id, view.evaluates} & {demo.first, demo.second}]
    console.print()
    console.print(run_tables.render_runs(mine, now))
    first = demo.view(demo.first)
    console.print(f"[bold]The life of {FIRST}[/] ({first.run_id})")
    console.print(run_tables.render_timeline(first.timeline, first.requested_at))
    for run_id in (demo.first, demo.second):
        if (view := demo.view(run_id)).verdict:
            console.print(f"{view.name}: [bold]{view.verdict}[/], {render.escape(view.verdict_reason)}")
    console.print(closer)
    for problem in problems:
        console.print(f"[bold red]✗[/] {render.escape(problem)}")
    seconds = time.monotonic() - demo.screen.started_at
    verdict = "[bold red]not everything was seen[/]" if problems else "[bold green]everything was seen as promised[/]"
    console.print(f"{verdict} after {seconds:.0f} s")
    sys.stdout.flush()
