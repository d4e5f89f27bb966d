"""Which changes of the gateway's OpenAPI document break the programs that use it.

What a program could send must still be taken, and what it could read must still be there: routes, parameters, bodies
and the fields of answers. New routes, optional parameters and fields of answers may be added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.contracts.compatibility import breaking_changes, list_members, resolve

Json = dict[str, Any]


def breaking_http_changes(old: Json, new: Json) -> list[str]:
    """Return every way in which ``new`` breaks a user of ``old``, one line each; empty when compatible."""
    return list(_compare_routes(old, new))


def _compare_routes(old: Json, new: Json) -> Iterator[str]:
    for path, methods in old["paths"].items():
        for method, before in methods.items():
            where = f"{method.upper()} {path}"
            after = new["paths"].get(path, {}).get(method)
            if after is None:
                yield f"{where}: route removed"
                continue
            changes = [
                *_compare_parameters(before, after, old, new),
                *_compare_bodies(before, after, old, new),
                *_compare_answers(before, after, old, new),
            ]
            yield from (f"{where}: {change}" for change in changes)


def _compare_parameters(before: Json, after: Json, old: Json, new: Json) -> Iterator[str]:
    known, present = (
        {(each["in"], each["name"]): each for each in route.get("parameters", [])} for route in (before, after)
    )
    for key, parameter in present.items():
        name = f"{key[0]} parameter {key[1]}"
        if key not in known:
            if parameter.get("required"):
                yield f"{name}: new parameter is required"
            continue
        if parameter.get("required") and not known[key].get("required"):
            yield f"{name}: made required"
        for change in breaking_changes(_rooted(known[key]["schema"], old), _rooted(parameter["schema"], new)):
            yield f"{name}: {change}"
    yield from (f"{place} parameter {name}: removed" for place, name in known.keys() - present.keys())


def _compare_bodies(before: Json, after: Json, old: Json, new: Json) -> Iterator[str]:
    known, present = (route.get("requestBody", {}).get("content", {}) for route in (before, after))
    for kind, content in known.items():
        if kind not in present:
            yield f"body: {kind} is no longer taken"
        else:
            changes = breaking_changes(_rooted(content["schema"], old), _rooted(present[kind]["schema"], new))
            yield from (f"body: {change}" for change in changes)


def _compare_answers(before: Json, after: Json, old: Json, new: Json) -> Iterator[str]:
    for code, answer in before["responses"].items():
        if code not in after["responses"]:
            yield f"answer {code}: removed"
            continue
        known, present = answer.get("content", {}), after["responses"][code].get("content", {})
        for kind, content in known.items():
            if kind not in present:
                yield f"answer {code}: no longer {kind}"
                continue
            schemas = content.get("schema", {}), present[kind].get("schema", {})
            yield from _compare_read(f"answer {code}", schemas, (old, new), frozenset())


def _compare_read(
    where: str, schemas: tuple[Json, Json], documents: tuple[Json, Json], seen: frozenset[str]
) -> Iterator[str]:
    """Compare what a program reads: fields that go, may be missing, or hold something else."""
    if (name := schemas[0].get("$ref", "")) in seen:
        return
    seen = seen | {name} if name else seen
    before, after = (resolve(schema, document) for schema, document in zip(schemas, documents, strict=True))
    known, present = _types(before, documents[0]), _types(after, documents[1])
    if known and (added := present - known or (known if not present else set())):
        yield f"{where}: may be {', '.join(sorted(added))}, was {', '.join(sorted(known))}"
    for name, schema in before.get("properties", {}).items():
        field = f"{where}.{name}"
        if name not in after.get("properties", {}):
            yield f"{field}: field removed"
            continue
        if name in before.get("required", []) and name not in after.get("required", []):
            yield f"{field}: may be missing"
        yield from _compare_read(field, (schema, after["properties"][name]), documents, seen)
    for keyword in ("items", "additionalProperties"):
        pair = before.get(keyword), after.get(keyword)
        if isinstance(pair[0], dict) and isinstance(pair[1], dict):
            yield from _compare_read(f"{where}[]", (pair[0], pair[1]), documents, seen)


def _types(schema: Json, document: Json) -> set[str]:
    """Return the types of JSON that a value may have; none where it may be anything."""
    found = set().union(*(_types(resolve(member, document), document) for member in list_members(schema)))
    return found | ({schema["type"]} if "type" in schema else set())


def _rooted(schema: Json, document: Json) -> Json:
    """Return a part of a document such that its references can be followed."""
    return {**schema, "components": document["components"]}
