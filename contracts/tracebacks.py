"""Tracebacks as Python prints them: the exception, its frames, and which of them are in the user's project."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

#: What a rank prints before an error whose text explains it; such an error has no traceback.
FAILURE_PREFIX = "trainbus: failed: "
#: Frames that a shortened traceback keeps, the innermost ones, where none is in the project.
MAX_FOREIGN_FRAMES = 3

#: torch's excepthook, and torchrun, put the rank before each line.
_RANK_PREFIX = re.compile(r"^\[(?:rank|default)?\d+\]:\s?")
_HEAD = "Traceback (most recent call last):"
#: Between the tracebacks of an exception and of its cause.
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*)|:?)$")
_FRAME = re.compile(r'^\s+File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')


class Frame(NamedTuple):
    """One call. ``function`` is '' where the code does not compile."""

    file: str
    line: str
    function: str


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception as it was printed. ``name`` is the exception's, with its module."""

    name: str
    text: str
    #: The innermost last.
    frames: tuple[Frame, ...]
    #: The lines that it takes with those of the exceptions that led to it, and the line with its own text.
    begins_at: int
    exception_at: int
    ends_at: int

    @property
    def short_name(self) -> str:
        """The exception's name without its module."""
        return self.name.rpartition(".")[2]

    def is_told_by(self, reason: str) -> bool:
        """Whether a reason has this exception, with or without its module."""
        text = self.text.removeprefix(self.name.removesuffix(self.short_name))
        return " ".join(text.split()) in " ".join(reason.split())


def strip_rank(line: str) -> str:
    """Return a line without the rank that torch puts before it, and without space at its end."""
    return _RANK_PREFIX.sub("", line).rstrip()


def begins_failure(line: str) -> bool:
    """Whether a line is the first of a traceback, or an error of a rank that has none."""
    return strip_rank(line) == _HEAD or line.startswith(FAILURE_PREFIX)


def find_last_traceback(lines: Sequence[str]) -> Traceback | None:
    """Return the last exception that was printed: the line below the innermost frame."""
    plain = [strip_rank(line) for line in lines]
    for number in range(len(plain) - 1, 0, -1):
        if not (match := _EXCEPTION.match(plain[number])) or not plain[number - 1].startswith("  "):
            continue
        begins_at, frames = _read_frames(plain, number)
        if frames:
            text, ends_at = plain[number], number + 1
            more = plain[ends_at].strip() if ends_at < len(plain) else ""
            if text.endswith(":") and more:
                # torch lists what is wrong below such a line.
                text, ends_at = f"{text} {more}", ends_at + 1
            begins_at = _find_chain_begin(plain, begins_at)
            return Traceback(match["name"], text, frames, begins_at, number, ends_at)
    return None


def shorten_tracebacks(lines: Iterable[str], code_folder: PurePath | None) -> list[str]:
    """Return lines with each traceback cut down to the project's frames, their paths relative to the project.

    One that has none keeps its innermost frames.
    """
    shortened: list[str] = []
    frames: list[list[str]] = []
    for line in lines:
        if _FRAME.match(strip_rank(line)):
            frames.append([line])
        elif frames and strip_rank(line).startswith("  "):
            frames[-1].append(line)
        else:
            shortened += _choose_frames(frames, code_folder)
            frames = []
            shortened.append(line)
    return shortened + _choose_frames(frames, code_folder)


def find_failure_lines(lines: Sequence[str], reason: str) -> list[str]:
    """Return the traceback that led to ``reason``, without its first line and the exception; [] if it is not there."""
    found = find_last_traceback(lines)
    if found is None or not found.is_told_by(reason):
        return []
    return [line for line in lines[found.begins_at : found.exception_at] if not begins_failure(line)]


def relative_path(file: str, code_folder: PurePath | None) -> str | None:
    """Return a file's path below the project; None for a file of a library."""
    path = PurePath(file)
    if not path.is_absolute():
        return None if file.startswith("<") else str(path)
    if code_folder is None or not path.is_relative_to(code_folder):
        return None
    return str(path.relative_to(code_folder))


def _choose_frames(frames: Sequence[Sequence[str]], code_folder: PurePath | None) -> list[str]:
    """Return the lines of the frames that a shortened traceback has."""
    chosen: list[str] = []
    for head, *source in frames:
        file = _FRAME.match(strip_rank(head))["file"]  # type: ignore[index]  # every head is one
        if (name := relative_path(file, code_folder)) is not None:
            chosen += [head.replace(f'"{file}"', f'"{name}"'), *source]
    return chosen or [line for frame in frames[-MAX_FOREIGN_FRAMES:] for line in frame]


def _read_frames(plain: Sequence[str], end: int) -> tuple[int, tuple[Frame, ...]]:
    """Return the frames above the line ``end``, and the line with which they and their head begin."""
    frames: list[Frame] = []
    begin = end
    while begin > 0 and plain[begin - 1].startswith("  "):
        begin -= 1
        if frame := _FRAME.match(plain[begin]):
            frames.insert(0, Frame(frame["file"], frame["line"], frame["function"] or ""))
    return begin - (begin > 0 and plain[begin - 1] == _HEAD), tuple(frames)


def _find_chain_begin(plain: Sequence[str], begin: int) -> int:
    """Return where the first of the exceptions begins that led to the one that begins at ``begin``."""
    while begin > 2 and plain[begin - 2] in _CHAIN:
        cause = find_last_traceback(plain[: begin - 2])
        if cause is None or cause.begins_at >= begin:
            break
        begin = cause.begins_at
    return begin
