"""docs/operations.md, line by line: each command that it prints does its work on a live stack."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from contracts import topology
from tests.docs.document import read_blocks
from tests.e2e.support import DONE_S, Stack
from tests.kit.support import until

pytestmark = [pytest.mark.e2e]

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
#: A command within a sentence. Without what it needs it is only spoken of, and one serves until it is stopped.
SPAN = re.compile(r"`(trainbus [a-z][^`]*)`")
SPOKEN_OF = frozenset({"trainbus undrain", "trainbus policy apply", "trainbus ui"})
#: What ends with an error: nothing has fixed the cause of the dead letter.
FAILS_AGAIN = "trainbus dead-letters retry ID"
#: What the page leaves for the operator to put in.
NAME = re.compile(r"\b[A-Z]{2,}\b")


def printed_commands(page: str) -> list[str]:
    """The commands of the blocks, in their order, and those in sentences, each once."""
    lines = [line for block in read_blocks(page) if block.kind == "commands" for line in block.content.splitlines()]
    commands = [" ".join(line.partition("#")[0].split()) for line in (*lines, *SPAN.findall(page))]
    return [command for command in dict.fromkeys(commands) if command and command not in SPOKEN_OF]


async def follow(command: str, names: Mapping[str, str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a command as an operator would who puts names in and agrees; return what is wrong, '' if nothing is."""
    command = NAME.sub(lambda found: names[found[0]], command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, **environment, "PATH": path},
    )
    output, _ = await asyncio.wait_for(process.communicate(b"y\n"), DONE_S)
    return "" if process.returncode == 0 else f"{command} ends with {process.returncode}: {output.decode()}"


async def test_each_command_of_the_page_works(stack: Stack, tmp_path: Path) -> None:
    run_id = await stack.publish(await stack.slow_run(epochs=1, step_s=0.0))
    await stack.wait_for(run_id, "promoted", or_else=("not_promoted",))
    before = await stack.bus.get_last_sequence("dead.>", stream=topology.DEAD_LETTERS.name)
    await stack.bus.js.publish(f"run.{run_id}.checkpoint_staged", b"no JSON")

    async def dead_letter() -> int:
        last = await stack.bus.get_last_sequence("dead.>", stream=topology.DEAD_LETTERS.name)
        return last if last > before else 0

    await until(dead_letter, "a dead letter")
    policy = json.loads((await stack.cli("policy", "show", "--json")).out)
    names = {
        "RUN": run_id,
        "NODE": "node-1",
        "ID": str(await dead_letter()),
        "TEXT": "'a fan is loud'",
        "DIGEST": policy["digest"],
    }
    commands = printed_commands(PAGE.read_text())
    assert len(commands) > 15
    problems = {command: await follow(command, names, stack.environment, tmp_path) for command in commands}
    assert "failed again and is kept" in problems.pop(FAILS_AGAIN)
    assert {command: problem for command, problem in problems.items() if problem} == {}
