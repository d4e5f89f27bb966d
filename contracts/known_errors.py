"""Errors with which another attempt would end as well, by the exception's name and text, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The code is wrong, whatever data or state it meets.
CODE_ERRORS = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ModuleNotFoundError", "ImportError", "NameError"}
)
#: The code is wrong for what it begins with; later it may have met a rare sample.
CALL_ERRORS = frozenset(
    {"TypeError", "AttributeError", "NotImplementedError", "RecursionError", "ZeroDivisionError", "UnboundLocalError"}
)
#: Something was not there, which may be there the next time.
_ABSENT = "'NoneType' object"
_HOST_MEMORY = re.compile(r"^\w*MemoryError\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory")
_DEVICE_MEMORY = re.compile(
    r"^(?:RuntimeError|\w*OutOfMemoryError): (?:CUDA|HIP|XPU|MPS)\b.* out of memory|CUDA error: out of memory"
)
#: torch and numpy on operands that do not fit one another, or the model.
_MISFITS = re.compile(
    "|".join(
        (
            r"mat1 and mat2",
            r"^RuntimeError: The (?:expanded )?size of (?:the )?tensor",
            r"Sizes of tensors must match",
            r"each tensor to be equal size",
            r"^RuntimeError: [Ee]xpected ",
            r"^RuntimeError: Given ",
            r"^ValueError: Expected (?:input|target)",
            r"must be equal to input_size",
            r"is invalid for input of size",
            r"running_mean should contain",
            r"einsum\(\): ",
            r"does not require grad and does not have a grad_fn",
            r"could not infer output dtype",
            r"Error\(s\) in loading state_dict",
            r"^IndexError: Target -?\d+ is out of bounds",
            r"^IndexError: index out of range in self",
            r"operands could not be broadcast",
            r"mismatch in its core dimension",
        )
    )
)
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<error>(?P<name>[A-Za-z_]\w*)(?:: .*| \(.*\))?)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class KnownError:
    """An error that comes again where an attempt begins with the same code, data and state."""

    advice: str = ""
    #: Another attempt ends with it even if it begins at a later step.
    at_any_step: bool = False
    #: Another number of slots may change it: each has another share of the work.
    depends_on_slots: bool = False


def find_known_error(text: str) -> KnownError | None:
    """Return what is known of an error, ``Name: message (place)``; None where another attempt may end otherwise."""
    match = _EXCEPTION.match(text)
    if match is None:
        return None
    name, error = match["name"], match["error"]
    if name == "ModuleNotFoundError":
        return KnownError(
            "name its package in the project's requirements.txt; a module of the project must not be in .gitignore",
            at_any_step=True,
        )
    if name in CODE_ERRORS:
        return KnownError(at_any_step=True)
    if _DEVICE_MEMORY.search(error):
        return KnownError("take a smaller batch, or more slots", depends_on_slots=True)
    if _HOST_MEMORY.search(error):
        return KnownError("take a smaller batch, or hold less of the data at a time", depends_on_slots=True)
    is_call_error = name in CALL_ERRORS and _ABSENT not in error
    return KnownError() if is_call_error or _MISFITS.search(error) else None
