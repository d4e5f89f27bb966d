"""The agent's files on a node whose disk is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from contracts.disk_space import DISK_FULL
from services.worker.local_files import read_json, write_atomically, write_if_space
from tests.small_disk import file_system, fill


def test_files_on_a_full_disk(tmp_path: Path) -> None:
    """What is there is replaced in its place, as long as its blocks suffice; nothing is cut off."""
    with file_system(tmp_path / "disk", "1m") as disk, capture_logs() as logs:
        state = disk / "state.json"
        write_atomically(state, json.dumps({"position": 1, "more": "x" * 100}))
        filler = fill(disk)
        for content in ({"position": 2}, {"position": 3, "more": "y" * 1000}):
            write_atomically(state, json.dumps(content))
            assert read_json(state) == content
        long = json.dumps({"more": "z" * 5000})
        with pytest.raises(OSError, match=r"No space left") as caught:
            write_atomically(state, long)
        assert caught.value.errno in DISK_FULL
        assert not write_if_space(state, long)
        assert not write_if_space(disk / "new.json", "{}")
        assert read_json(state) == content
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "state.json"]
        assert [line["event"].partition(":")[0] for line in logs] == ["the disk is full"]
        filler.unlink()
        write_atomically(state, long)
        assert state.read_text() == long
