"""The adapters: a file a node, and a command of the operator's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from contracts.scheduling import Pool
from services.autoscaler.adapters import AdapterError
from services.autoscaler.adapters.command import CommandAdapter
from services.autoscaler.adapters.local import LocalAdapter

POOL = Pool(name="burst", slots_per_node=2, max_nodes=3, capacity="spot", cluster="east")
OTHER = Pool(name="other", max_nodes=3)


async def test_a_file_stands_for_a_node(tmp_path: Path) -> None:
    adapter = LocalAdapter(tmp_path / "nodes")
    assert await adapter.nodes(POOL) == []
    assert await adapter.start(POOL, 2) == ["burst-0", "burst-1"]
    assert await adapter.start(OTHER, 1) == ["other-0"]
    assert [each.node_id for each in await LocalAdapter(tmp_path / "nodes").nodes(POOL)] == ["burst-0", "burst-1"]
    content = json.loads((tmp_path / "nodes" / "burst-0.json").read_text())
    assert content["slots"] == 2
    assert content["labels"] == {"pool": "burst", "capacity": "spot", "cluster": "east"}
    await adapter.stop(POOL, ["burst-0", "never-there"])
    assert await adapter.start(POOL, 1) == ["burst-0"]  # names that are free are taken again


SCRIPT = """
import json, sys
from pathlib import Path
about = json.load(sys.stdin)
assert about["labels"]["pool"] == about["name"] == sys.argv[2]
file = Path(__file__).with_suffix(".state")
there = json.loads(file.read_text()) if file.exists() else []
if sys.argv[1] == "start":
    new = [f"vm-{len(there) + n}" for n in range(int(sys.argv[3]))]
    if len(there) + len(new) > 2:
        sys.exit("quota exceeded")
    file.write_text(json.dumps(there + new))
    print(json.dumps(new))
elif sys.argv[1] == "stop":
    file.write_text(json.dumps([each for each in there if each not in sys.argv[3:]]))
else:
    print(json.dumps([{"node_id": each, "started_at": "2026-01-01T00:00:00+00:00"} for each in there]))
"""


async def test_a_command_has_the_machines(tmp_path: Path) -> None:
    script = tmp_path / "cloud.py"
    script.write_text(SCRIPT)
    adapter = CommandAdapter(f"{sys.executable} {script}")
    assert await adapter.start(POOL, 2) == ["vm-0", "vm-1"]
    with pytest.raises(AdapterError, match=r"ended with 1: quota exceeded"):
        await adapter.start(POOL, 1)
    await adapter.stop(POOL, ["vm-0"])
    (left,) = await adapter.nodes(POOL)
    assert (left.node_id, left.started_at.year) == ("vm-1", 2026)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("/nothing/there", "cannot be run"),
        ("/bin/echo hello", "printed no JSON"),
        ("/bin/echo {}", "printed no JSON|no list"),
    ],
)
async def test_a_command_that_fails_is_an_error_with_its_reason(command: str, problem: str) -> None:
    with pytest.raises(AdapterError, match=problem):
        await CommandAdapter(command).nodes(POOL)
