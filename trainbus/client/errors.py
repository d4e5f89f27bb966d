"""How a command ends when it does not end well."""

from __future__ import annotations

#: The thing itself went wrong: the run failed, the stack does not answer.
FAILED = 1
#: The command names something that does not exist, or is used wrongly.
USAGE = 2


class CliError(Exception):
    """Ends the command with a message on stderr that says what to do, and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code
