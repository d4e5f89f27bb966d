"""The reference of events: each request and fact with its subject, fields and an example."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from contracts import topology
from contracts.base import Event
from contracts.events import FACTS, REQUESTS
from docs.site.markdown import code, field_rows, models_in, own_doc, table, type_text

EXAMPLES = Path(__file__).parents[2] / "contracts" / "examples" / "valid"
FIELDS = ("field", "type", "default", "")


def requests() -> str:
    """Return the page of the requests."""
    return _page("Requests", "What any system may publish. Unknown fields are refused.", REQUESTS)


def facts() -> str:
    """Return the page of the facts."""
    return _page("Facts", "What the services publish. A newer publisher may add optional fields: ignore those.", FACTS)


def parts() -> str:
    """Return the page of what requests and facts consist of."""
    sections = ["# Parts of events\n\nWhat the fields of requests and facts consist of.\n"]
    for part in sorted(_parts_of((*REQUESTS, *FACTS)), key=lambda part: part.__name__):
        sections.append(f"## {part.__name__}\n\n{own_doc(part)}\n\n{_fields(part)}")
    return "\n".join(sections)


def _page(title: str, introduction: str, events: Iterable[type[Event]]) -> str:
    ordered = sorted(events, key=lambda event: event.type)
    return "\n".join([f"# {title}\n\n{introduction}\n", *(_section(event) for event in ordered)])


def _section(event: type[Event]) -> str:
    stream = topology.stream_of(event)
    readers = ", ".join(topology.consumers_of(event)) or "-"
    publishers = ", ".join(topology.producers_of(event)) or topology.CLIENTS
    about = (
        f"- type {code(event.type)}, subject {code(event.subject_filter())}\n"
        f"- published by {publishers}; read by {readers}\n"
        f"- stream {stream.name}, kept {stream.retention}\n"
    )
    title = event.type.removeprefix("trainbus.")
    return f"## {title}\n\n{own_doc(event)}\n\n{about}\n{_fields(event)}\n{_example(event)}"


def _fields(model: type[BaseModel]) -> str:
    if not model.model_fields:
        return "It has no fields.\n"
    rows = field_rows(model, model.model_fields, _linked_type)
    return table(FIELDS, ((code(name), *rest) for name, *rest in rows))


def _linked_type(annotation: Any) -> str:
    """Return a type with links to the parts that it names."""
    links = ", ".join(f"[{part.__name__}](parts.md#{part.__name__.lower()})" for part in models_in(annotation))
    described = type_text(annotation)
    return (
        links if links == f"[{described}](parts.md#{described.lower()})" else " ".join((code(described), links)).strip()
    )


def _parts_of(events: Iterable[type[BaseModel]]) -> set[type[BaseModel]]:
    found: set[type[BaseModel]] = set()
    waiting = list(events)
    while waiting:
        nested = {part for field in waiting.pop().model_fields.values() for part in models_in(field.annotation)}
        waiting += nested - found
        found |= nested
    return found


def _example(event: type[Event]) -> str:
    examples = sorted((EXAMPLES / event.type).glob("*.json"))
    return "\n".join(_blocks(examples[:1]))


def _blocks(examples: Iterable[Path]) -> Iterator[str]:
    for path in examples:
        text = json.dumps(json.loads(path.read_text()), indent=2, ensure_ascii=False)
        yield f"```json\n{text}\n```\n"
