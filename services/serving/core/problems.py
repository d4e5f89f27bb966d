"""What is wrong with a request, in words, with the field."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputProblem:
    """One problem of a request. ``field`` is dotted: ``inputs.age``, ``rows.3.png``; '' is the request as a whole."""

    field: str
    text: str


class RequestRefused(Exception):
    """The request cannot be answered as it is; the client can mend it."""

    def __init__(self, problems: Sequence[InputProblem], status: int = 400) -> None:
        super().__init__("; ".join(f"{each.field}: {each.text}" if each.field else each.text for each in problems))
        self.problems, self.status = tuple(problems), status

    @classmethod
    def of(cls, field: str, text: str) -> RequestRefused:
        return cls((InputProblem(field, text),))


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint with the similar name, or with all names there are."""
    similar = difflib.get_close_matches(name, known, 1)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return f"the model takes {', '.join(map(repr, known)) or 'no inputs'}"
