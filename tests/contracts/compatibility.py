"""Which changes of a schema break those who already publish or read events of that version.

Within a version only optional fields are added and limits are only loosened. Everything else needs
a new version of the type (``.v2``) beside the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Schema = dict[str, Any]

#: Keyword -> whether a larger value is the tighter one.
LIMITS = {
    "minimum": True,
    "exclusiveMinimum": True,
    "minLength": True,
    "minItems": True,
    "maximum": False,
    "exclusiveMaximum": False,
    "maxLength": False,
    "maxItems": False,
    "maxProperties": False,
}


def breaking_changes(old: Schema, new: Schema) -> list[str]:
    """Every way in which ``new`` breaks a user of ``old``, one line each; empty when compatible."""
    return list(_Comparison(old, new).compare(old, new))


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares parts of two documents, at one place in them."""

    old_root: Schema
    new_root: Schema
    path: str = ""
    #: Pairs of references that are being compared: schemas may contain themselves.
    seen: frozenset[tuple[str, str]] = frozenset()

    @property
    def where(self) -> str:
        return self.path or "the event"

    def compare(self, old: Schema, new: Schema) -> Iterator[str]:
        pair = (old.get("$ref", ""), new.get("$ref", ""))
        if all(pair):
            if pair in self.seen:
                return
            self = replace(self, seen=self.seen | {pair})
        old, new = resolve(old, self.old_root), resolve(new, self.new_root)
        candidates = list_members(new)
        if list_members(old) or candidates:
            # Every old member must still fit one of the new ones.
            for member in list_members(old) or [old]:
                yield from min((list(self.compare(member, each)) for each in candidates or [new]), key=len)
        elif old.get("type") != new.get("type") and "type" in new:
            # An integer became a number: everything that was valid still is.
            if (old.get("type"), new.get("type")) != ("integer", "number"):
                yield f"{self.where}: type changed from {old.get('type')} to {new.get('type')}"
        else:
            yield from self.compare_limits(old, new)
            yield from self.compare_choices(old, new)
            yield from self.compare_properties(old, new)
            for keyword in ("items", "additionalProperties"):
                if isinstance(old.get(keyword), dict) and isinstance(new.get(keyword), dict):
                    yield from replace(self, path=f"{self.path}[]").compare(old[keyword], new[keyword])

    def compare_limits(self, old: Schema, new: Schema) -> Iterator[str]:
        for keyword, larger_is_tighter in LIMITS.items():
            before, after = old.get(keyword), new.get(keyword)
            if after not in (None, before) and (before is None or (after > before) == larger_is_tighter):
                yield f"{self.where}: {keyword} tightened from {before} to {after}"
        if new.get("pattern") not in (None, old.get("pattern")):
            yield f"{self.where}: pattern changed from {old.get('pattern')} to {new['pattern']}"

    def compare_choices(self, old: Schema, new: Schema) -> Iterator[str]:
        before, after = _choices(old), _choices(new)
        if after is not None and before is None:
            yield f"{self.where}: restricted to {after}"
        elif after is not None:
            yield from (f"{self.where}: value {value!r} removed" for value in before or () if value not in after)

    def compare_properties(self, old: Schema, new: Schema) -> Iterator[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        for name, schema in before.items():
            if name not in after:
                yield f"{self.field(name)}: field removed"
            else:
                yield from replace(self, path=self.field(name)).compare(schema, after[name])
        for name in sorted({*new.get("required", [])} - {*old.get("required", [])}):
            yield f"{self.field(name)}: {'made required' if name in before else 'new field is required'}"

    def field(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def list_members(schema: Schema) -> list[Schema]:
    """Return the schemas of a union; none for a plain type."""
    return schema.get("anyOf") or schema.get("oneOf") or []


def _choices(schema: Schema) -> list[Any] | None:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else None)


def resolve(schema: Schema, root: Schema) -> Schema:
    """Return a schema, or the one that it refers to in the document."""
    if "$ref" not in schema:
        return schema
    target: Any = root
    for part in schema["$ref"].removeprefix("#/").split("/"):
        target = target[part]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
