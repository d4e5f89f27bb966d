"""Numbers in what a library logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def select_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, among them tensors with one element; leave out the others."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, str | bytes):
            continue
        try:
            numbers[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return numbers
