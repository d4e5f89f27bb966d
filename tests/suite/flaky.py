"""The list of flaky tests, ``tests/flaky.tsv``: id, time, load, first line of the failure.

It starts empty and is meant to stay so: each line is a defect of the product or of a test that nobody has found yet.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.suite.outcomes import Outcome

FILE = Path(__file__).parents[1] / "flaky.tsv"
#: A test that is listed so often is red until it is mended and its lines are removed.
MAX_LISTED = 3


def record(found: Sequence[Outcome], most: int, file: Path = FILE) -> list[str]:
    """Append flaky tests to the list; return the reasons why the run is red because of the list.

    Args:
        most: how many flaky tests a run may have.
    """
    with file.open("a") as out:
        for outcome in found:
            failure = outcome.first_line.replace("\t", " ")
            out.write(f"{outcome.test}\t{datetime.now(UTC):%Y-%m-%dT%H:%MZ}\t{os.getloadavg()[0]:.1f}\t{failure}\n")
    listed = Counter(line.partition("\t")[0] for line in file.read_text().splitlines()[1:])
    problems = [
        f"{test} was flaky {count} times (tests/flaky.tsv): mend it, then remove its lines"
        for test, count in sorted(listed.items())
        if count >= MAX_LISTED
    ]
    if len(found) > most:
        problems.append(f"{len(found)} tests were flaky in one run, {most} may be")
    return problems
