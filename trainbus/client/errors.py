"""What goes wrong between a client and a stack. Each message says what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class TrainbusError(Exception):
    """An operation failed: the stack does not answer, a hash differs, a run failed."""

    #: What the command line exits with.
    exit_code: ClassVar[int] = 1


class UsageError(TrainbusError):
    """An argument is invalid, or the operation does not apply to what it names."""

    exit_code = 2


class NotFoundError(UsageError):
    """There is no such run, node, checkpoint or dataset, or the name matches more than one."""


class StackUnreachableError(TrainbusError):
    """No stack runs, or its NATS or object store does not answer."""


class RunFailedError(TrainbusError):
    """A run ended without completing."""

    def __init__(self, run_id: str, state: str, reason: str) -> None:
        # A reason that repeats the state is left out.
        shown = f": {reason}" if reason and reason != f"{state} by request" else ""
        super().__init__(f"run {run_id} {state}{shown}")
        self.run_id, self.state, self.reason = run_id, state, reason


def invalid_request(error: ValidationError, data: Any, model: type[BaseModel]) -> UsageError:
    """Return an error that names each problem of ``data`` with its field."""
    from contracts.problems import describe_problems, join_problems

    found = describe_problems(error, data, model)
    problems = [each if each.field else each.model_copy(update={"field": "request"}) for each in found]
    return UsageError("the request is not valid:\n  " + join_problems(problems, "\n  "))
