"""What code works on when it fails: noted on the exception on its way out, which costs nothing while nothing fails.

The steps of a cycle note which run and which node they work on, and ``core/quarantine.py`` finds the culprit by that.
"""

from __future__ import annotations

from typing import NamedTuple


class Suspect(NamedTuple):
    """What failing code looks at together; '' for what it does not look at."""

    run_id: str = ""
    node_id: str = ""
    #: A second run: the one that may be preempted for the first.
    victim_id: str = ""


def note_suspect(error: Exception, *, run_id: str = "", node_id: str = "", victim_id: str = "") -> None:
    """Note what the code works on that the exception leaves; the innermost code comes first."""
    if run_id or node_id or victim_id:
        vars(error).setdefault("suspects", []).append(Suspect(run_id, node_id, victim_id))


def suspects_of(error: Exception) -> list[Suspect]:
    """Return what was noted on the error, what the innermost code works on first."""
    found: list[Suspect] = vars(error).get("suspects", [])
    return found
