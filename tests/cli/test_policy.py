"""``trainbus policy`` against a scheduler on a real bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from click.testing import Result
from typer.testing import CliRunner

from contracts.events.capacity import PolicyAdopted
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler import policies
from tests.client_address import serve_clients
from tests.scheduler.test_policy_adoption import ADOPTED, FIFO, SKIP, started
from tests.scheduler.test_shell import COMMAND, join, request, until
from trainbus.client.address import StackAddress
from trainbus.commands.main import app
from trainbus.commands.policy import load_policy


class CommandLine:
    """The ``trainbus`` command against one bus."""

    def __init__(self, address: StackAddress) -> None:
        self._environment = {"TRAINBUS_GATEWAY_URL": address.gateway_url, "COLUMNS": "200"}

    async def run(self, *args: str, answer: str = "") -> Result:
        def invoke() -> Result:
            return CliRunner().invoke(app, ["policy", *args], input=answer, env=self._environment)

        return await asyncio.to_thread(invoke)

    async def read(self, *args: str) -> Any:
        result = await self.run(*args, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest_asyncio.fixture
async def line(settings: Settings, bus: Bus) -> AsyncIterator[CommandLine]:
    async with serve_clients(settings) as address:
        yield CommandLine(address)


async def test_a_policy_is_shown_compared_and_adopted(
    settings: Settings, bus: Bus, line: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "team.toml"
    async with started(settings, policy="fifo"):
        await join(bus, "n1", 2)
        holder = await request(bus, "train", COMMAND, "holder")
        await until(bus, f"run.{holder}.placed")
        wide = await request(bus, "train", {**COMMAND, "slots": 2}, "wide")
        small = await request(bus, "train", COMMAND, "small")
        await until(bus, f"run.{wide}.waiting")
        await until(bus, f"run.{small}.waiting")
        shown = await line.run("show")
        assert f"# {FIFO.digest}, adopted" in shown.stdout
        file.write_text(shown.stdout.replace('"fifo"', '"team"').replace("[order]", "[order]\nskip = true"))
        found = await line.read("diff", str(file))
        assert found["changes"] == [
            {"setting": "name", "in_force": "fifo", "candidate": "team"},
            {"setting": "order.skip", "in_force": False, "candidate": True},
        ]
        assert [
            (each["run_id"], each["in_force"][0]["detail"], each["candidate"][0]["what"]) for each in found["runs"]
        ] == [(small, "priority", "placed")]
        # Looking changes nothing; nor does saying no.
        declined = await line.run("apply", str(file), "--reason", "gangs wait", answer="n\n")
        assert declined.exit_code == 1
        assert "the next cycles would decide otherwise about 1 of 3 runs" in declined.stdout
        assert await bus.read_history(f"run.{small}.placed") == []
        adopted = await line.run("apply", str(file), "--reason", "gangs wait", answer="y\n")
        assert "gangs wait" in adopted.stdout.splitlines()[-1]
        await until(bus, f"run.{small}.placed")
        told = await line.read("show")
        assert (told["name"], told["reason"], told["origin"]) == ("team", "gangs wait", "request")
        assert told["user"]
        assert load_policy(str(file)).digest == told["digest"]
        # The way back: the policy before is a file again.
        file.write_text((await line.run("show", FIFO.digest[:6])).stdout)
        assert load_policy(str(file)) == FIFO
        assert f"{FIFO.digest} (fifo)" in str((await line.run("show", "zz")).exception)
        file.write_text((await line.run("show")).stdout)
        # Once more changes nothing, and says so.
        again = await line.read("apply", str(file), "--reason", "twice", "--yes")
        assert again["reason"] == "gangs wait"
    assert len(await bus.read_history(ADOPTED)) == 2


async def test_a_policy_that_would_preempt_or_fail_runs_says_so(
    settings: Settings, bus: Bus, line: CommandLine
) -> None:
    async with started(settings, policy="fifo"):
        await join(bus, "n1", 1)
        low = await request(bus, "train", COMMAND, "low")
        await until(bus, f"run.{low}.placed")
        high = await request(bus, "train", {**COMMAND, "priority": 5}, "high")
        await until(bus, f"run.{high}.waiting")
        result = await line.run("diff", "fifo", "--set", 'order.by=["priority"]', "--set", 'preemption.by=["priority"]')
        row = next(each for each in result.stdout.splitlines() if low in each)
        assert "preempted" in row


async def test_a_policy_made_from_another_one_is_refused(settings: Settings, bus: Bus, line: CommandLine) -> None:
    async with started(settings, policy="fifo"):
        await until(bus, ADOPTED)
        done = await line.run("apply", "fifo-skip", "--reason", "first", "--yes")
        assert done.exit_code == 0
        late = await line.run("apply", "fgd", "--reason", "second", "--yes", "--replaces", FIFO.digest)
        assert late.exit_code != 0
        assert f"policy fifo-skip ({SKIP.digest}) in force" in str(late.exception)
    assert len(await bus.read_history(ADOPTED)) == 2


async def test_the_default_that_nobody_chose_is_adopted_once_somebody_chooses_it(
    settings: Settings, bus: Bus, line: CommandLine
) -> None:
    async with started(settings):
        await until(bus, ADOPTED)
        fact = await line.read("apply", policies.DEFAULT, "--reason", "as it is", "--yes")
        assert fact["origin"] == "request"
    adoptions: list[PolicyAdopted] = [each.event for each in await bus.read_history(ADOPTED)]
    assert [each.origin for each in adoptions] == ["default", "request"]


async def test_errors_name_the_file_the_place_and_what_to_change(
    settings: Settings, bus: Bus, line: CommandLine, tmp_path: Path
) -> None:
    file = tmp_path / "team.toml"
    for text, words in (
        ("[order\nskip = true\n", "line 1"),
        ("[order]\nskipp = true\n", "order.skipp: unknown field: did you mean order.skip"),
        ("[preemption]\nmin_run_s = -1\n", "preemption.min_run_s"),
        ("[preemption]\nby = []\n[reclaim]\nby = []\n", "reclaim is the earlier name of preemption"),
    ):
        file.write_text(text)
        result = await line.run("apply", str(file), "--reason", "x", "--yes")
        assert str(file) in str(result.exception)
        assert words in str(result.exception)
    nobody = await line.run("diff", "fifo")
    assert "no scheduler of this version answers" in str(nobody.exception)
