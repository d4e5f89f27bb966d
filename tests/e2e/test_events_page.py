"""The example for other systems in docs/events.md works as it is printed there, and the example requests are valid."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.e2e.support import Stack
from tests.test_docs import python_example
from trainbus.embedded.launch import read_stack

pytestmark = [pytest.mark.e2e]


async def test_the_python_example_follows_a_run_to_its_end(stack: Stack) -> None:
    info = read_stack(stack.data_dir)
    assert info is not None
    script = python_example()
    assert script.count("nats://127.0.0.1:4222") == 1
    script = script.replace("nats://127.0.0.1:4222", info.nats_url)
    for _ in range(2):  # sent again it is the same run, and the whole of its life is there to be read
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 240)
        lines = output.decode().splitlines()
        assert process.returncode == 0, lines
        facts = [line.split(" ", 1)[0] for line in lines]
        assert (facts[0], facts[-1]) == ("accepted", "completed")
        assert facts.count("placed") == 1
