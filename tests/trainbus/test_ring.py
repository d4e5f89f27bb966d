"""A step is reported through the ring; what the ring cannot take goes to the journal, and nothing is lost."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts import progress as layout
from contracts.ranks import EndedLine
from services.worker.ranks.ring_reader import RingReader
from tests.trainbus.support import journal as read_journal
from trainbus.agent_link.channels import Journal
from trainbus.agent_link.ring import RingWriter


def reader(folder: Path) -> RingReader:
    ring = RingReader.open(folder / "rank_0.ring")
    assert ring is not None
    return ring


def test_records_are_read_and_a_ring_is_reopened(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.ring"
    first = RingWriter(path, capacity=4)
    assert first.record(1, {"loss": 0.5, "norm": math.inf}, 1, 8, None)
    assert first.record(2, {"ακρίβεια": 0.25}, 2, 16, 100)
    first.close()
    again = RingWriter(path)
    assert again.record(3, {"norm": 1.0, "loss": 2.0}, 2, 24, 100)
    ring = reader(tmp_path)
    lines = [line for _, line in ring.read(0, ring.head)]
    assert [(line.step, line.epoch, line.samples_consumed, line.total_steps, line.values) for line in lines] == [
        (1, 1, 8, None, {"loss": 0.5, "norm": math.inf}),
        (2, 2, 16, 100, {"ακρίβεια": 0.25}),
        (3, 2, 24, 100, {"norm": 1.0, "loss": 2.0}),
    ]
    assert ring.pid == os.getpid()


def test_an_unread_record_is_not_overwritten(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "rank_0.ring", capacity=4)
    took = [writer.record(step, {"x": step}, 0, 0, None) for step in range(6)]
    assert took == [True] * 4 + [False] * 2
    ring = reader(tmp_path)
    ring.release(3)
    assert [writer.record(step, {"x": step}, 0, 0, None) for step in range(6, 10)] == [True] * 3 + [False]
    assert [line.step for _, line in ring.read(3, ring.head)] == [3, 6, 7, 8]
    # What is not whole, or not there any more, is not read.
    assert ring.read(0, 1) == []
    slot = layout.HEADER_BYTES + 6 % 4 * layout.RECORD_BYTES
    with (tmp_path / "rank_0.ring").open("r+b") as file:
        file.seek(slot + 20)
        file.write(b"torn")
    assert [line.step for _, line in ring.read(3, ring.head)] == [3, 6, 7]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({f"m{n}": float(n) for n in range(9)}, id="more values than a record has room for"),
        pytest.param({"long/" + "x" * 70: 1.0}, id="a name longer than its place in the table"),
    ],
)
def test_oversized_metrics_go_to_the_journal(tmp_path: Path, values: dict[str, float]) -> None:
    journal = Journal(tmp_path / "rank_0.jsonl")
    journal.metrics(1, {"loss": 1.0})
    journal.metrics(2, values, epoch=1)
    journal.append(EndedLine(time=time.time(), outcome="succeeded"))
    journal.metrics(3, {"loss": 3.0})  # after the last word
    assert reader(tmp_path).head == 1
    assert [(line.kind, getattr(line, "values", None)) for line in read_journal(tmp_path)] == [
        ("metrics", {"loss": 1.0}),
        ("metrics", values),
        ("ended", None),
    ]


def test_without_a_ring_metrics_go_to_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    journal = Journal(tmp_path / "rank_0.jsonl")
    journal.metrics(1, {"loss": 1.0})
    journal.heartbeat(1)
    assert [line.kind for line in read_journal(tmp_path)] == ["metrics"]


def test_a_killed_rank_loses_no_record(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from trainbus.agent_link.channels import Journal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]) / 'rank_0.jsonl')\n"
        "for step in range(1, 60_000):\n"
        "    journal.metrics(step, {'loss': 1 / step})\n"
        "    journal.heartbeat(step)\n"
        "    if step == 500: print('on its way', flush=True)\n"
        "sys.stdin.read()\n"  # before the ring is full: no reader empties it here
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    ring = reader(tmp_path)
    lines = ring.read(0, ring.head)
    assert [line.step for _, line in lines] == list(range(1, ring.head + 1))
    assert ring.head >= 500
    beat = ring.beat()
    assert beat is not None
    assert beat.step in (ring.head, ring.head - 1)
    assert beat.at_s <= time.monotonic()
