"""Reading a recorded value: its types count, the rules of its admission do not.

A request is refused when it breaks a rule: a limit, a pattern, a check across fields, an unknown field. The value then
travels in facts, which are read for ever. A stricter rule of tomorrow must not make a fact of yesterday unreadable, so
facts read ``Lenient[DataSource]``: the same class by the same field definitions, without the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

#: Constraints that narrow a type. Types themselves stay: an ``int``, a choice, a time with a zone.
RULES = frozenset({"ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern", "allow_inf_nan"})
#: Ends the reference of a lenient schema, so that the strict one may stand beside it.
REFERENCE_SUFFIX = "0"

T = TypeVar("T")
Resolve = Callable[[CoreSchema], CoreSchema]


class LenientReading:
    """Marks a field whose value is read without its rules; write ``Lenient[...]``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return without_rules(handler(source), handler.resolve_ref_schema)


#: ``Lenient[DataSource]`` is a ``DataSource`` that is read without its rules.
Lenient = Annotated[T, LenientReading()]


def without_rules(schema: CoreSchema, resolve: Resolve) -> CoreSchema:
    """Return ``schema`` without limits, patterns and checks; unknown fields are ignored.

    Every model in it must be a ``SpecPart``. Pure.
    """
    loosened: CoreSchema = _loosen(schema, resolve)
    return loosened


def _loosen(node: Any, resolve: Resolve) -> Any:
    if isinstance(node, list | tuple):
        return type(node)(_loosen(item, resolve) for item in node)
    if not isinstance(node, dict):
        return node
    if "type" not in node or not isinstance(node["type"], str):
        return {name: _loosen(value, resolve) for name, value in node.items()}
    if node["type"] == "definition-ref":
        return _loosen(resolve(node), resolve)
    loosened = {name: _loosen(value, resolve) for name, value in node.items() if name not in RULES}
    if "ref" in node:
        loosened["ref"] = node["ref"] + REFERENCE_SUFFIX
    match node["type"]:
        case "function-after":
            # A check. That of a whole model bears its reference.
            kept = {"ref": loosened["ref"]} if "ref" in loosened else {}
            return {**loosened["schema"], **kept}
        case "model":
            loosened["config"] = {**node.get("config", {}), "extra_fields_behavior": "ignore"}
        case "model-fields":
            loosened["extra_behavior"] = "ignore"
    return loosened
