"""The embedded stack with nodes that come and go, for real."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_stack import Up, until
from trainbus.embedded.layout import InvalidOptionsError, StackOptions, plan_stack, policy_file

pytestmark = pytest.mark.shell


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    without = [each for name in ("evaluation", "tracking", "ingestion") for each in ("--without", name)]
    stack = Up(tmp_path / "data", "--autoscale", "burst=2", "--idle-s", "2", *without)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def processes(up: Up) -> set[str]:
    return {each["name"] for each in up.info().processes}


def test_a_node_is_started_for_a_run_and_stopped_when_it_is_idle(up: Up, tmp_path: Path) -> None:
    assert "autoscaler" in processes(up)
    assert not [name for name in processes(up) if name.startswith("burst")]
    job = tmp_path / "job"
    job.mkdir()
    (job / "job.py").write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    # The stack's own node has one slot.
    done = up.cli("submit", str(job), "--command", "python job.py", "--slots", "2", "--name", "wide", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    placed = json.loads(up.cli("show", "wide", "--json").stdout)
    assert "burst-0" in json.dumps(placed)
    # Two would have been allowed; one was enough.
    assert "burst-1" not in processes(up)
    # The nodes are the supervisor's: they outlive the autoscaler, and the next one knows them.
    pid = up.pid("autoscaler")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    def gone() -> bool:
        return "burst-0" not in processes(up)

    until(gone, 120.0, lambda: up.output.read_text() + (up.data_dir / "logs" / "autoscaler.log").read_text())
    node = next(each for each in nodes(up) if each["node_id"] == "burst-0")
    assert node["state"] == "left"
    # It was drained first, and its agent ended in good order.
    events = up.cli("events").stdout
    assert "draining" in events
    # And another one comes for the next run.
    again = up.cli("submit", str(job), "--command", "python job.py", "--slots", "2", "--name", "again", "--follow")
    assert again.returncode == 0, again.stdout + again.stderr
    # With those that can come there are three slots, at any time.
    for slots, is_told in ((3, False), (4, True)):
        asked = up.cli("submit", str(job), "--command", "python job.py", "--slots", str(slots))
        assert asked.returncode == 0
        assert ("it waits until more nodes join" in asked.stderr) == is_told, asked.stderr


def nodes(up: Up) -> list[dict[str, Any]]:
    return list(json.loads(up.cli("nodes", "--json").stdout))


def test_pools_are_written_into_the_policy(tmp_path: Path) -> None:
    layout = plan_stack(StackOptions(tmp_path, autoscale=("burst=3",), idle_s=5, slots=4), {})
    environments = {unit.name: unit.environment for unit in layout.units}
    assert environments["scheduler"]["TRAINBUS_POLICY"] == str(policy_file(tmp_path))
    pools = json.loads(policy_file(tmp_path).read_text())["pools"]
    assert pools["idle_s"] == 5
    (pool,) = pools["pools"]
    assert (pool["name"], pool["max_nodes"], pool["slots_per_node"]) == ("burst", 3, 4)
    kept = plan_stack(StackOptions(tmp_path), {})
    assert "autoscaler" in {unit.name for unit in kept.units}
    assert json.loads(policy_file(tmp_path).read_text())["pools"] == pools
    plain = plan_stack(StackOptions(tmp_path, policy="default"), {})
    assert "autoscaler" not in {unit.name for unit in plain.units}
    assert not policy_file(tmp_path).exists()
    assert [unit.name for unit in plain.spare] == ["autoscaler"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"autoscale": ("burst",)}, "say NAME=MAX"),
        ({"autoscale": ("node=1",)}, "must not be called node"),
        ({"autoscale": ("a b=1",)}, "name"),
        ({"policy": "no-such-policy"}, "no-such-policy"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidOptionsError, match=problem):
        plan_stack(StackOptions(tmp_path, **options), {})
