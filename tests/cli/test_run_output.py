"""Runs as one follows them: output and progress, lists, waits, and requests that nobody has answered."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from contracts import subjects
from contracts.base import Fact, run_id_for
from contracts.envelope import Envelope
from contracts.events.dataset import DatasetIngestFailed, DatasetProgress
from contracts.events.node import NodeJoined
from contracts.events.run import (
    CheckpointRef,
    Member,
    ProgressPoint,
    RunAccepted,
    RunCancelled,
    RunCompleted,
    RunExited,
    RunFailed,
    RunLog,
    RunPlaced,
    RunProgress,
    RunQueued,
    RunRejected,
    RunStarted,
)
from contracts.events.study import StudyAccepted, TrialEnded, TrialSuggested
from contracts.events.train import RestoreRequested, TrainRequested
from contracts.pace import TrainingPace
from contracts.spec.run import RunSpec
from contracts.spec.study import StudySpec
from contracts.spec.training import Retention
from services.kit.bus import Bus
from services.kit.settings import Settings
from tests.client_address import serve_clients
from tests.lives import supported
from trainbus import AsyncClient
from trainbus.client import connection, runs
from trainbus.client.address import StackAddress
from trainbus.client.errors import NotFoundError, TrainbusError, UsageError
from trainbus.client.run_filter import RunFilter
from trainbus.client.runs import FollowedRun, follow_output
from trainbus.client.stored_event import StoredEvent
from trainbus.client.views import RunView
from trainbus.commands import run_output, run_tables
from trainbus.commands.options import parse_rank
from trainbus.commands.run_failure import MAX_HELD_S, HeldOutput
from trainbus.commands.run_output import ProgressLines, format_progress, format_rate, print_run
from trainbus.commands.run_wait import EXIT_MISSED, EXIT_REACHED, EXIT_TIMED_OUT, wait_for_runs
from trainbus.commands.runs import ps
from trainbus.commands.times import parse_since

RUN = "r1"
SPEC = RunSpec(name="digits", command=["true"], user="ann", team="research/vision", params={"lr": 0.1})
NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest_asyncio.fixture
async def client(settings: Settings, bus: Bus) -> AsyncIterator[AsyncClient]:
    async with serve_clients(settings) as address, AsyncClient(address=address) as connected:
        yield connected


def accepted(run_id: str = RUN, **fields: Any) -> RunAccepted:
    spec = SPEC.model_copy(update=fields)
    return RunAccepted(run_id=run_id, spec=spec, request_id=run_id, request_source="test")


def placed(generation: int = 1, resume: CheckpointRef | None = None) -> RunPlaced:
    member = Member(node_id="a", slots=(0,), ranks=(0,))
    return RunPlaced(
        run_id=RUN, generation=generation, members=(member,), world_size=1, spec=SPEC, decided_at_sequence=1,
        decided_at=NOW, resume=resume,
    )  # fmt: skip


def output(offset: int, *lines: str, rank: int = 0) -> RunLog:
    return RunLog(run_id=RUN, generation=1, rank=rank, offset=offset, lines=lines)


def progress(step: int, epoch: int = 0, generation: int = 1, **values: float) -> RunProgress:
    points = (ProgressPoint(step=step, time=float(step), values=values),)
    return RunProgress(
        run_id=RUN, generation=generation, node_id="a", rank=0, offset=step, points=points, step=step, epoch=epoch,
        total_steps=100,
    )  # fmt: skip


async def publish(bus: Bus, *facts: Any) -> None:
    for fact in facts:
        if isinstance(fact, RunPlaced):
            # A placement that nobody waits for does not count.
            await bus.publish(RunQueued(run_id=fact.run_id, next_generation=fact.generation))
        await bus.publish(fact)


EXITED = RunExited(run_id=RUN, generation=1, node_id="a", outcome="succeeded", step=20)
COMPLETED = RunCompleted(run_id=RUN, generation=1)


# -- following ------------------------------------------------------------------


async def test_a_rejection_is_found_and_nothing_else(client: AsyncClient, bus: Bus) -> None:
    await publish(bus, accepted("raccepted"), RunRejected(run_id="rrejected", reason="no quota"))
    assert await runs.find_rejection(client.connection, subjects.run("rrejected"), 60) == "rejected: no quota"
    assert await runs.find_rejection(client.connection, subjects.run("raccepted"), 60) == ""
    assert await runs.find_rejection(client.connection, subjects.run("runanswered"), 0.1) == ""


async def test_everything_that_was_printed_comes_before_the_end(client: AsyncClient, bus: Bus) -> None:
    await publish(bus, accepted(), placed(), output(0, "one"), output(5, "two", rank=1), progress(10, loss=0.5))
    await publish(bus, output(9, "three"), progress(20, 2, loss=0.25), EXITED, COMPLETED)
    seen: list[str] = []
    async for view, batch in follow_output(client.connection, RUN):
        for message in batch:
            event = message.event
            seen += event.lines if isinstance(event, RunLog) else [event.fact]
        last = view
    assert [text for text in seen if text in ("one", "two", "three")] == ["one", "three"]
    assert seen.index("three") < seen.index("exited") < seen.index("completed")
    assert seen.count("progress") == 2
    assert (last.state, last.step, last.total_steps, last.metrics) == ("completed", 20, 100, {"loss": 0.25})


async def test_a_view_that_is_behind_its_facts_is_read_again(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end was stored while the view was read, which names it and does not have it yet."""
    answers = [RunView(RUN, state="running", sequence=4), RunView(RUN, state="completed", sequence=4)]

    async def read(*_: Any, **__: Any) -> RunView:
        return answers.pop(0)

    def stored(sequence: int, fact: Fact) -> StoredEvent:
        return StoredEvent(sequence, fact.subject, Envelope(str(sequence), "test", fact.type, NOW), fact)

    monkeypatch.setattr(runs, "read_run", read)
    followed = FollowedRun(client.connection, RUN)
    await followed.update([stored(3, EXITED)])
    assert not followed.is_settled
    await followed.update([stored(4, COMPLETED)])
    assert followed.is_settled
    assert answers == []


