"""The table of GPUs, in miniature on the CPU, so that it works on the day a card is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.gpu.__main__ import measure
from loadtest.gpu.common import DISTURBANCES, MINI

pytestmark = pytest.mark.shell


def test_every_section_of_the_table_has_its_rows(tmp_path: Path) -> None:
    rows = measure(MINI, tmp_path)
    assert not [row for row in rows if row.ok is False]
    figures = [row.figure for row in rows]
    for task, precision in (("CNN", "fp32"), ("GPT", "bf16"), ("LoRA", "fp32")):
        disturbed = [row for row in rows if row.figure.startswith(f"{task}, {precision}, ") and row.target == "all"]
        assert [row.ok for row in disturbed] == [True] * len(MINI.disturbances[task])
    assert {how for each in MINI.disturbances.values() for how in each} == set(DISTURBANCES)
    assert sum(figure.startswith("step, ") for figure in figures) == 2
    assert [figure for figure in figures if "stall" in figure or "durable" in figure or "NVML" in figure]
