"""What every part of a request is."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Metric = Annotated[str, Field(min_length=1, max_length=200)]
Mode = Literal["min", "max"]
#: Linux takes no longer argument or variable (MAX_ARG_STRLEN), the NUL at its end included.
MAX_ARGUMENT_BYTES = 131_071


def check_argument(text: str) -> str:
    """Return the text if a process can be given it as an argument or a variable.

    Raises:
        ValueError: it cannot; the text says what to change.
    """
    if "\0" in text:
        raise ValueError("holds a NUL character, which would end it")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError("is no valid Unicode: it holds half of a surrogate pair") from None
    if size > MAX_ARGUMENT_BYTES:
        limit = f"a process takes at most {MAX_ARGUMENT_BYTES:,} in one piece"
        raise ValueError(f"has {size:,} bytes, and {limit}: put it into a file of the project")
    return text


Argument = Annotated[str, AfterValidator(check_argument)]


class SpecPart(BaseModel):
    """A part of a request: frozen, and as strict about unknown fields as the request itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def defaults(cls, **given: Any) -> Self:
        """Return a part of defaults, for a field whose default it is; ``given`` are set, and not checked.

        ``cls()`` would build the validator of the part each time that the contracts are imported.
        """
        return cast(Self, cls.model_construct(**given))

    @model_validator(mode="after")
    def _follows_its_rules(self) -> Self:
        # pydantic validates a nested model without a check by the class's own, strict validator. The schema around it
        # does not count. A fact reads parts without their rules (``contracts/lenient.py``), so each part has a check.
        return self
