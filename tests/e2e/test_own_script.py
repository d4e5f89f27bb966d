"""A plain script that saves into its output folder: killed once, drained once, and fetched whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import DONE_S, Stack
from trainbus.embedded.launch import read_stack

pytestmark = [pytest.mark.e2e]

EPOCHS = 9
#: It knows nothing of trainbus but the folder. It waits at an epoch until it is ended there for the first time.
SCRIPT = """
import json, os, pathlib, sys, time

out = pathlib.Path(os.environ["TRAINBUS_OUTPUT_DIR"])
state = out / "state.json"
history = json.loads(state.read_text()) if state.exists() else []
print("begins after", len(history), flush=True)
begin = len(history)
for epoch in range(begin + 1, 10):
    history.append([epoch, os.getpid()])
    print(f"epoch {epoch} loss={1 / epoch:.4f}", flush=True)
    temporary = out / "state.json.new"
    temporary.write_text(json.dumps(history))
    temporary.replace(state)
    while epoch in (3, 6) and begin < epoch:
        time.sleep(0.05)
(out / "model.txt").write_text("a model of nine epochs")
"""


def node_of(placed: Any) -> str:
    return str(placed.members[0].node_id)


def placed_in(generation: int) -> Any:
    return lambda event: event.generation == generation


async def test_a_plain_script_is_killed_and_drained_and_loses_nothing(stack: Stack, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    (tmp_path / "train.py").write_text(SCRIPT)
    pattern = r"loss=loss=(?P<value>[0-9.]+)"
    done = await stack.cli(
        "submit", str(tmp_path), "--command", "python train.py", "--name", "plain", "--metric-pattern", pattern
    )
    assert done.code == 0, done.text
    run_id = done.out.split()[0]
    await stack.wait_for(run_id, "checkpoint_committed", DONE_S, lambda event: event.checkpoint.step >= 3)

    [pid] = stack.rank_pids(run_id)
    os.killpg(pid, signal.SIGKILL)
    killed = await stack.wait_for(run_id, "exited", DONE_S)
    assert "SIGKILL" in killed.reason
    second = await stack.wait_for(run_id, "placed", DONE_S, placed_in(2))
    assert (second.resume.step, second.resume.step_is_count) == (3, False)
    await stack.wait_for(run_id, "checkpoint_committed", DONE_S, lambda event: event.checkpoint.step >= 6)

    drained = node_of(second)
    try:
        await stack.request("drain.requested", {"node_id": drained, "reason": "a fan is loud"})
        third = await stack.wait_for(run_id, "placed", DONE_S, placed_in(3))
        assert node_of(third) != drained
        released = await stack.wait_for(run_id, "released", DONE_S)
        assert released.clean
        completed = await stack.wait_for(run_id, "completed", DONE_S)
        assert completed.metrics == {"loss": pytest.approx(1 / EPOCHS, abs=1e-4)}
    finally:
        sequence = (await stack.bus.js.stream_info("FACTS")).state.last_seq
        await stack.request("undrain.requested", {"node_id": drained})
        await stack.wait_for_node(drained, "undrained", after=sequence)

    done = await stack.cli("fetch", run_id, str(tmp_path / "fetched"))
    assert done.code == 0, done.text
    [state] = (tmp_path / "fetched").rglob("state.json")
    history = json.loads(state.read_text())
    assert [epoch for epoch, _ in history] == list(range(1, EPOCHS + 1))
    assert len({process for _, process in history}) == 3
    assert (state.parent / "model.txt").read_text() == "a model of nine epochs"
    output = await stack.cli("logs", run_id, "--grep", "begins after")
    assert output.text.split("\n")[:3] == ["begins after 0", "begins after 3", "begins after 6"]

    await stack.tracked(run_id)
    info = read_stack(stack.data_dir)
    assert info is not None
    client = MlflowClient(info.mlflow_tracking_uri)
    tracked = [fact.event for fact in await stack.facts(run_id) if fact.event.fact == "tracked"]
    first = client.get_run(tracked[0].mlflow_run_id)
    pages = client.search_runs([first.info.experiment_id], f"tags.`trainbus.run_id` = '{run_id}'")
    assert {page.info.run_id for page in pages} >= {first.info.run_id}
    parents = {page.info.run_id: page.data.tags.get("mlflow.parentRunId") for page in pages}
    assert parents.pop(first.info.run_id) is None
    assert set(parents.values()) <= {first.info.run_id}
    # Each epoch is one point, at the step that it has over all attempts.
    points = [point for page in pages for point in client.get_metric_history(page.info.run_id, "loss")]
    assert {point.step: point.value for point in points} == {
        epoch: pytest.approx(1 / epoch, abs=1e-4) for epoch in range(1, EPOCHS + 1)
    }


#: Counts its steps from 0 where it reports, as loops do, and keeps how many are done.
COUNTING_SCRIPT = """
import trainbus

for step in range(6):
    trainbus.report(step=step, loss=1 / (step + 1))
    if step % 3 == 2:
        open("state", "w").write(str(step))
        trainbus.checkpoint("state", step=step + 1)
"""


async def test_a_run_is_at_the_step_of_its_last_checkpoint_everywhere(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTING_SCRIPT)
    done = await stack.cli("submit", str(tmp_path), "--command", "python train.py", "--name", "counting", "--follow")
    assert done.code == 0, done.text
    assert " at step 6\n" in done.out
    [row] = json.loads((await stack.cli("ps", "--name", "counting", "--json")).out)
    assert (row["step"], row["last_checkpoint"]["step"], row["metrics"]["loss"]) == (6, 6, pytest.approx(1 / 6))
    listed = json.loads((await stack.cli("checkpoints", "ls", "counting", "--json")).out)
    assert listed[-1]["step"] == 6


async def test_what_a_script_leaves_without_a_step_has_a_version_everywhere(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; open(os.environ['TRAINBUS_OUTPUT_DIR'] + '/model', 'w').write('x')")
    command = ("submit", str(tmp_path), "--command", "python train.py", "--name", "stepless", "--follow")
    done = await stack.cli(*command)
    assert "checkpoint of version 1 saved" in done.out, done.text
    for shown in (("show", "stepless"), ("checkpoints", "ls", "stepless"), ("checkpoints", "show", "stepless@1")):
        assert "version 1" in (await stack.cli(*shown)).out
