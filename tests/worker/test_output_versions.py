"""Which files of an output folder are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kit.kept_files import KeptLayout, copy_outputs, list_files, pack_files, unpack_files
from services.worker.checkpoints.output_folder import OutputLimitError, scan
from services.worker.core.output_versions import (
    FileVersion,
    SettledFiles,
    complete_at_stop,
    next_step,
    unambiguous,
    written_before,
)


def version(modified_s: float = 0.0, size: int = 1, inode: int = 1) -> FileVersion:
    return FileVersion(size, int(modified_s * 1e9), inode)


def test_a_file_settles_once_it_stays_the_same() -> None:
    files = SettledFiles(1.0)
    assert files.observe({"a": version(), "b": version()}, 0.0) == set()
    assert files.observe({"a": version(), "b": version(size=2)}, 1.0) == {"a"}
    assert files.observe({"a": version(inode=2), "b": version(size=2)}, 2.0) == {"b"}  # a was replaced by a rename
    assert files.observe({"a": version(inode=2)}, 3.0) == {"a"}
    assert files.observe({"a": version(inode=2), "b": version(size=2)}, 4.0) == {"a"}  # b is a new file


def test_what_was_written_when_a_process_ended_may_be_torn() -> None:
    files = {"old": version(1.0), "fresh": version(9.9), "handled": version(12.0)}
    assert written_before(files, 9.0) == {"old"}
    assert complete_at_stop(files, 10.0, {"fresh", "handled"}) == {"old", "handled"}
    assert complete_at_stop(files, 10.0, set()) == {"old", "fresh", "handled"}


def test_a_file_of_this_tick_of_the_clock_can_change_without_a_trace() -> None:
    files = {"before": version(9.996), "now": version(10.0)}
    assert unambiguous(files, 10 * 10**9) == {"before"}


@pytest.mark.parametrize(("reported", "last", "step"), [(None, 0, 1), (10, 4, 10), (10, 10, 11), (3, 20, 21)])
def test_steps_never_go_back(reported: int | None, last: int, step: int) -> None:
    assert next_step(reported, last) == step


def test_a_folder_of_too_many_files_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).touch()
    with pytest.raises(OutputLimitError, match="more than 2 files"):
        scan(tmp_path, 2)


@pytest.mark.parametrize("names", [("a.pt", "d/ü b.txt", ".hidden", "trainbus.json", "trainbus-files.tar"), ()])
def test_files_of_any_name_come_back(tmp_path: Path, names: tuple[str, ...]) -> None:
    files = {}
    for number, name in enumerate(names):
        files[name] = tmp_path / str(number)
        files[name].write_text(f"content of {name}")
    pack_files(files, KeptLayout(artifacts=("a.pt",)), tmp_path / "packed")
    layout = unpack_files(tmp_path / "packed")
    assert layout == KeptLayout(outputs="", artifacts=("a.pt",))
    copy_outputs(tmp_path / "packed", layout, tmp_path / "outputs")
    found = {name: path.read_text() for name, path in list_files(tmp_path / "outputs")}
    assert found == {name: f"content of {name}" for name in names}


def test_equal_files_make_equal_packs(tmp_path: Path) -> None:
    packs = []
    for turn in ("first", "second"):
        source = tmp_path / turn
        source.write_text("same")
        pack_files({"ü": source}, KeptLayout(), tmp_path / f"{turn}-packed")
        packs.append((tmp_path / f"{turn}-packed/trainbus-files.tar").read_bytes())
    assert packs[0] == packs[1]


def test_a_checkpoint_of_a_task_has_no_layout(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert unpack_files(tmp_path) is None
