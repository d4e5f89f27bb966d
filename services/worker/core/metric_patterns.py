"""Metric patterns: regular expressions that find metric values in the output of a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import re2

#: A compiled RE2 pattern; the library has no types.
Pattern = Any


def compile_patterns(patterns: Mapping[str, str]) -> dict[str, Pattern]:
    """Compile metric patterns.

    RE2 matches in linear time: no pattern of a user can stall the agent, as one for Python's ``re`` can.

    Raises:
        ValueError: one is no pattern; the text names it.
    """
    options = re2.Options()
    options.log_errors = False
    compiled: dict[str, Pattern] = {}
    for name, pattern in patterns.items():
        try:
            compiled[name] = re2.compile(pattern, options=options)
        except re2.error as error:
            why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
            raise ValueError(
                f"metric_patterns.{name}: {pattern!r} is not a regular expression (RE2 syntax): {why}"
            ) from error
        if not compiled[name].groups:
            raise ValueError(f"metric_patterns.{name}: {pattern!r} needs a group around the value: (…)")
    return compiled


def match_patterns(
    patterns: Mapping[str, Pattern], lines: Iterable[str], counts: dict[str, int]
) -> Iterator[tuple[int, str, float]]:
    """Yield (step, metric, value) for each match. The step is the group named ``step``, or the match's number.

    ``counts`` counts the matches of each pattern over all parts of the output.
    """
    for line in lines:
        for name, pattern in patterns.items():
            found = pattern.search(line)
            if found is None:
                continue
            groups = found.groupdict()
            value = groups.get("value") or next(
                (
                    text
                    for number, text in enumerate(found.groups(), start=1)
                    if number != pattern.groupindex.get("step") and text is not None
                ),
                "",
            )
            counts[name] = counts.get(name, 0) + 1
            try:
                number, step = float(value), int(groups.get("step") or counts[name])
            except ValueError:
                continue
            yield step, name, number