async def test_a_followed_run_is_printed(client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    await publish(bus, accepted(), placed(), output(0, "[bold]one\x1b[2J", "10 %\r20 %\r"), output(9, "other", rank=1))
    await publish(bus, progress(10, 1, loss=0.5), EXITED, COMPLETED)
    await print_run(client, RUN, rank=None)
    shown = capsys.readouterr().out
    assert "[0] [bold]one\\x1b[2J\n[0] 20 %\n" in shown
    assert "[1] other\n" in shown
    assert "step 10/100, epoch 1, loss 0.5\n" in shown
    assert shown.splitlines()[-1].endswith(" completed")


async def test_a_metric_that_never_comes_is_told_once_the_first_epoch_is_over(
    client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    retention = Retention(metric="validation/acuracy", mode="max")
    await publish(bus, accepted(retention=retention), placed(), progress(10, 1, accuracy=0.5))
    following = asyncio.create_task(print_run(client, RUN))
    await publish(bus, progress(20, 2, accuracy=0.6), progress(30, 3, accuracy=0.6, loss=0.1))
    shown = ""
    async with asyncio.timeout(60):
        while "warning" not in shown:
            await asyncio.sleep(0.05)
            shown += capsys.readouterr().out
    told = "retention.metric is 'validation/acuracy', which the run does not report: did you mean 'accuracy'?"
    assert f"warning: {told}" in shown
    found = await client.run(RUN)
    assert found.warnings[0].startswith(told)
    assert (await client.why(RUN)).warnings == found.warnings
    Console(file=(printed := io.StringIO()), width=400).print(run_tables.render_run(found))
    assert told in printed.getvalue()
    await publish(bus, EXITED, COMPLETED)
    await following
    assert (shown + capsys.readouterr().out).count("warning: ") == 1


async def test_the_preparation_of_the_data_is_printed(
    client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await bus.publish(accepted())
    for number, (phase, done) in enumerate((("listing", 7), ("validating", 10), ("validating", 20), ("sharding", 1))):
        progress = {"ingestion_id": RUN, "phase": phase, "number": number, "done": done, "time": 1.0 + number}
        more = {"total": 400, "records_per_s": 38.2, "eta_s": 9.6} if phase == "validating" else {}
        await bus.publish(DatasetProgress.model_validate({**progress, **more}))
    await bus.publish(DatasetProgress(ingestion_id="other", phase="uploading", number=0, done=1, time=1.0))
    ingested = DatasetIngestFailed(ingestion_id=RUN, run_id=RUN, reason="no usable data")
    await bus.publish(ingested)
    await bus.publish(RunFailed(run_id=RUN, reason="no usable data"))
    with pytest.raises(TrainbusError):
        await print_run(client, RUN)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("data: ")] == [
        "data: listing 7",
        "data: validating 10 of 400, 38 records/s, 10 s left",
        "data: sharding 1",
    ]
    assert lines[-2:] == ["data cannot be read: no usable data", "failed"]


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/lib/trainbus/ranks/rank.py", line 86, in run',
    "    outcome = trainer.fit()",
    '  File "/runs/r1/g1/code/task.py", line 20, in loss',
    "    return row[name]",
    '  File "/lib/torch/nn/linear.py", line 134, in forward',
    "    return F.linear(input)",
    "KeyError: 'f0'",
)
SHORT_TRACEBACK = (TRACEBACK[0], '  File "task.py", line 20, in loss', "    return row[name]", "KeyError: 'f0'")
REASON = "KeyError: 'f0' (task.py:20, in loss)"


def broken(generation: int, tail: tuple[str, ...] = SHORT_TRACEBACK) -> RunExited:
    return RunExited(
        run_id=RUN, generation=generation, node_id="a", outcome="failed", rank=0, reason=REASON, log_tail=tail
    )


async def test_a_failure_is_told_once_in_the_projects_lines(
    client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    again = RunLog(run_id=RUN, generation=2, rank=0, offset=0, lines=("loss 2", *TRACEBACK))
    await publish(bus, accepted(), placed(), output(0, "loss 1", *TRACEBACK[:3]), output(9, *TRACEBACK[3:]), broken(1))
    await publish(bus, placed(2), again, broken(2))
    await publish(bus, RunFailed(run_id=RUN, generation=2, reason=f"{REASON}; after 2 attempts (twice the same)"))
    with pytest.raises(TrainbusError, match="trainbus logs r1") as failed:
        await print_run(client, RUN)
    assert "KeyError" not in str(failed.value)
    shown = re.sub(r"^\d\d:\d\d:\d\d ", "", capsys.readouterr().out, flags=re.MULTILINE).splitlines()
    assert (
        [line for line in shown if not line.startswith(("accepted", "queued", "placed"))]
        == [
            "loss 1",
            "loss 2",  # it is followed late: all output is there
            *SHORT_TRACEBACK[1:3],
            f"failed on a (rank 0): {REASON}",
            "failed on a in the same way",
            "failed after 2 attempts (twice the same)",
        ]
    )


async def test_a_traceback_that_did_not_end_the_run_is_printed_as_it_is(
    client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish(bus, accepted(), placed(), output(0, *TRACEBACK, "and on"), EXITED, COMPLETED)
    await print_run(client, RUN)
    assert "\n".join([*TRACEBACK, "and on"]) in capsys.readouterr().out


def test_a_traceback_waits_for_its_fact_no_longer_than_a_few_seconds() -> None:
    now = 0.0
    held = HeldOutput(lambda: now)
    assert [held.add(0, line) for line in ("one", TRACEBACK[0], "two")] == [["one"], [], []]
    assert held.add(1, "another rank's") == ["another rank's"]
    assert list(held.poll()) == []
    now = MAX_HELD_S + 1
    assert list(held.poll()) == [(0, [TRACEBACK[0], "two"])]
    assert held.add(0, "three") == ["three"]


def test_what_a_rank_prints_because_a_peer_is_gone_is_no_news() -> None:
    held = HeldOutput(lambda: 0.0)
    for line in (*TRACEBACK[:-1], "RuntimeError: Connection closed by peer [127.0.0.1]:31000", "bye"):
        held.add(0, line)
    assert list(held.release(REASON)) == [(0, ["bye"])]


def test_there_is_a_line_an_epoch_and_one_every_ten_seconds() -> None:
    now = 0.0
    lines = ProgressLines(lambda: now)
    view = RunView(RUN, state="running", total_steps=100)
    shown = []
    for second in range(30):
        now, view.step, view.epoch = float(second), second, 1 + (second >= 5)
        shown += [lines.add(view), lines.poll()]
    shown.append(lines.flush())
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in shown if line]
    # The first at once, the last of epoch 1, then one in ten seconds, and the last.
    assert steps == [0, 4, 15, 25, 29]
    assert lines.flush() == ""


def test_short_epochs_have_a_line_a_second() -> None:
    now = 0.0
    lines = ProgressLines(lambda: now)
    view = RunView(RUN, state="running")
    shown = []
    for tenth in range(50):
        now, view.step, view.epoch = tenth / 10, tenth, tenth
        shown += [line for line in (lines.add(view), lines.poll()) if line]
    assert 4 <= len(shown) <= 6


def test_a_line_of_progress_has_what_matters() -> None:
    view = RunView(RUN, state="running", step=1200, total_steps=10_000, epoch=3, steps_per_s=8.34)
    view.metrics = {"train/lr": 0.1, "train/accuracy": 0.5, "train/loss": 0.25, "train/grad_norm": 3.0}
    assert format_progress(view) == "step 1,200/10,000, epoch 3, loss 0.25, accuracy 0.5, 8.34 steps/s, 17 m 35 s left"
    assert format_rate(0.25) == "4 s/step"


def test_the_pace_is_that_of_the_last_minute() -> None:
    pace = TrainingPace()
    assert pace.steps_per_s is None
    for second in range(100):
        pace.add(float(second), second)
    for second in range(100, 200):
        pace.add(float(second), 100 + 3 * (second - 100))
    assert pace.steps_per_s == pytest.approx(3.0)
    pace.add(200.0, 5)
    assert pace.steps_per_s is None, "it was restored"


async def test_output_is_selected(client: AsyncClient, bus: Bus) -> None:
    await publish(bus, accepted(), output(0, "epoch 1", "warning: x"), output(1, "other", rank=1), output(2, "epoch 2"))

    async def lines(**choice: Any) -> list[str]:
        return [text async for _, text in client.logs(RUN, **choice)]

    assert await lines() == ["epoch 1", "warning: x", "other", "epoch 2"]
    assert await lines(tail=2) == ["other", "epoch 2"]
    assert await lines(tail=0) == []
    assert await lines(rank=1) == ["other"]
    assert await lines(pattern=r"epoch \d") == ["epoch 1", "epoch 2"]
    assert await lines(tail=1, pattern="warn") == ["warning: x"]
    assert await lines(since=datetime.now(UTC) + timedelta(minutes=1)) == []
    with pytest.raises(UsageError, match="no regular expression"):
        await lines(pattern="(")
    await publish(bus, *supported(COMPLETED))
    assert await lines(follow=True, tail=1) == ["epoch 2"]


async def test_the_last_lines_are_found_behind_those_of_others(
    client: AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainbus.client.runs.NEWEST_OUTPUT", 1)
    await publish(bus, accepted(), *(output(number, f"line {number}", rank=number % 2) for number in range(20)))
    assert [text async for _, text in client.logs(RUN, rank=0, tail=3)] == ["line 14", "line 16", "line 18"]


# -- lists ----------------------------------------------------------------------


async def test_metrics_of_cancelled_runs_and_of_scripts_are_listed(client: AsyncClient, bus: Bus) -> None:
    await publish(bus, accepted(), placed(), progress(10, 1, loss=0.5), RunCancelled(run_id=RUN, reason="enough"))
    for view in (await client.run(RUN), (await client.runs())[0]):
        assert (view.state, view.metrics, view.step, view.total_steps) == ("cancelled", {"loss": 0.5}, 10, 100)
        assert (view.user, view.team, view.params) == ("ann", "research/vision", {"lr": 0.1})
        assert view.left_s is None


async def test_a_result_stands_over_the_last_progress(client: AsyncClient, bus: Bus) -> None:
    completed = COMPLETED.model_copy(update={"metrics": {"loss": 0.1}})
    await publish(bus, accepted(), placed(), progress(10, loss=0.5, accuracy=0.9), EXITED, completed)
    assert (await client.run(RUN)).metrics == {"loss": 0.1, "accuracy": 0.9}


def test_a_filter_is_what_the_gateway_takes() -> None:
    chosen = RunFilter(("failed",), user="ann", text="cnn", study="sweep", since=NOW, limit=3, trials=False)
    assert chosen.to_params() == {
        "state": ["failed"],
        "user": "ann",
        "q": "cnn",
        "study": "sweep",
        "since": NOW.isoformat(),
        "trials": False,
    }
    assert (RunFilter(trials=False).is_empty, chosen.is_empty) == (True, False)
    with pytest.raises(UsageError, match=r"'faild'.*failed"):
        RunFilter(states=("faild",))


async def test_ps_folds_the_trials_of_a_study(
    client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = StudySpec.model_validate(
        {
            "name": "sweep",
            "run": {"name": "trial", "command": ["true"]},
            "space": {"x": [1, 2]},
            "objectives": [{"metric": "validation/loss", "mode": "min"}],
            "trials": 9,
        }
    )
    of_study = SPEC.model_copy(update={"name": "trial", "study": "s1"})
    await publish(bus, StudyAccepted(study_id="s1", spec=spec, request_id="q", request_source="test"))
    for number in range(3):
        trial = RunAccepted(run_id=f"rt{number}", spec=of_study, request_id=f"t{number}", request_source="test")
        await publish(bus, TrialSuggested(study_id="s1", trial=number, run_id=f"rt{number}", params={"x": 1}), trial)
    ended = {"study_id": "s1", "metrics": {}}
    await publish(
        bus,
        TrialEnded(trial=0, run_id="rt0", outcome="completed", values=(0.25,), **ended),
        TrialEnded(trial=1, run_id="rt1", outcome="failed", **ended),
        accepted(),
    )

    async def list_rows(**flags: Any) -> str:
        await ps(client, **flags)
        return capsys.readouterr().out

    folded = await list_rows()
    assert RUN in folded
    assert "rt0" not in folded
    (row,) = (line for line in folded.splitlines() if "2/9 trials" in line)
    assert row.split()[:3] == ["s1", "sweep", "running"]
    assert "loss 0.25" in row
    assert "s1 sweep running: 1 completed, 1 failed, 1 running of 9 trials" in folded
    assert "sweep" not in await list_rows(states=["queued"])
    assert "sweep" in await list_rows(everything=True)
    one_by_one = await list_rows(study="sweep")
    assert all(run_id in one_by_one for run_id in ("rt0", "rt1", "rt2"))
    assert RUN not in one_by_one
    listed = {run["run_id"]: run["study"] for run in json.loads(await list_rows(as_json=True))}
    assert listed == {RUN: None, "rt0": "s1", "rt1": "s1", "rt2": "s1"}
    assert "rt2" not in await list_rows(limit=1)


def render_plain(renderable: Any, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), no_color=True)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_list_of_runs_fits_eighty_columns() -> None:
    view = RunView("rquy3c53rd345", "houses", state="completed", slots_got=1, resizes=(1,), step=80, total_steps=80)
    view.requested_at, view.metrics = NOW, {"validation/accuracy": 0.9375}
    lines = render_plain(run_tables.render_runs([view], NOW + timedelta(minutes=9), 80), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("houses" in line and "accuracy 0.9375" in line and "9 m" in line for line in lines)


def test_links_are_those_of_the_stack() -> None:
    address = StackAddress(nats_url="nats://h", gateway_url="http://g/", mlflow_uri="http://m")
    view = RunView(RUN, mlflow_run_id="abc", mlflow_experiment_id="7")
    assert run_tables.find_links(view, address) == {
        "page": "http://g/#r1",
        "mlflow": "http://m/#/experiments/7/runs/abc",
    }
    shown = render_plain(run_tables.render_run(view, {}), 120)
    assert "run abc (`trainbus ui`)" in shown


def test_ranks_and_times_are_read() -> None:
    assert (parse_rank("all"), parse_rank("3")) == (None, 3)
    with pytest.raises(UsageError, match="give a number, or all"):
        parse_rank("-1")
    assert parse_since("10m", NOW) == NOW - timedelta(minutes=10)
    assert parse_since("11:30", NOW) == NOW - timedelta(minutes=30)


# -- requests that nobody has answered --------------------------------------------


async def test_a_request_without_an_answer_is_a_run(client: AsyncClient) -> None:
    request = TrainRequested(name="digits", command=["true"], priority=3)
    run_id = (await client.connection.publish_request(request)).run_id
    assert run_id is not None
    (listed,) = await client.runs()
    assert (listed.run_id, listed.name, listed.state, listed.priority) == (run_id, "digits", "requested", 3)
    assert "no scheduler answers" in listed.reason
    assert "trainbus doctor" in listed.reason
    assert listed.requested_at is not None
    assert await client.find_run("digits") == await client.find_run(run_id[:8]) == run_id
    assert (await client.run(run_id)).state == "requested"
    assert (await client.why("digits")).state == "requested"
    with pytest.raises(NotFoundError):
        await client.find_run("nothing")


@pytest.mark.parametrize("moment", [1, 2])
async def test_a_run_that_ends_while_it_is_listed_is_listed_once(
    client: AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    await publish(bus, accepted(), accepted("r2"))
    get, asked, is_answered = client.connection.get, [], asyncio.Event()

    async def end_meanwhile(path: str, params: Any = None) -> Any:
        asked.append(path)
        number = len(asked)
        if number > 1:
            await is_answered.wait()
        if number == moment:
            await publish(bus, RunFailed(run_id=RUN, reason="no memory"))
        try:
            return await get(path, params)
        finally:
            is_answered.set()

    monkeypatch.setattr(client.connection, "get", end_meanwhile)
    assert [(view.run_id, view.state) for view in await client.runs(include_ended=False)] == [
        (RUN, "failed"),
        ("r2", "accepted"),
    ]


async def test_nodes_are_listed_however_many_there_are(
    client: AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PAGE_ITEMS", 2)
    for number in range(5):
        await publish(bus, NodeJoined(node_id=f"n{number}", incarnation="i", address="a", slots=2, lease_ttl_s=3))
    assert [view.node_id for view in await client.nodes()] == [f"n{number}" for number in range(5)]


async def test_a_request_that_was_answered_is_what_the_facts_say(client: AsyncClient, bus: Bus) -> None:
    sent = await client.connection.publish_request(TrainRequested(name="digits", command=["true"]))
    await publish(bus, accepted(sent.run_id))
    assert [view.state for view in await client.runs()] == ["accepted"]


async def test_a_restore_that_nobody_answered_names_its_run(client: AsyncClient, bus: Bus) -> None:
    request = RestoreRequested(run_id="r9", step=5)
    envelope = Envelope(id="q", source="test", type=request.type, time=bus.clock.now())
    await bus.publish_event(request, request.subject, envelope)
    (view,) = await client.runs()
    assert (view.run_id, view.name, view.parent_run_id) == (run_id_for("test", "q"), "r9 from step 5", "r9")


async def test_a_follower_of_a_request_learns_why_nothing_happens(
    client: AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_output, "PATIENCE_S", 0.0)
    request = TrainRequested(name="digits", command=["true"])
    run_id = (await client.connection.publish_request(request)).run_id
    assert run_id is not None

    async def answer(connection: Any, run_id: str) -> str:
        await publish(bus, accepted(run_id), *supported(RunCompleted(run_id=run_id, generation=1)))
        return "no scheduler answers"

    monkeypatch.setattr(run_output, "explain_requested", answer)
    await print_run(client, run_id)
    assert capsys.readouterr().out.count("no scheduler answers") == 1


# -- waiting ----------------------------------------------------------------------


async def test_waiting_ends_with_the_outcome(client: AsyncClient, bus: Bus, capsys: pytest.CaptureFixture[str]) -> None:
    await publish(bus, accepted(), *supported(COMPLETED), accepted("r2"), RunFailed(run_id="r2", reason="it broke"))
    assert await wait_for_runs(client, [RUN], "ended", None, as_json=False) == EXIT_REACHED
    assert await wait_for_runs(client, [RUN, "r2"], "ended", None, as_json=False) == EXIT_MISSED
    assert "r2 digits failed: it broke" in capsys.readouterr().out
    assert await wait_for_runs(client, ["r2"], "failed", None, as_json=True) == EXIT_REACHED
    assert '"reached": true' in capsys.readouterr().out


async def test_waiting_for_a_milestone(client: AsyncClient, bus: Bus) -> None:
    await publish(bus, accepted(), placed())
    assert await wait_for_runs(client, [RUN], "accepted", 30, as_json=False) == EXIT_REACHED
    assert await wait_for_runs(client, [RUN], "placed", 30, as_json=False) == EXIT_REACHED
    assert await wait_for_runs(client, [RUN], "started", 0.5, as_json=False) == EXIT_TIMED_OUT
    await publish(bus, RunStarted(run_id=RUN, generation=1, node_id="a"))
    assert await wait_for_runs(client, [RUN], "started", 30, as_json=False) == EXIT_REACHED
    with pytest.raises(UsageError, match="give ended, accepted"):
        await wait_for_runs(client, [RUN], "done", None, as_json=False)
