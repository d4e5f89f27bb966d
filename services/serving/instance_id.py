"""The id of this instance of serving, by which it knows its own facts in the log again."""

from __future__ import annotations

import uuid
from pathlib import Path

FILE = "instance"


def load_instance_id(folder: Path) -> str:
    """Return the id that is kept in a folder; make one where there is none.

    Raises:
        OSError: it cannot be read or written.
    """
    path = folder / FILE
    try:
        known = path.read_text().strip()
    except FileNotFoundError:
        known = ""
    if known:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    made = uuid.uuid4().hex[:12]
    partial = path.with_suffix(".partial")
    partial.write_text(f"{made}\n")
    partial.replace(path)
    return made
