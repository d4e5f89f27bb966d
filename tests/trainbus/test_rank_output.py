"""What a rank prints while the disk of its log is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_disk import file_system, fill

PRINTING = """
import os
import sys

from trainbus.ranks.output import drop_output_on_full_disk

if sys.argv[2] == "drops":
    drop_output_on_full_disk()
print("while the disk is full", flush=True)
sys.stderr.write("there, too\\n")
os.unlink(sys.argv[1])
print("with space")
"""


@pytest.mark.parametrize(("mode", "code", "text"), [("drops", 0, "with space\n"), ("as Python does", 1, "")])
def test_output_for_which_a_full_disk_has_no_space_is_dropped(tmp_path: Path, mode: str, code: int, text: str) -> None:
    with file_system(tmp_path / "disk", "1m") as disk:
        log = disk / "rank_0.log"
        log.touch()
        filler = fill(disk)
        with log.open("ab") as output:
            command = [sys.executable, "-c", PRINTING, str(filler), mode]
            found = subprocess.run(command, stdout=output, stderr=output, check=False)
        assert found.returncode == code
        assert log.read_text() == text
