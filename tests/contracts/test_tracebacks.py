"""Tracebacks in the output of a process: which lines are the project's."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from contracts.tracebacks import find_failure_lines, find_last_traceback, shorten_tracebacks

CODE = PurePosixPath("/runs/r1/g1/code")
HEAD = "Traceback (most recent call last):"
OURS = ['  File "/lib/trainbus/rank.py", line 86, in run', "    ended = fit()", "            ^^^^^"]
OWN = ['  File "/runs/r1/g1/code/src/task.py", line 3, in loss', "    return a @ b", "           ~~^~~"]
SHORT = ['  File "src/task.py", line 3, in loss', *OWN[1:]]
TORCH = ['  File "/lib/torch/linear.py", line 134, in forward', "    return F.linear(input)"]
CHAIN = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([HEAD, *OURS, *OWN, *TORCH, "E: 1", "end"], [HEAD, *SHORT, "E: 1", "end"], id="project's frames"),
        pytest.param([HEAD, *TORCH * 9, "E: 1"], [HEAD, *TORCH * 3, "E: 1"], id="a library's alone"),
        pytest.param(
            [HEAD, *OWN, "  [Previous line repeated 9 more times]", "E"],
            [HEAD, *SHORT, "  [Previous line repeated 9 more times]", "E"],
            id="recursion",
        ),
        pytest.param(
            [f"[rank1]: {line}" for line in [HEAD, *OURS, *OWN, "E: 1"]],
            [f"[rank1]: {line}" for line in [HEAD, *SHORT, "E: 1"]],
            id="torch's rank prefix",
        ),
        pytest.param(
            [HEAD, *OWN, *TORCH, "E: 1", "", CHAIN, "", HEAD, *OURS, *OWN, "F: 2"],
            [HEAD, *SHORT, "E: 1", "", CHAIN, "", HEAD, *SHORT, "F: 2"],
            id="a chain",
        ),
        pytest.param(["  indented", "loss 1"], ["  indented", "loss 1"], id="no traceback"),
    ],
)
def test_a_traceback_is_cut_down_to_the_projects_frames(lines: list[str], expected: list[str]) -> None:
    assert shorten_tracebacks(lines, CODE) == expected


def test_a_traceback_is_told_by_its_reason_with_the_exceptions_that_led_to_it() -> None:
    cause = [HEAD, *SHORT, "KeyError: 1", "", CHAIN, ""]
    lines = ["loss 1", *cause, HEAD, *SHORT, "torch.OutOfMemoryError: CUDA out of  memory.", "bye"]
    found = find_last_traceback(lines)
    assert found is not None
    assert (found.short_name, lines[found.begins_at - 1], lines[found.ends_at]) == ("OutOfMemoryError", "loss 1", "bye")
    reason = "OutOfMemoryError: CUDA out of memory. (src/task.py:3, in loss)"
    assert find_failure_lines(lines, reason) == [*cause[1:], *SHORT]
    assert find_failure_lines(lines, "killed by SIGKILL") == []
