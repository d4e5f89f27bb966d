"""The term of a node's lease: what extends it, what ends it, and what agent and guard agree on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.kit.clock import boot_s
from services.worker.agent import node_term
from services.worker.agent.node_term import NodeTerm
from services.worker.core.rank_environment import ProcessSpec
from services.worker.launch import lease_term
from services.worker.launch.executor import ProcessExecutor, exit_path
from services.worker.launch.lease_term import GUARD_SHARE, KILL_SHARE, STOP_SHARE, Term, TermFile, read_boot_id
from tests.worker.conftest import until

TTL_S = 10.0


class BootTime:
    """A boot clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for module in (lease_term, node_term):
            monkeypatch.setattr(module, "boot_s", lambda: self.now_s)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> BootTime:
    return BootTime(monkeypatch)


def test_everything_is_dead_before_the_lease_has_expired() -> None:
    assert 0 < STOP_SHARE < GUARD_SHARE < KILL_SHARE < 1


async def test_a_term_counts_from_when_its_renewal_was_asked(time: BootTime, tmp_path: Path) -> None:
    term = NodeTerm(tmp_path, TTL_S)
    time.now_s += 5  # the answer took so long
    await term.extend(1000.0)
    assert not term.is_over
    time.now_s = 1000.0 + STOP_SHARE * TTL_S
    assert term.is_over
    assert term.kill_in_s == pytest.approx((KILL_SHARE - STOP_SHARE) * TTL_S)


async def test_a_term_that_is_over_is_not_extended_until_its_ranks_are_dead(time: BootTime, tmp_path: Path) -> None:
    term = NodeTerm(tmp_path, TTL_S)
    await term.extend(time.now_s)
    time.now_s += TTL_S
    await term.extend(time.now_s)
    assert term.is_over
    assert term.start_before() is None
    time.now_s = boot_s() + 1e6  # the guard lives by the real clock: its term is long over
    await asyncio.wait_for(term.settle(), 60)
    assert not term.is_over
    await term.extend(time.now_s)
    assert TermFile(tmp_path / "agent" / "lease.json").read() == Term(read_boot_id(), time.now_s, TTL_S)


async def test_nothing_starts_without_a_guard(time: BootTime, tmp_path: Path) -> None:
    term = NodeTerm(tmp_path, TTL_S)
    time.now_s = boot_s() + 1e6
    await term.extend(time.now_s)
    assert term.start_before() is None
    await term.ensure_guard()
    assert term.start_before() == time.now_s + STOP_SHARE * TTL_S
    term.close()
    assert TermFile(tmp_path / "agent" / "lease.json").read() is None
    await until(lambda: term.start_before() is None, 60)


async def test_until_it_has_joined_the_shorter_lease_counts(time: BootTime, tmp_path: Path) -> None:
    """The scheduler watches by the setting of the incarnation before."""
    await NodeTerm(tmp_path, TTL_S).extend(time.now_s)
    term = NodeTerm(tmp_path, 6 * TTL_S)
    term.load()
    await term.extend(time.now_s)
    file = TermFile(tmp_path / "agent" / "lease.json")
    assert file.read() == Term(read_boot_id(), time.now_s, TTL_S)
    term.note_joined()
    await term.extend(time.now_s)
    assert file.read() == Term(read_boot_id(), time.now_s, 6 * TTL_S)


def test_the_guard_ends_nothing_that_was_extended_meanwhile(time: BootTime, tmp_path: Path) -> None:
    file = TermFile(tmp_path / "lease.json")
    file.write(Term(read_boot_id(), time.now_s, TTL_S))
    assert not file.mark_over()
    assert not file.is_marked
    time.now_s += TTL_S
    assert file.mark_over()
    assert file.is_marked


@pytest.mark.parametrize("content", ["", "{}", '{"boot_id": "another", "asked_at": 1.0, "ttl_s": 1.0}'])
def test_a_term_of_another_boot_or_a_torn_one_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease.json").write_text(content)
    assert TermFile(tmp_path / "lease.json").read() is None


@pytest.mark.parametrize(("late_s", "starts"), [(60.0, True), (-0.1, False)])
async def test_a_command_does_not_begin_after_its_time(tmp_path: Path, late_s: float, starts: bool) -> None:
    """The agent may be held between its decision and the start of the process."""
    executor = ProcessExecutor()
    spec = ProcessSpec(0, ("touch", str(tmp_path / "begun")), {"PATH": "/usr/bin:/bin"})
    process = await executor.start(spec, tmp_path, tmp_path, boot_s() + late_s)
    await until(lambda: not executor.is_alive(process), 60)
    assert (tmp_path / "begun").exists() is starts
    assert exit_path(tmp_path, 0).exists() is starts
