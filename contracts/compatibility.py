"""Which changes of a schema break those who already publish or read events of that version.

Within a version only optional fields are added and limits are only loosened. Everything else needs
a new version of the type (``.v2``) beside the old one.
"""

from __future__ import annotations

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
    return _compare(old, new, old, new, "", frozenset())


def _compare(
    old: Schema, new: Schema, old_root: Schema, new_root: Schema, path: str, seen: frozenset[tuple[str, str]]
) -> list[str]:
    pair = (old.get("$ref", ""), new.get("$ref", ""))
    if all(pair):
        if pair in seen:
            return []
        seen |= {pair}
    old, new = _resolve(old, old_root), _resolve(new, new_root)
    where = path or "the event"
    found: list[str] = []
    for union in ("anyOf", "oneOf"):
        if union in old:
            return _compare_union(old[union], new, old_root, new_root, path, seen)
    if "anyOf" in new or "oneOf" in new:
        # A plain type became a union: fine if one member is what it was.
        members = new.get("anyOf") or new["oneOf"]
        outcomes = [_compare(old, member, old_root, new_root, path, seen) for member in members]
        return min(outcomes, key=len)
    if old.get("type") != new.get("type") and "type" in new:
        # An integer became a number: everything that was valid still is.
        if (old.get("type"), new.get("type")) != ("integer", "number"):
            found.append(f"{where}: type changed from {old.get('type')} to {new.get('type')}")
        return found
    found += _compare_limits(old, new, where)
    found += _compare_choices(old, new, where)
    found += _compare_properties(old, new, old_root, new_root, path, seen)
    for keyword in ("items", "additionalProperties"):
        if isinstance(old.get(keyword), dict) and isinstance(new.get(keyword), dict):
            found += _compare(old[keyword], new[keyword], old_root, new_root, f"{path}[]", seen)
    return found


def _compare_union(
    members: list[Schema], new: Schema, old_root: Schema, new_root: Schema, path: str, seen: frozenset[tuple[str, str]]
) -> list[str]:
    """Every old member must still fit one of the new ones."""
    found: list[str] = []
    candidates = new.get("anyOf") or new.get("oneOf") or [new]
    for member in members:
        outcomes = [_compare(member, candidate, old_root, new_root, path, seen) for candidate in candidates]
        if best := min(outcomes, key=len):
            found += best
    return found


def _compare_limits(old: Schema, new: Schema, where: str) -> list[str]:
    found = []
    for keyword, larger_is_tighter in LIMITS.items():
        before, after = old.get(keyword), new.get(keyword)
        if after is None or after == before:
            continue
        if before is None or (after > before) == larger_is_tighter:
            found.append(f"{where}: {keyword} tightened from {before} to {after}")
    if new.get("pattern") is not None and new.get("pattern") != old.get("pattern"):
        found.append(f"{where}: pattern changed from {old.get('pattern')} to {new['pattern']}")
    return found


def _compare_choices(old: Schema, new: Schema, where: str) -> list[str]:
    before = old.get("enum") or ([old["const"]] if "const" in old else None)
    after = new.get("enum") or ([new["const"]] if "const" in new else None)
    if after is None:
        return []
    if before is None:
        return [f"{where}: restricted to {after}"]
    gone = [value for value in before if value not in after]
    return [f"{where}: value {value!r} removed" for value in gone]


def _compare_properties(
    old: Schema, new: Schema, old_root: Schema, new_root: Schema, path: str, seen: frozenset[tuple[str, str]]
) -> list[str]:
    before, after = old.get("properties", {}), new.get("properties", {})
    found = []
    for name, schema in before.items():
        inner = f"{path}.{name}" if path else name
        if name not in after:
            found.append(f"{inner}: field removed")
        else:
            found += _compare(schema, after[name], old_root, new_root, inner, seen)
    for name in new.get("required", []):
        if name not in old.get("required", []):
            inner = f"{path}.{name}" if path else name
            found.append(f"{inner}: {'made required' if name in before else 'new field is required'}")
    return found


def _resolve(schema: Schema, root: Schema) -> Schema:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target[part]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
