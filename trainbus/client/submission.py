"""Commands that ask for something: they publish a request, as any other system would."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts import subjects, topology
from contracts.base import Request
from contracts.events import run
from contracts.events.train import CancelRequested, DrainRequested, RestoreRequested, TrainRequested
from trainbus.client import runs as reading
from trainbus.client.address import Address
from trainbus.client.connection import Link, connect, hush, run_id_of
from trainbus.client.errors import USAGE, CliError
from trainbus.client.package import Package, pack
from trainbus.client.source_location import data_location
from trainbus.client.state import ENDED, RunView, describe, narrate
from trainbus.commands import render

TASK = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
#: Seconds to wait for the scheduler's answer to a request before saying that it has not answered yet.
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Submission:
    """What the options of ``trainbus submit`` say; None or empty: not given."""

    project: Path | None = None
    task: str | None = None
    command: tuple[str, ...] = ()
    request_file: Path | None = None
    name: str | None = None
    slots: str | None = None
    epochs: int | None = None
    max_steps: int | None = None
    logical_ranks: int | None = None
    data: str | None = None
    data_format: str | None = None
    priority: int | None = None
    model: str | None = None
    experiment: str | None = None
    #: A manifest; as a person says it, until it is looked up.
    init_from: str | None = None
    init_exclude: tuple[str, ...] = ()
    params: tuple[str, ...] = ()


def parse_slots(text: str) -> dict[str, int]:
    """``2`` is exactly two, ``1..4`` or ``1-4`` anything between."""
    match = re.fullmatch(r"(\d+)(?:(?:\.\.|-)(\d+))?", text)
    if match is None:
        raise CliError(f"--slots {text!r}: give a number (2) or a range (1..4)", USAGE)
    low, high = match.groups()
    return {"min": int(low), "max": int(high or low)}


def parse_param(text: str) -> tuple[str, Any]:
    """``lr=0.1``: the value is JSON if it can be, else a string."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise CliError(f"--param {text!r}: give it as name=value", USAGE)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def build_request(submission: Submission, package: Package | None, bucket: str) -> TrainRequested:
    """The request that a submission means: the options over the request file.

    Raises:
        CliError: it is not valid; each problem is named with its field.
    """
    body: dict[str, Any] = {}
    if submission.request_file is not None:
        try:
            body = json.loads(submission.request_file.read_text())
        except (OSError, ValueError) as error:
            raise CliError(f"{submission.request_file} is no readable JSON file: {error}", USAGE) from error
        if not isinstance(body, dict):
            raise CliError(f"{submission.request_file} must hold a JSON object: the body of a train.requested", USAGE)
    if submission.task is not None:
        body["task"] = submission.task
        body.pop("command", None)
    if submission.command:
        body["command"] = list(submission.command)
        body.pop("task", None)
    if package is not None:
        body["code"] = package.code(bucket)
    given = {
        "name": submission.name,
        "slots": parse_slots(submission.slots) if submission.slots else None,
        "priority": submission.priority,
        "model": submission.model,
        "experiment": submission.experiment,
        "init_from": submission.init_from,
        "init_exclude": submission.init_exclude or None,
    }
    body.update({field: value for field, value in given.items() if value is not None})
    if "name" not in body:
        body["name"] = (submission.project.resolve().name if submission.project else "run") or "run"
    if submission.params:
        body["params"] = {**body.get("params", {}), **dict(parse_param(text) for text in submission.params)}
    options = {
        "epochs": submission.epochs,
        "max_steps": submission.max_steps,
        "logical_ranks": submission.logical_ranks,
    }
    training = {name: value for name, value in options.items() if value is not None}
    if body.get("task") and not body.get("training") and not training.keys() & {"epochs", "max_steps"}:
        training["epochs"] = 1
    if training:
        body["training"] = {**(body.get("training") or {}), **training}
    if submission.data is not None:
        body["data"] = data_field(submission.data, submission.data_format, body.get("data"))
    try:
        return TrainRequested.model_validate(body)
    except ValidationError as error:
        problems = "\n".join(
            f"  {'.'.join(str(part) for part in each['loc']) or 'request'}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        )
        raise CliError(f"the request is not valid:\n{problems}", USAGE) from error


def data_field(text: str, data_format: str | None, given: Any = None) -> dict[str, Any]:
    """``s3://lake/digits`` or a folder is a source to ingest; 64 hex digits are a dataset that exists.

    How a source is to be read (format, split, windows) stays as the request file has ``given`` it.
    """
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return {"dataset_id": text}
    try:
        source = data_location(text)
    except CliError as error:
        raise CliError(
            f"--data: {error}, or the id of a dataset in full (`trainbus datasets show NAME`)", USAGE
        ) from None
    suffix = text.rsplit("/", 1)[-1].rpartition(".")[2].lower()
    guessed = {"jsonl": "jsonl", "parquet": "parquet", "txt": "text"}.get(suffix, "images")
    kept = given if isinstance(given, dict) and "source" in given else {}
    return {"format": guessed, **kept, "source": source, **({"format": data_format} if data_format else {})}


async def submit(
    address: Address, submission: Submission, *, event_id: str | None, follow: bool, as_json: bool
) -> None:
    """Pack, upload, publish; print the run's id; with ``follow`` stay until it ends."""
    package = pack(submission.project) if submission.project is not None else None
    if submission.init_from is not None:
        from trainbus.client.checkpoints import find

        async with connect(address) as link:
            found = await find(link, submission.init_from)
        submission = replace(submission, init_from=found.uri)
    # Checked before anything is sent, so that a typo costs nothing.
    request = build_request(submission, package, address.bucket_code)
    async with connect(address) as link:
        if package is not None and request.code is not None:
            await upload_package(address, package, request.code.uri)
        sent = await link.request(request, event_id or uuid.uuid4().hex)
        run_id = run_id_of(sent)
        if as_json:
            print(render.as_json({"run_id": run_id, "name": request.name, "event_id": sent, "code": request.code}))
        else:
            note = ""
            if package is not None:
                commit = f", commit {package.git_commit[:10]}" if package.git_commit else ""
                note = f" ({len(package.files)} files, {render.size(len(package.body))} packed{commit}"
                note += " with uncommitted changes)" if package.git_dirty else ")"
            print(f"{run_id}  {request.name}{note}", flush=True)
        if follow:
            await follow_run(link, run_id)


async def upload_package(address: Address, package: Package, uri: str) -> None:
    """Store a package under its hash, unless it is there."""
    from services.kit.bus import TransientError
    from services.kit.store.errors import ObjectNotFound
    from services.kit.store.objects import ObjectStore

    try:
        async with ObjectStore(address.settings(), patience_s=5.0) as objects:
            try:
                if (await objects.head(uri)).size_bytes == len(package.body):
                    return
            except ObjectNotFound:
                pass
            await objects.put(uri, package.body, content_type="application/gzip")
    except TransientError as error:
        raise CliError(f"the object store at {address.s3_endpoint} does not answer: {error}") from error


async def follow_run(link: Link, run_id: str) -> None:
    """Print what happens to a run until it has ended (and its verdict is out); fail if it failed."""
    console = render.console()
    view = RunView(run_id)
    board = reading.board_of([])
    board.runs[run_id] = view
    verdict_expected = False
    async for batch in link.follow(topology.FACTS, subjects.run(run_id)):
        for stored in batch:
            board.apply(stored.sequence, stored.envelope.time, stored.event)
            if isinstance(stored.event, run.RunAccepted):
                verdict_expected = stored.event.spec.evaluation is not None
            if text := narrate(stored.event):
                console.print(f"[dim]{stored.envelope.time:%H:%M:%S}[/] {render.escape(text)}", soft_wrap=True)
        if view.state in ENDED and (view.state != "completed" or not verdict_expected or view.verdict):
            break
    for line in view.log_tail:
        console.print(render.visible(line), markup=False, style="dim")
    if view.state != "completed":
        raise CliError(f"run {run_id} {view.state}: {view.reason}")


async def cancel(address: Address, name: str, reason: str) -> None:
    """Ask for a run to be stopped for good and say what came of it."""
    async with connect(address) as link:
        run_id = await reading.resolve(link, name)
        if (end := await reading.ended_fact(link, run_id)) is not None:
            raise CliError(f"run {run_id} has ended already: {describe(end)}", USAGE)
        start = await link.last_sequence(topology.FACTS) + 1
        await link.request(CancelRequested(run_id=run_id, reason=reason))
        answer = await _first_fact(link, start, subjects.run(run_id), ("cancelled", "cancelling", "preempting"))
        print(f"{run_id}: {answer or 'asked to stop; the scheduler has not answered yet'}")


async def drain(address: Address, node_id: str, reason: str) -> None:
    """Ask for a node to be taken out of use."""
    async with connect(address) as link:
        board = reading.board_of(await link.read(subjects.node()))
        if node_id not in board.nodes:
            raise CliError(f"there is no node {node_id!r}; there are {', '.join(sorted(board.nodes)) or 'none'}", USAGE)
        start = await link.last_sequence(topology.FACTS) + 1
        await link.request(DrainRequested(node_id=node_id, reason=reason))
        answer = await _first_fact(link, start, subjects.fact("node", node_id, "draining"), ("draining",))
        print(f"{node_id}: {answer or 'asked to drain; the scheduler has not answered yet'}")


async def restore(address: Address, name: str, step: int | None, epoch: int | None) -> None:
    """Ask for a new run from a checkpoint of another and print its id."""
    if (step is None) == (epoch is None):
        raise CliError("give exactly one of --step and --epoch", USAGE)
    async with connect(address) as link:
        run_id = await reading.resolve(link, name)
        view = reading.board_of(await link.read(subjects.run(run_id))).runs[run_id]
        there = [each for each in view.checkpoints.values() if each.step == step or each.epoch == epoch]
        if not there:
            steps = ", ".join(str(each.step) for each in sorted(view.checkpoints.values(), key=lambda each: each.step))
            raise CliError(f"run {run_id} has no such checkpoint; it has steps {steps or '(none)'}", USAGE)
        start = await link.last_sequence(topology.FACTS) + 1
        event_id = await link.request(RestoreRequested(run_id=run_id, step=step, epoch=epoch))
        new = run_id_of(event_id)
        answer = await _first_fact(link, start, subjects.run(new), ("accepted", "rejected"))
        print(f"{new}  {answer or 'asked for; the scheduler has not answered yet'}")
        if answer and answer.startswith("rejected"):
            raise CliError(f"the restore was {answer}")


async def _first_fact(link: Link, start_sequence: int, subject: str, facts: tuple[str, ...]) -> str | None:
    """The first of ``facts`` on a subject from a sequence on, described; None if none comes in time."""
    import asyncio

    async def wait() -> str:
        async for batch in link.follow(topology.FACTS, subject, start_sequence=start_sequence):
            for stored in batch:
                if stored.event.fact in facts:
                    return describe(stored.event)
        raise AssertionError("follow does not end")

    try:
        return await asyncio.wait_for(wait(), ANSWER_S)
    except TimeoutError:
        return None


async def replay(address: Address, start: str | None, *, as_json: bool) -> None:
    """Drive the gateway's read model again, from a sequence number or a time on, or from the beginning."""
    from services.gateway.rebuild import rebuild

    hush()
    settings = address.settings()
    if address.data_dir is not None:
        settings = settings.model_copy(update={"data_dir": address.data_dir / "gateway"})
    sequence: int | None = None
    time: datetime | None = None
    if start is not None:
        try:
            sequence, time = (int(start), None) if start.isdigit() else (None, datetime.fromisoformat(start))
        except ValueError as error:
            raise CliError(f"--from {start!r} is neither a sequence number nor an ISO 8601 time", USAGE) from error
    done = await rebuild(settings, from_sequence=sequence, from_time=time)
    if as_json:
        print(render.as_json(done))
    else:
        print(
            f"the gateway's read model: {done.runs} runs from {done.to_sequence} facts in {done.seconds:.2f} s, "
            f"read from sequence {done.from_sequence} on"
        )


__all__ = ["Request", "Submission", "build_request", "submit"]
