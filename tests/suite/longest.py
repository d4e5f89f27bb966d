"""The files whose tests take longest, the longest first: processes that share the files end together if they begin so.

The list, ``tests/longest.txt``, is written by ``python -m tests.suite --note-longest``. It need not be exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.suite.outcomes import Outcome

FILE = Path(__file__).parents[1] / "longest.txt"
#: Files that take less are not worth a line.
LONG_S = 5.0


def read(file: Path = FILE) -> list[str]:
    """Return the paths of the files, from the root of the project."""
    return file.read_text().splitlines()


def note(outcomes: Iterable[Outcome], file: Path = FILE) -> None:
    """Write the list anew from how long each test took. The tests of cores do not count: they come before."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        if outcome.lane != "cores":
            seconds[outcome.test.partition("::")[0]] += outcome.seconds
    slow = sorted((path for path in seconds if seconds[path] >= LONG_S), key=lambda path: -seconds[path])
    file.write_text("".join(f"{path}\n" for path in slow))
