"""Which stack a command means: the one here, the named one, the only one that runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.scheduling import Policy
from services.kit.bus import Bus
from services.kit.settings import Settings
from services.scheduler import policies
from services.scheduler.app import SchedulerSettings, policy_of
from services.scheduler.core.state.cluster import Cluster
from tests.client_address import serve_clients
from tests.scheduler.test_policy_adoption import ADOPTED, started
from trainbus.client.address import find_named_data_dir, find_running_data_dir
from trainbus.client.client import AsyncClient
from trainbus.client.errors import UsageError
from trainbus.commands.stack import adopt_given_policy
from trainbus.embedded.layout import StackOptions, given_policy, stack_file, write_policy
from trainbus.embedded.registry import list_stacks, register, registry_dir, unregister
from trainbus.embedded.supervisor import lock


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with a state folder of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("TRAINBUS_STACK", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def run_stack(tmp_path: Path) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as held:
        yield held


def start(held: contextlib.ExitStack, data_dir: Path, name: str | None = None) -> str:
    """Hold a data folder as a supervisor does, and register its stack."""
    file = lock(data_dir)
    assert file is not None
    held.enter_context(file)
    urls = dict.fromkeys(("nats_url", "s3_endpoint", "gateway_url", "mlflow_tracking_uri"), "http://127.0.0.1:1")
    state = {"state": "ready", "pid": 1, "nodes": 1, "slots": 1, "processes": [], **urls}
    stack_file(data_dir).write_text(json.dumps(state))
    return register(data_dir, name)


def test_the_only_stack_that_runs_is_found_from_any_folder(tmp_path: Path, run_stack: contextlib.ExitStack) -> None:
    assert find_running_data_dir() == Path(".trainbus")
    data_dir = tmp_path / "houses" / ".trainbus"
    assert start(run_stack, data_dir) == "houses"
    assert find_running_data_dir() == data_dir
    unregister(data_dir)
    assert find_running_data_dir() == Path(".trainbus")


def test_the_stack_of_this_folder_wins(tmp_path: Path, run_stack: contextlib.ExitStack) -> None:
    start(run_stack, tmp_path / "houses" / ".trainbus")
    own = tmp_path / "work" / ".trainbus"
    own.mkdir()
    (own / "stack.lock").touch()
    assert find_running_data_dir() == own


def test_two_stacks_and_no_name_is_an_error_that_lists_them(
    tmp_path: Path, run_stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / each / ".trainbus" for each in ("a/houses", "b/houses", "c")]
    names = [start(run_stack, folders[0]), start(run_stack, folders[1]), start(run_stack, folders[2], "night")]
    assert names == ["houses", "houses-2", "night"]
    with pytest.raises(UsageError, match="several stacks run") as error:
        find_running_data_dir()
    assert all(
        name in str(error.value) and str(where) in str(error.value) for name, where in zip(names, folders, strict=True)
    )
    for name, where in zip(names, folders, strict=True):
        assert find_named_data_dir(name) == where
        monkeypatch.setenv("TRAINBUS_STACK", name)
        assert find_running_data_dir() == where
    with pytest.raises(UsageError, match="no stack 'day' runs"):
        find_named_data_dir("day")


def test_what_a_killed_stack_left_is_ignored_and_deleted_by_the_next(
    tmp_path: Path, run_stack: contextlib.ExitStack
) -> None:
    with contextlib.ExitStack() as killed:
        start(killed, tmp_path / "old")
    (registry_dir() / "damaged.json").write_text("{")
    assert list_stacks() == []
    assert start(run_stack, tmp_path / "new" / "old") == "old"
    assert len(list(registry_dir().iterdir())) == 1


def test_a_start_without_a_policy_asks_for_none(tmp_path: Path) -> None:
    file = tmp_path / "team.toml"
    file.write_text('name = "team"\n[order]\nskip = true\n')
    in_force = Policy(name="other")
    assert write_policy(StackOptions(tmp_path)) == ({}, False)
    assert given_policy(StackOptions(tmp_path), in_force) is None
    team = StackOptions(tmp_path, policy=str(file))
    assert write_policy(team)[0].keys() == {"TRAINBUS_POLICY"}
    assert given_policy(team, in_force) == policies.load(str(file))
    file.unlink()
    assert write_policy(StackOptions(tmp_path)) == ({}, False)
    settings, scales = write_policy(StackOptions(tmp_path, autoscale=("burst=2",)))
    assert settings
    assert scales
    # The pool of an earlier start is changed, not doubled; it stays without the option. All else is as in force.
    two, three = (StackOptions(tmp_path, autoscale=(f"burst={most}",)) for most in (2, 3))
    assert write_policy(three)[1]
    with_two = given_policy(two, in_force)
    assert with_two is not None
    with_three = given_policy(three, with_two)
    assert with_three is not None
    assert with_three.name == "other"
    assert [pool.max_nodes for pool in with_three.pools.pools] == [3]
    assert write_policy(StackOptions(tmp_path)) == ({}, True)
    default = StackOptions(tmp_path, policy="default")
    settings, scales = write_policy(default)
    assert (settings["TRAINBUS_POLICY"], scales) == ("default", False)
    # What a new log begins with is what an old one is asked for.
    first = policy_of(SchedulerSettings(policy="default", resume_cost_s=float(settings["TRAINBUS_RESUME_COST_S"])))
    assert given_policy(default, in_force) == first.choose(Cluster())


async def test_a_start_with_a_policy_adopts_it_in_place_of_the_one_in_force(
    settings: Settings, bus: Bus, tmp_path: Path
) -> None:
    async with (
        started(settings, policy="fifo"),
        serve_clients(settings) as address,
        AsyncClient(address=address) as client,
    ):
        assert "policy: fifo" in await adopt_given_policy(client, StackOptions(tmp_path))
        assert "policy: fifo" in await adopt_given_policy(client, StackOptions(tmp_path, policy="fifo"))
        assert "policy: fgd" in await adopt_given_policy(client, StackOptions(tmp_path, policy="fgd"))
        assert "policy: fgd" in await adopt_given_policy(client, StackOptions(tmp_path, autoscale=("burst=2",)))
        assert "policy: fgd" in await adopt_given_policy(client, None)
        fact = (await client.policy()).fact
        assert [pool.name for pool in fact.policy.pools.pools] == ["burst"]
        assert (fact.origin, fact.reason) == ("request", "given to `trainbus up`")
    assert len(await bus.read_history(ADOPTED)) == 3
