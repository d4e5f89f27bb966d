"""A stall makes the ranks dump their flight recorders, and the report names the dumps."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from contracts.events.run import Artifact, RunStalled
from services.worker.core import rank_environment
from services.worker.core.stall_detector import Stall
from services.worker.ranks import stall_dumps
from services.worker.ranks.stall_watcher import StallWatcher
from tests.manual_clock import ManualClock
from tests.worker.test_core import placed
from tests.worker.test_journal_follower import Bus, follower

pytestmark = pytest.mark.shell


class Recorder(threading.Thread):
    """Does with a rank's pipe and file what the thread in torch does: makes the one, looks at it, writes the other."""

    def __init__(self, stem: str, rank: int, answers: bool = True) -> None:
        super().__init__(daemon=True)
        self._pipe, self._dump, self._answers = f"{stem}{rank}.pipe", Path(f"{stem}{rank}"), answers
        os.mkfifo(self._pipe, 0o666)
        self._end = os.open(self._pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.02):
            if os.read(self._end, 128) and self._answers:
                with self._dump.open("wb") as file:
                    file.write(b"half")
                    file.flush()
                    self._over.wait(0.02)
                    file.write(b" and half")

    def close(self) -> None:
        self._over.set()
        self.join()
        os.close(self._end)


def stem_of(folder: Path, gpus: tuple[str, ...] = ("GPU-a", "GPU-b")) -> str:
    place = rank_environment.NodeEnvironment(
        str(folder / "launch.json"), "10.0.0.1", 29, (), "/bin", 8, 2, "eth0", gpus=gpus
    )
    event = placed()
    start = rank_environment.build_process_specs(event, event.members[0], {}, place)[0]
    assert start.environment.get("TORCH_FR_BUFFER_SIZE") == ("2000" if gpus else None)
    stem = start.environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "")
    assert stem == start.environment.get("TORCH_FR_DUMP_TEMP_FILE", "")
    return stem


async def test_stall_report_names_uploaded_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The silent rank is waited for as long as that; a recorder may stop for a second in the middle of its file.
    monkeypatch.setattr(stall_dumps, "RECORDER_ANSWER_S", 4.0)
    monkeypatch.setattr(stall_dumps, "QUIET_S", 1.0)
    assert stem_of(tmp_path, gpus=()) == ""
    stem = stem_of(tmp_path)
    Path(f"{stem}2").write_bytes(b"of an earlier stall")
    recorders = [Recorder(stem, 2), Recorder(stem, 3, answers=False)]
    os.mkfifo(f"{stem}4.pipe")  # of a rank that is gone
    (tmp_path / "file").write_bytes(b"")
    Path(f"{stem}5.pipe").write_bytes(b"")
    Path(f"{stem}6.pipe").symlink_to(tmp_path / "file")
    kept: list[str] = []

    async def keep(names: Sequence[str]) -> tuple[Artifact, ...]:
        kept.extend(f"{name}: {(tmp_path / name).read_text()}" for name in names)
        return tuple(Artifact(name=name, uri=f"s3://models/{name}", sha256="0" * 64, size_bytes=13) for name in names)

    bus = Bus()
    watcher = StallWatcher(
        placed(), "n1", tmp_path, follower(tmp_path, bus, ManualClock()), list, bus.publish, lambda: False, keep
    )
    try:
        await watcher._report(Stall(2, 7, 61.0, 0.2), {})
    finally:
        for recorder in recorders:
            recorder.close()
    (stalled,) = bus.stored
    assert isinstance(stalled, RunStalled)
    assert kept == ["flight_g1_2: half and half"]  # whole, and not what was there before
    assert set(stalled.stacks) == {"2"}
    assert "s3://models/flight_g1_2" in stalled.stacks["2"]
    assert (Path(f"{stem}5.pipe").read_bytes(), (tmp_path / "file").read_bytes()) == (b"", b"")
