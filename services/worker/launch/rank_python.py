"""The Python of the ranks: the agent's own interpreter and packages."""

from __future__ import annotations

import sys
from pathlib import Path

import contracts


def python_root() -> Path:
    """Return the folder from which ``trainbus`` and ``contracts`` are imported."""
    return Path(contracts.__file__).resolve().parent.parent


def interpreter_folder() -> Path:
    """Return the folder of the interpreter that has torch."""
    return Path(sys.executable).parent
