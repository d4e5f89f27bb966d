"""Every kind of training there is, through the whole stack: DeepSpeed, bf16, a GPT, somebody's own script."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import DONE_S, PROJECT, Stack, held, package
from trainbus.ranks.step_hold import StepHold

pytestmark = [pytest.mark.e2e]

EXAMPLES = Path(__file__).parents[2] / "examples"


async def digits_run(stack: Stack, *, epochs: int, hold: StepHold | None = None, **training: Any) -> dict[str, Any]:
    """A request that trains the digits example on the small digits, 15 steps an epoch; with a hold it waits at 10."""
    sources = (EXAMPLES / "digits" / "task.py", PROJECT / "held_digits.py")
    code = await stack.upload(package({path.name: path.read_text() for path in sources}))
    training = {"epochs": epochs, "global_batch": 16, "checkpoint_every_steps": 15, **training}
    params = {"width": 4, **held({hold: 10} if hold is not None else None)}
    return await stack.slow_run(code=code, task="held_digits:HeldDigits", params=params, training=training)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="the extra 'deepspeed' is not installed")
async def test_deepspeed_shrinks_from_two_ranks_to_one(stack: Stack) -> None:
    with stack.hold() as in_mid_run, stack.hold() as slots_taken:
        body = await digits_run(stack, epochs=6, hold=in_mid_run, strategy="deepspeed", zero_stage=1)
        run_id = await stack.publish(body)
        await stack.wait_for_step(run_id, 3, DONE_S)
        # Two find a free slot; for the third the run must shrink.
        others = [await stack.occupant(slots_taken, priority=5) for _ in range(3)]
        shrunk = await stack.wait_for(run_id, "placed", DONE_S, lambda placed: placed.generation == 2)
    for other in others:
        await stack.wait_for(other, "completed", DONE_S)
    await stack.wait_for(run_id, "completed", DONE_S)
    placed = await stack.wait_for(run_id, "placed")
    assert (placed.world_size, shrunk.world_size) == (2, 1)
    assert shrunk.resume is not None
    await stack.audit(run_id, epochs=6)


async def test_bf16(stack: Stack) -> None:
    run_id = await stack.publish(await digits_run(stack, epochs=2, precision="bf16"))
    await stack.wait_for(run_id, "completed", DONE_S)
    await stack.audit(run_id, epochs=2)


async def test_a_language_model_is_submitted_and_learns(stack: Stack) -> None:
    fill = [str(EXAMPLES / "gpt" / "fill.py"), "--data-dir", str(stack.data_dir), "--most", "3"]
    filled = await stack.shell(sys.executable, *fill)
    assert filled.code == 0, filled.text
    done = await stack.cli(
        "submit",
        str(EXAMPLES / "gpt"),
        "task:ByteGPT",
        *("--request", str(EXAMPLES / "gpt" / "train.json")),
        *("--max-steps", "40", "--slots", "1", "--param", "width=32", "--param", "context=32"),
        "--follow",
    )
    assert done.code == 0, done.text
    run_id = done.out.split()[0]
    history = await stack.tracked(run_id, "train/loss", "test/bits_per_byte")
    losses = [history["train/loss"][step] for step in sorted(history["train/loss"])]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    # An untrained model needs eight bits a byte; what was measured on the test split is in MLflow too.
    [promoted] = [r.event for r in await stack.facts(run_id) if r.event.fact == "promoted"]
    assert promoted.model == "gpt-bytes"
    [evaluated] = [r.event for r in await stack.facts(run_id) if r.event.fact == "evaluated"]
    assert 0 < evaluated.metrics["test/bits_per_byte"] < 7


@pytest.mark.parametrize(("breaks", "code"), [pytest.param("", 0, id="ends well"), pytest.param("1", 1, id="breaks")])
async def test_a_script_of_ones_own_on_two_slots(stack: Stack, tmp_path: Path, breaks: str, code: int) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(PROJECT / "gang.py", project)
    request = {"name": "gang", "max_attempts": 1, "metric_patterns": {"throughput": r"throughput=([0-9.]+)"}}
    (tmp_path / "request.json").write_text(json.dumps(request))
    done = await stack.cli(
        *("submit", str(project), "--request", str(tmp_path / "request.json")),
        *("--command", f"python gang.py {breaks}".strip(), "--slots", "2", "--follow"),
    )
    assert done.code == code, done.text
    run_id = done.out.split()[0]
    placed = await stack.wait_for(run_id, "placed")
    assert [len(member.ranks) for member in placed.members] == [2]
    history = await stack.tracked(run_id, "train/loss", "throughput")
    steps = range(1, 3 if breaks else 6)
    assert history["train/loss"] == {step: pytest.approx(1 / (2 * step + 1)) for step in steps}
    assert sorted(history["throughput"].values()) == [100.0 * step for step in steps]
    if breaks:
        # The rank that broke is named, with its own last words.
        assert "rank 1 on node" in done.text
        assert "rank 1 breaks" in done.text
