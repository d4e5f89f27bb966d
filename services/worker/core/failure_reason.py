"""Why a process failed, in its own words: the exception's last line and the place in the user's code."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

from contracts.known_errors import KnownError, find_known_error
from contracts.tracebacks import Traceback, find_last_traceback, relative_path, strip_rank
from services.worker.core.rank_exits import describe_exit

#: Exit codes of a shell that could not run a program: it is not executable, or there is none.
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127
MAX_CHARS = 1000

#: The wrapper's own complaint about a program: "sh: 1: train: not found", "sh: line 1: ./t.sh: Permission denied".
_SHELL_COMPLAINT = re.compile(r"^(?:/bin/)?(?:sh|bash|dash): (?:line )?\d+: (?:exec: )?(?P<program>.+?): [A-Za-z ]+$")
#: What stands below a program's own last words when it aborts: a shell that waits for it names the signal.
_SIGNAL_NAMES = frozenset(filter(None, map(signal.strsignal, signal.valid_signals())))
_CORE_DUMPED = " (core dumped)"
#: A C++ library aborts the process. Threads of gloo do when Python exits while a group is open, and throw nothing.
_TERMINATED = re.compile(r"^(?:terminate called |libc\+\+abi: terminating)")
_NOTHING_THROWN = "without an active exception"
#: Python's own complaint about the script that it is to run.
_NO_SCRIPT = re.compile(r"can't open file '(?P<file>.+)': \[Errno 2\]")


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Why a process failed. ``is_permanent``: no other attempt that begins like this one can change it."""

    text: str
    is_permanent: bool = False
    #: No other attempt at all can.
    at_any_step: bool = False
    #: One on another number of slots may.
    depends_on_slots: bool = False

    @classmethod
    def of(cls, text: str, known: KnownError | None) -> Self:
        """Return the reason of a process that an exception ended, with what to change about it."""
        if known is None:
            return cls(_shorten(text))
        advice = f": {known.advice}" if known.advice else ""
        return cls(_shorten(text) + advice, True, known.at_any_step, known.depends_on_slots)


def explain_error(error: str) -> FailureReason:
    """Return why a process failed that reported its error, ``Name: message (place)``."""
    return FailureReason.of(error, find_known_error(error))


def explain_exit(
    code: int, lines: Sequence[str], command: Sequence[str] = (), code_folder: PurePath | None = None
) -> FailureReason:
    """Return why a process that reported no error of its own ended with ``code``, from the last lines it printed."""
    printed = [strip_rank(line) for line in lines]
    last = next((line.strip() for line in reversed(printed) if line.strip()), "")
    if code < 0 or 128 < code < 160:
        return _explain_signal(code, printed, code_folder)
    if (refused := _explain_refusal(code, last, command)) is not None:
        return refused
    found = find_last_traceback(printed)
    if found is not None:
        return FailureReason.of(found.text + _place(found, code_folder), find_known_error(found.text))
    if (script := _NO_SCRIPT.search(last)) is not None and code == 2:
        file = relative_path(script["file"], code_folder) or script["file"]
        return FailureReason(
            f"there is no file {file} in the project: check the command, and whether .gitignore or .trainbusignore "
            "leaves it out",
            True,
        )
    if not last:
        return FailureReason(f"{describe_exit(code)} and printed nothing")
    return FailureReason(_shorten(f"{last} (exit code {code})"))


def _explain_signal(code: int, printed: Sequence[str], code_folder: PurePath | None) -> FailureReason:
    """Return the reason of a process that a signal ended. One that aborts while it exits has failed before."""
    killed = describe_exit(code).removeprefix("was ")
    own = [line for line in printed if not _is_about_signal(line)]
    if killed.endswith("SIGABRT"):
        end = next((number for number, line in enumerate(own) if _TERMINATED.match(line)), len(own))
        found = find_last_traceback(own[:end])
        if found is not None and found.ends_at == end:
            text = f"{found.text}{_place(found, code_folder)}; then {killed}"
            return FailureReason.of(text, find_known_error(found.text))
    if killed.endswith("SIGKILL"):
        killed += " (out of memory?)"
    return FailureReason(_shorten(f"{killed}; its last line of output: {own[-1].strip()}" if own else killed))


def _is_about_signal(line: str) -> bool:
    """Whether a shell or the C++ runtime printed the line because of the signal, or nothing is on it."""
    text = line.strip().removesuffix(_CORE_DUMPED)
    return not text or text in _SIGNAL_NAMES or (text.endswith(_NOTHING_THROWN) and bool(_TERMINATED.match(text)))


def _explain_refusal(code: int, last: str, command: Sequence[str]) -> FailureReason | None:
    """Return the reason if no program could be started; None if one was."""
    if code not in (EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND):
        return None
    program = command[0] if command else ""
    complaint = _SHELL_COMPLAINT.match(last)
    if complaint is None or complaint["program"] != program:
        return FailureReason(_shorten(f"{last} (exit code {code})" if last else describe_exit(code)), True)
    if code == EXIT_NOT_FOUND:
        return FailureReason(
            f"there is no program {program!r} on the node or in the project: check the command"
            + ("" if "/" in program else f"; a file of the project is ./{program}"),
            True,
        )
    return FailureReason(
        f"{program!r} is not executable: `chmod +x {program}`, or name its interpreter in the command"
        f" ('bash {program}', 'python {program}')",
        True,
    )


def _place(found: Traceback, code_folder: PurePath | None) -> str:
    """Return the innermost place in the user's code, ready to follow the exception; '' if it is in none."""
    for file, line, function in reversed(found.frames):
        if (name := relative_path(file, code_folder)) is not None:
            return f" ({name}:{line}{f', in {function}' if function and function != '<module>' else ''})"
    return ""


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " […]"
