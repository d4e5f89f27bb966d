"""The reference of the gateway's HTTP API, from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.site.markdown import code, prose, table

Json = dict[str, Any]
DOCUMENT = Path(__file__).parents[2] / "contracts" / "openapi.json"
SCHEMAS = "#/components/schemas/"
#: What every route may answer; it is told once.
PROBLEM = "application/problem+json"


def api() -> str:
    """Return the page of every route and of the objects that they take and answer."""
    document = json.loads(DOCUMENT.read_text())
    sections = [
        "# HTTP API\n\nThe gateway's routes; [HTTP](../http.md) shows how to use them. A failure answers with "
        "a [Problem](#problem).\n"
    ]
    for path, methods in document["paths"].items():
        sections += [_route(f"{method.upper()} {path}", route) for method, route in methods.items()]
    for name, schema in document["components"]["schemas"].items():
        sections.append(f"## {name}\n\n{prose(schema.get('description', ''))}\n\n{_fields(schema)}")
    return "\n".join(sections)


def _route(title: str, route: Json) -> str:
    parts = [f"## {title}\n", prose(route.get("description") or route.get("summary", "")), ""]
    if parameters := route.get("parameters"):
        parts.append(table(("parameter", "in", "type", "default", ""), map(_parameter, parameters)))
    request = route.get("requestBody", {})
    bodies = [("body", *content) for content in _contents(request)]
    parts += [f"The body:\n\n{_fields(schema)}" for schema in _inline_objects(request)]
    answers = [
        (status, *content)
        for status, answer in route["responses"].items()
        for content in _contents(answer) or [("", prose(answer["description"]))]
        if content[0] != code(PROBLEM)
    ]
    return "\n".join([*parts, table(("", "media type", "content"), bodies + answers)])


def _parameter(parameter: Json) -> tuple[str, str, str, str, str]:
    schema = parameter["schema"]
    description = parameter.get("description") or schema.get("description", "")
    default = "required" if parameter.get("required") else _default(schema)
    return code(parameter["name"]), parameter["in"], _type(schema), default, prose(description)


def _contents(holder: Json) -> list[tuple[str, str]]:
    return [(code(media), _type(content.get("schema", {}))) for media, content in holder.get("content", {}).items()]


def _inline_objects(holder: Json) -> list[Json]:
    """Return the objects that have no section of their own."""
    schemas = (content.get("schema", {}) for content in holder.get("content", {}).values())
    return [schema for schema in schemas if "properties" in schema]


def _fields(schema: Json) -> str:
    if "properties" not in schema:
        return f"{_type(schema)}\n"
    required = schema.get("required", ())
    rows = (
        (
            code(name),
            _type(field),
            "required" if name in required else _default(field),
            prose(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    )
    return table(("field", "type", "default", ""), rows)


def _default(schema: Json) -> str:
    return code(json.dumps(schema["default"], ensure_ascii=False)) if schema.get("default") is not None else ""


def _type(schema: Json) -> str:
    """Return a schema's type, with links to the objects that it names."""
    return " | ".join(_alternatives(schema)) or "any"


def _alternatives(schema: Json) -> Iterator[str]:
    if reference := schema.get("$ref"):
        name = reference.removeprefix(SCHEMAS)
        yield f"[{name}](#{name.lower()})"
    elif options := schema.get("anyOf") or schema.get("oneOf"):
        for option in options:
            yield from _alternatives(option)
    elif values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        yield from (code(str(value)) for value in values)
    elif schema.get("type") == "array":
        yield f"list of {_type(schema.get('items', {}))}"
    elif isinstance(schema.get("additionalProperties"), dict):
        yield f"object of {_type(schema['additionalProperties'])}"
    elif kind := schema.get("format") or schema.get("type"):
        yield str(kind)
