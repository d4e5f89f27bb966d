"""What bad input gets: within seconds, words that say what to change, and nothing else disturbed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Stack, package

pytestmark = [pytest.mark.e2e]

HELLO: dict[str, Any] = {"name": "hello", "command": ["python", "-c", "print('hello')"]}
SECONDS = 120.0


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        pytest.param({"epohcs": 3}, "epohcs", "unknown field", id="unknown field"),
        pytest.param({"priority": "high"}, "priority", "a whole number", id="wrong type"),
        pytest.param({"slots": -1}, "slots.min", "at least 1", id="negative size"),
        pytest.param({"slots": {"min": 4, "max": 1}}, "slots", "smaller than slots.min", id="sizes reversed"),
        pytest.param({"task": "task:Task"}, "", "exactly one of 'task'", id="two ways to run"),
    ],
)
async def test_a_request_that_does_not_fit_is_rejected(
    stack: Stack, change: dict[str, Any], field: str, message: str
) -> None:
    run_id = await stack.publish({**HELLO, **change})
    rejected = await stack.wait_for(run_id, "rejected", SECONDS)
    assert any(problem.field == field and message in problem.message for problem in rejected.problems), rejected


async def test_an_impossible_size_is_accepted_and_explained(stack: Stack) -> None:
    run_id = await stack.publish({**HELLO, "slots": 1000})
    await stack.wait_for(run_id, "accepted", SECONDS)
    waiting = await stack.wait_for(run_id, "waiting", SECONDS)
    assert waiting.code == "infeasible"
    assert "1000" in waiting.message
    # It stands in nobody's way, and can be cancelled.
    other = await stack.publish(HELLO)
    await stack.wait_for(other, "completed", SECONDS)
    await stack.bus.js.publish("cancel.requested", b'{"run_id":"' + run_id.encode() + b'"}')
    await stack.wait_for(run_id, "cancelled", SECONDS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("s3://lake/nothing-here/", "nothing-here", id="missing dataset"),
        pytest.param("s3://no-such-bucket/x/", "no-such-bucket", id="missing bucket"),
    ],
)
async def test_a_dataset_that_is_not_there_fails_the_run(stack: Stack, source: str, message: str) -> None:
    run_id = await stack.publish(await stack.slow_run(data={"source": source, "format": "images"}))
    failed = await stack.wait_for(run_id, "failed", SECONDS)
    assert message in failed.reason


async def test_an_empty_dataset_fails_the_run(stack: Stack) -> None:
    await stack.objects.put("s3://lake/unlabelled/readme.txt", b"no image here")
    source = {"source": "s3://lake/unlabelled/", "format": "images"}
    run_id = await stack.publish(await stack.slow_run(data=source))
    failed = await stack.wait_for(run_id, "failed", SECONDS)
    assert "s3://lake/unlabelled/" in failed.reason


@pytest.mark.parametrize(
    ("files", "task", "message"),
    [
        pytest.param({"task.py": "import nothing_like_it"}, "task:Mine", "nothing_like_it", id="import fails"),
        pytest.param({"task.py": "1/0"}, "task:Mine", "ZeroDivisionError", id="module raises"),
        pytest.param({"other.py": ""}, "task:Mine", "no module 'task'", id="no such module"),
        pytest.param({"task.py": "class Other: pass"}, "task:Mine", "Mine", id="no such class"),
        pytest.param({"../../evil.py": "x = 1"}, "task:Mine", "evil.py", id="package writes outside"),
        pytest.param({"/tmp/evil.py": "x = 1"}, "task:Mine", "evil.py", id="package writes to an absolute path"),
    ],
)
async def test_a_package_that_cannot_be_used_fails_the_run(
    stack: Stack, files: dict[str, str], task: str, message: str
) -> None:
    code = await stack.upload(package(files))
    run_id = await stack.publish(await stack.slow_run(code=code, task=task, params={}, max_attempts=1))
    failed = await stack.wait_for(run_id, "failed", 2 * SECONDS)
    assert message in failed.reason, failed


async def test_a_package_with_another_hash_fails_the_run(stack: Stack) -> None:
    code = await stack.upload(package({"task.py": "x = 1"}))
    wrong = {**code, "sha256": "0" * 64}
    run_id = await stack.publish(await stack.slow_run(code=wrong, task="task:Mine", params={}, max_attempts=1))
    failed = await stack.wait_for(run_id, "failed", SECONDS)
    assert "hash" in failed.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(b'{"name": "cut off', "not JSON", id="no json"),
        pytest.param(b'"' + b"x" * 2_000_000 + b'"', "2,000,002 bytes", id="2 MB"),
    ],
)
async def test_what_is_no_request_at_all_is_answered_with_the_reason(stack: Stack, body: bytes, reason: str) -> None:
    run_id = await stack.publish(body)
    assert reason in (await stack.wait_for(run_id, "rejected", SECONDS)).reason
    run_id = await stack.publish(HELLO)
    await stack.wait_for(run_id, "completed", SECONDS)


SCRIPT = """
def load(row):
    return row["f0"]


print("loss 0.5")
load({})
"""


async def test_a_follower_is_told_a_failure_once_and_in_the_projects_lines(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ("submit", str(tmp_path), "--name", "broken", "--command", "python train.py", "--follow")
    done = await stack.cli(*command)
    assert done.code == 1
    told = done.out + done.err
    assert told.count("KeyError") == 1
    assert 'File "train.py", line 3, in load\n    return row["f0"]' in done.out
    assert told.count('File "') == 2
    assert "trainbus logs" in done.err.splitlines()[-1]
    why = (await stack.cli("why", "broken")).out
    assert "KeyError: 'f0' (train.py:3, in load)" in why
    assert 'File "train.py", line 7' in why
    assert "Traceback (most recent call last):" in (await stack.cli("logs", "broken")).out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        pytest.param("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)", "mat1 and mat2 shapes", id="shapes"),
        pytest.param("bytearray(10**15)", "smaller batch", id="memory"),
        pytest.param("import nothing_like_it", "requirements.txt", id="module"),
        pytest.param("print('loss 1')\nnothing_like_it", "NameError", id="name after a step"),
    ],
)
async def test_what_another_attempt_cannot_change_runs_once(
    stack: Stack, tmp_path: Path, code: str, message: str
) -> None:
    command = ["python", "-c", code]
    run_id = await stack.publish({"name": "once", "command": command, "metric_patterns": {"loss": "loss ([0-9.]+)"}})
    failed = await stack.wait_for(run_id, "failed", SECONDS)
    assert failed.generation == 1
    assert message in failed.reason


async def test_a_task_whose_tensors_do_not_fit_runs_once(stack: Stack) -> None:
    task = """
        from torch import nn

        from trainbus import Task


        class Mine(Task):
            def model(self):
                return nn.Linear(7, 3)

            def decode(self, sample):
                import torch

                return torch.zeros(6)

            def loss(self, model, batch):
                return model(batch).mean()
    """
    code = await stack.upload(package({"task.py": textwrap.dedent(task)}))
    run_id = await stack.publish(await stack.slow_run(code=code, task="task:Mine", params={}))
    failed = await stack.wait_for(run_id, "failed", SECONDS)
    assert failed.generation == 1
    assert "mat1 and mat2 shapes" in failed.reason
