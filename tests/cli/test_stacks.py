"""Which stack a command means: the one here, the named one, the only one that runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainbus.client.address import find_named_data_dir, find_running_data_dir
from trainbus.client.errors import UsageError
from trainbus.embedded.layout import StackOptions, policy_name, stack_file, write_policy
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


def test_a_start_without_a_policy_keeps_the_one_in_force(tmp_path: Path) -> None:
    file = tmp_path / "team.toml"
    file.write_text('name = "team"\n[order]\nskip = true\n')
    assert write_policy(StackOptions(tmp_path)) == ({}, False)
    assert write_policy(StackOptions(tmp_path, policy=str(file)))[0].keys() == {"TRAINBUS_POLICY"}
    file.unlink()
    # The scheduler itself keeps the policy that its log has.
    assert write_policy(StackOptions(tmp_path)) == ({}, False)
    assert policy_name(tmp_path) == "team"
    settings, scales = write_policy(StackOptions(tmp_path, autoscale=("burst=2",)))
    assert settings
    assert scales
    assert policy_name(tmp_path) == "team"
    # The pool of an earlier start is changed, not doubled; it stays without the option.
    assert write_policy(StackOptions(tmp_path, autoscale=("burst=3",)))[1]
    assert write_policy(StackOptions(tmp_path)) == ({}, True)
    settings, scales = write_policy(StackOptions(tmp_path, policy="default"))
    assert (settings["TRAINBUS_POLICY"], scales) == ("default", False)
    assert policy_name(tmp_path) == "default"
