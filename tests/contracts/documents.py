"""The generated documents, as text: one JSON Schema an event, and ``asyncapi.yaml``. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from contracts import topology
from contracts.base import Event, Fact, Request
from contracts.earlier_events import EARLIER_EVENTS
from contracts.events import BY_TYPE, FACTS, REQUESTS
from trainbus.client.task_reference import read_task_members, write_markdown

Json = dict[str, Any]
#: What logs hold and nothing publishes any more.
EARLIER = tuple(old.recorded for old in EARLIER_EVENTS.values())


def schema_for(event: type[Event]) -> Json:
    """The JSON Schema (draft 2020-12) of an event's body."""
    schema = event.model_json_schema(mode="validation")
    if issubclass(event, Fact):
        schema = _open(schema)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:trainbus:{event.type}",
        "x-nats-subject": event.subject_filter(),
    }
    return {**head, **schema}


def _open(node: Any) -> Any:
    """Return a fact's schema without the refusal of unknown fields: newer publishers add optional ones."""
    if isinstance(node, list):
        return [_open(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {name: _open(value) for name, value in node.items() if (name, value) != ("additionalProperties", False)}


def schema_text(event: type[Event]) -> str:
    return json.dumps(schema_for(event), indent=2, ensure_ascii=False) + "\n"


def asyncapi() -> Json:
    """An AsyncAPI 3.0 document: every subject as a channel, every event as a message."""
    channels: Json = {}
    operations: Json = {}
    messages: Json = {}
    for event in (*BY_TYPE.values(), *EARLIER):
        typed = event.type.removeprefix("trainbus.").replace(".", "_")
        channel = typed.rpartition("_")[0]
        # An earlier version of an event may share its subject: it is another message of that channel.
        name = typed if channel in channels else channel
        messages[name] = {
            "name": event.type,
            "title": event.__name__,
            "summary": (event.__doc__ or "").strip().splitlines()[0],
            "contentType": "application/json",
            "headers": {"$ref": "#/components/schemas/CloudEventHeaders"},
            "payload": {
                "schemaFormat": "application/schema+json;version=draft-2020-12",
                "schema": {"$ref": f"./schemas/{event.type}.json"},
            },
        }
        described = {
            "address": _address(event),
            "description": f"Stream {topology.stream_of(event).name}: {topology.stream_of(event).doc}",
            "parameters": {"id": {"description": "The aggregate's id"}} if "*" in event.subject_filter() else {},
            "messages": {},
        }
        channels.setdefault(channel, described)["messages"][name] = {"$ref": f"#/components/messages/{name}"}
        # From the user's side: requests are what trainbus receives, facts what it sends.
        operations[channel] = {
            "action": "receive" if issubclass(event, Request) else "send",
            "channel": {"$ref": f"#/channels/{channel}"},
        }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "trainbus",
            "version": "1",
            "description": "Train models by publishing `train.requested`; follow a run on `run.<run_id>.*`.",
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {"messages": messages, "schemas": {"CloudEventHeaders": _header_schema()}},
    }


def publishers_table() -> str:
    """Return the Markdown table of what each service publishes."""
    rows = ["| publisher | requests and facts |", "|---|---|"]
    rows += [f"| {name} | {_names(service.publishes)} |" for name, service in topology.SERVICES.items()]
    rows.append(f"| {topology.CLIENTS} (any other system) | every request |")
    return "\n".join(rows)


def events_table() -> str:
    """Return the Markdown table of who publishes and reads each event, and how long it stays."""
    rows = ["| subject | published by | read by (besides the gateway) | kept |", "|---|---|---|---|"]
    for event in BY_TYPE.values():
        readers = ", ".join(name for name in topology.consumers_of(event) if name != "gateway") or "-"
        stream = topology.stream_of(event)
        producers = ", ".join(name for name in topology.producers_of(event) if name != "gateway")
        rows.append(f"| `{event.subject_filter()}` | {producers} | {readers} | {stream.retention} |")
    for old in EARLIER_EVENTS.values():
        then, now = (f"`{each.subject_filter()}` (`.{each.type.rpartition('.')[2]}`)" for each in old[:2])
        retention = topology.stream_of(old.recorded).retention
        rows.append(f"| {then} | earlier versions | read as {now} | {retention} |")
    requests, facts = (topology.compatibility_of(events[0]) for events in (REQUESTS, FACTS))
    return "\n".join([*rows, "", f"Within a version (`.v1`), of a request: {requests}. Of a fact: {facts}."])


#: The generated parts of hand-written pages: page -> name of the part -> its text.
GENERATED = {
    "docs/design.md": {"publishers": publishers_table},
    "docs/events.md": {"events": events_table},
    "docs/task.md": {"task": lambda: write_markdown(read_task_members())},
}


def insert_generated(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with its generated parts, each between two comments, as they are now."""
    for name, text in parts.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        if not after:
            raise ValueError(f"the page has no part between {begin} and {end}")
        page = f"{before}{begin}\n{text()}\n{end}{after}"
    return page


def _names(events: Iterable[type[Event]]) -> str:
    by_aggregate: dict[str, list[str]] = {}
    for event in events:
        if issubclass(event, Fact):
            by_aggregate.setdefault(event.aggregate, []).append(event.fact)
        else:
            by_aggregate.setdefault("", []).append(f"`{event.subject_filter()}`")
    return "; ".join(f"{kind} {', '.join(names)}".strip() for kind, names in by_aggregate.items())


def every_document() -> dict[str, str]:
    """Relative path -> text of every generated document but the YAML one."""
    return {f"schemas/{event.type}.json": schema_text(event) for event in (*BY_TYPE.values(), *EARLIER)}


def _address(event: type[Event]) -> str:
    parts = event.subject_filter().split(".")
    if issubclass(event, Fact) and "*" in parts:
        parts[parts.index("*")] = "{id}"
    return ".".join("{rank}" if part == "*" else part for part in parts)


def _header_schema() -> Json:
    text = {"type": "string"}
    return {
        "type": "object",
        "description": "CloudEvents 1.0 binary mode. All are optional on requests: a bare body works too.",
        "properties": {
            "ce-specversion": {"const": "1.0"},
            "ce-id": {**text, "description": "With ce-source it identifies the event; defaults to Nats-Msg-Id."},
            "ce-source": text,
            "ce-type": text,
            "ce-time": {**text, "format": "date-time"},
            "ce-correlationid": {**text, "description": "The request everything goes back to."},
            "ce-causationid": {**text, "description": "The event that led to this one."},
            "traceparent": {**text, "description": "W3C trace context."},
            "Nats-Msg-Id": {**text, "description": "The server stores one message an id within its window."},
        },
    }
