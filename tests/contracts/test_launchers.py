"""Commands that start a launcher of their own."""

from __future__ import annotations

import pytest

from contracts.spec.launchers import describe_launcher, find_launcher

COMMANDS = [
    ("torchrun", ["torchrun", "--nproc_per_node", "2", "train.py"], "torchrun"),
    ("a path", ["/opt/venv/bin/torchrun", "train.py"], "torchrun"),
    ("module", ["python", "-m", "torch.distributed.run", "train.py"], "torch.distributed.run"),
    ("accelerate", ["accelerate", "launch", "train.py"], "accelerate launch"),
    ("accelerate without launch", ["accelerate", "env"], None),
    ("deepspeed", ["deepspeed", "train.py", "--deepspeed", "ds.json"], "deepspeed"),
    ("mpirun", ["mpirun", "-np", "2", "python", "train.py"], "mpirun"),
    ("in a shell", ["bash", "-c", "cd src && torchrun train.py"], "torchrun"),
    ("behind env", ["env", "A=1", "torchrun", "train.py"], "torchrun"),
    ("a script's argument", ["python", "train.py", "--launcher", "torchrun"], None),
    ("a script", ["python", "train.py"], None),
    ("a module", ["python", "-m", "mypackage.train"], None),
]


@pytest.mark.parametrize(("command", "launcher"), [case[1:] for case in COMMANDS], ids=[case[0] for case in COMMANDS])
def test_launchers_are_recognised(command: list[str], launcher: str | None) -> None:
    assert find_launcher(command) == launcher


def test_the_message_has_the_right_line() -> None:
    message = describe_launcher(["torchrun", "--nproc_per_node=2", "src/train.py"], 4)
    assert message is not None
    assert "python src/train.py" in message
    assert "ask for 1 slot" in message
    assert describe_launcher(["torchrun", "src/train.py"], 1) is None
