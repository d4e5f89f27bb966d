"""A rank's end of the node's cache: it waits without CPU time, raises the agent's reason and reports its read plan."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contracts.events.dataset import ShardFile
from trainbus.data.batch_timings import BatchTimings
from trainbus.data.order import LaneOrder
from trainbus.data.read_plan import ReadPlan, ShardNeed
from trainbus.data.reader import DatasetError
from trainbus.data.shard_prefetch import MAX_NEEDS, ShardPrefetcher

SHARD = ShardFile(
    path="train/shard-00000.bin",
    sha256="a" * 64,
    size_bytes=1,
    samples=1,
    index_path="train/shard-00000.bin.idx",
    index_sha256="b" * 64,
)


class Agent:
    """A stub of the agent: records the lines it receives, and answers requests as the test configures it."""

    def __init__(self, path: Path, answer: Callable[[], str | None]) -> None:
        self.received: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self._answer = answer
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as lines:
            for raw in lines:
                line = json.loads(raw)
                with self.arrived:
                    self.received.append(line)
                    self.arrived.notify_all()
                if line["kind"] == "shard_request":
                    problem = self._answer()
                    if problem is None:
                        connection.shutdown(socket.SHUT_RDWR)
                        return
                    answer = {"kind": "shard_reply", "shard": line["shard"], "problem": problem}
                    connection.sendall(json.dumps(answer).encode() + b"\n")

    def wait_for(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            return [line for line in self.received if line["kind"] == kind]

        with self.arrived:
            assert self.arrived.wait_for(lambda: len(found()) >= count, 90), self.received
            return found()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def make(answer: Callable[[], str | None] = lambda: "") -> Agent:
        agents.append(Agent(tmp_path / "s", answer))
        return agents[-1]

    yield make
    for each in agents:
        each.close()


def place(folder: Path) -> None:
    (folder / "train").mkdir(exist_ok=True)
    (folder / SHARD.index_path).touch()
    (folder / SHARD.path).touch()


def test_a_present_shard_is_not_requested(tmp_path: Path) -> None:
    place(tmp_path)
    ShardPrefetcher(tmp_path / "no-agent", tmp_path).wait(SHARD)


def test_a_rank_waits_until_the_shard_arrives(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    coming = threading.Event()

    def answer() -> str:
        coming.wait(90)
        place(tmp_path)
        return ""

    stub, waits = agent(answer), BatchTimings()
    arrival = ShardPrefetcher(tmp_path / "s", tmp_path, rank=3, generation=2, waits=waits)
    waiting = threading.Thread(target=arrival.wait, args=(SHARD,))
    waiting.start()
    (want,) = stub.wait_for("shard_request")
    assert want == {"kind": "shard_request", "rank": 3, "generation": 2, "shard": SHARD.path}
    assert waiting.is_alive()
    coming.set()
    waiting.join(90)
    assert not waiting.is_alive()
    assert waits.totals()["fetch"] > 0


def test_waiting_takes_no_processor_time(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    coming = threading.Event()

    def answer() -> str:
        coming.wait(90)
        place(tmp_path)
        return ""

    agent(answer)
    spent: list[float] = []

    def wait() -> None:
        before = time.thread_time()
        ShardPrefetcher(tmp_path / "s", tmp_path).wait(SHARD)
        spent.append(time.thread_time() - before)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    coming.set()
    waiting.join(90)
    assert spent[0] < 0.2


def test_a_shard_that_cannot_be_fetched_raises_the_reason(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    agent(lambda: f"shard {SHARD.path} is damaged in the store")
    with pytest.raises(DatasetError, match=r"shard-00000\.bin is damaged"):
        ShardPrefetcher(tmp_path / "s", tmp_path).wait(SHARD)


def test_a_restarted_agent_receives_the_request_again(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    first = agent(lambda: None)  # dies with the question
    arrival = ShardPrefetcher(tmp_path / "s", tmp_path)
    waiting = threading.Thread(target=arrival.wait, args=(SHARD,))
    waiting.start()
    first.wait_for("shard_request", 2)
    first.close()

    def answer() -> str:
        place(tmp_path)
        return ""

    agent(answer).wait_for("shard_request")
    waiting.join(90)
    assert not waiting.is_alive()


def test_a_shard_evicted_before_it_is_opened_is_requested_again(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    answers = iter(["", "", "come"])

    def answer() -> str:
        if next(answers) == "come":
            place(tmp_path)
        return ""

    stub = agent(answer)
    ShardPrefetcher(tmp_path / "s", tmp_path).wait(SHARD)
    assert len(stub.wait_for("shard_request")) == 3


def test_without_an_agent_a_wait_ends(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no agent has answered"):
        ShardPrefetcher(tmp_path / "no-agent", tmp_path, patience_s=0.3).wait(SHARD)


def test_a_dangling_link_is_not_a_shard(tmp_path: Path) -> None:
    place(tmp_path)
    (tmp_path / SHARD.path).unlink()
    (tmp_path / SHARD.path).symlink_to(tmp_path / "evicted")
    with pytest.raises(DatasetError):
        ShardPrefetcher(tmp_path / "no-agent", tmp_path, patience_s=0.0).wait(SHARD)


# -- the plan ----------------------------------------------------------------------------------------


def test_the_plan_is_sent_again_to_a_new_agent(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    order = LaneOrder("d", [50] * 8, 1, lanes=2, window=2)
    plan = ReadPlan(order, 10, 1, [0], end=800)
    stub = agent()
    arrival = ShardPrefetcher(tmp_path / "s", tmp_path, rank=1)
    arrival.set_plan("train", plan.needs)
    assert stub.received == []
    arrival.set_position(0)
    (line,) = stub.wait_for("read_plan")
    assert (line["rank"], line["split"], line["at"]) == (1, "train", 0)
    assert line["needs"] == [[need.shard, need.first, need.last] for need in plan.needs(0, 800)]
    assert {shard for shard, _, _ in line["needs"]} == set(range(8))
    stub.close()
    arrival.set_position(100)
    (line,) = agent().wait_for("read_plan")
    assert line["at"] == 100
    assert line["needs"] == [[need.shard, need.first, need.last] for need in plan.needs(100, 800)]
    arrival.close()


def test_the_position_is_reported_and_the_plan_only_at_its_end(tmp_path: Path, agent: Callable[..., Agent]) -> None:
    needs = [ShardNeed(shard, 100 * shard, 100 * shard + 99) for shard in range(2 * MAX_NEEDS)]

    def of(start: int, stop: int) -> list[ShardNeed]:
        return [need for need in needs if need.last >= start and need.first < stop]

    stub = agent()
    arrival = ShardPrefetcher(tmp_path / "s", tmp_path)
    arrival.set_plan("train", of)
    arrival.set_position(0)
    assert len(stub.wait_for("read_plan")[0]["needs"]) == MAX_NEEDS
    arrival.set_position(1000)
    second = stub.wait_for("read_plan", 2)[1]
    assert (second["at"], second["needs"]) == (1000, None)
    assert second["per_s"] > 0
    arrival.set_position(60 * MAX_NEEDS)
    third = stub.wait_for("read_plan", 3)[2]
    assert third["needs"][0][0] == 60 * MAX_NEEDS // 100
    assert len(third["needs"]) == MAX_NEEDS
    arrival.close()
