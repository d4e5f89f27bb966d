"""What anybody may put on the bus: any subject, any headers, any body, among them well-formed lies.

Bodies are drawn from the events' own JSON schemas, with ids that exist and ids that do not, and then often damaged.
Hypothesis draws them; the same seed draws the same messages.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from contracts import subjects, topology
from contracts.base import Event
from contracts.events import BY_TYPE

#: Fields by whose names an id is recognised, and of what.
IDS = {"run_id": "runs", "node_id": "nodes", "parent_run_id": "runs", "evaluation_run_id": "runs", "run": "runs"}
#: How deep a body goes: schemas are recursive.
DEPTH = 6
EVENTS = sorted(BY_TYPE.values(), key=lambda each: each.type)
Schema = dict[str, Any]
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NUMBERS = st.one_of(st.integers(-3, 40), st.sampled_from((2**31, 2**63, -(2**63), 10**30)))
FLOATS = st.one_of(st.floats(-10, 10), st.sampled_from((0.0, 1e308, -1e-308, math.nan, math.inf, -math.inf)))
TIMES = st.sampled_from(
    ("2026-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00Z", "yesterday")
)


#: Records of buckets that nobody but a liar writes.
RECORDS = (
    f"$KV.{topology.LEASES.name}.node.x",
    *(f"$KV.{topology.JOBS.name}.{queue}.x" for queue in ("ingestion", "sharding", "scrub")),
    f"$KV.{topology.OUTPUTS.name}.x.1.x",
)
NO_BODIES = (b"[" * 20_000, b"{}", b'{"holder": "x", "ttl_s": 1e999}', b'{"run_id": NaN}')


@dataclass(frozen=True, slots=True)
class Known:
    """Ids that mean something on the bus that is fuzzed."""

    runs: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One message, as any client can publish it."""

    subject: str
    headers: dict[str, str]
    body: bytes


def draw_messages(count: int, number: int, known: Known) -> list[Message]:
    """Return ``count`` messages; the same number gives the same ones."""
    found: list[Message] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(messages(known))
    def collect(message: Message) -> None:
        found.append(message)

    while len(found) < count:
        collect()
        number += 1
    return found[:count]


@st.composite
def messages(draw: st.DrawFn, known: Known) -> Message:
    """Any message."""
    event = draw(st.sampled_from(EVENTS))
    body: Any = draw(_bodies(event, known))
    subject = draw(subject_of(event, body, known))
    match draw(st.integers(0, 9)):
        case 0:
            raw = draw(st.one_of(st.binary(max_size=40), st.sampled_from(NO_BODIES)))
        case 1:
            raw = json.dumps(draw(st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, st.lists(NUMBERS)))).encode()
        case 2 | 3:
            raw = _dump(draw(damaged(body)))
        case _:
            raw = _dump(body)
    return Message(subject, draw(headers_of(event)), raw)


@cache
def _bodies(event: type[Event], known: Known) -> st.SearchStrategy[Any]:
    schema = event.model_json_schema()
    return value_of(schema, schema, known, DEPTH)


def _dump(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


@st.composite
def subject_of(draw: st.DrawFn, event: type[Event], body: Any, known: Known) -> str:
    """Mostly the event's own subject, with the id that its body names; else another's, or none that there is."""
    if draw(st.integers(0, 19)) == 0:
        token = draw(st.sampled_from(("x", "placed", "*", "run")))
        return draw(
            st.sampled_from(
                (f"run.{token}.nonsense", "progress.dataset.x", "log.x.0", f"svc.scheduler.{token}", *RECORDS)
            )
        )
    pattern = event.subject_filter()
    id_field = getattr(event, "id_field", "")
    own = body.get(id_field) if isinstance(body, dict) else None
    ids = (own, *known.runs, *known.nodes) if draw(st.integers(0, 9)) == 0 else (own,)
    chosen = draw(st.sampled_from(ids))
    safe = chosen if isinstance(chosen, str) and chosen and not set(chosen) & set(" .*>\t\r\n\0") else "x"
    return pattern.replace(subjects.WILDCARD, safe)


@st.composite
def headers_of(draw: st.DrawFn, event: type[Event]) -> dict[str, str]:
    """None, good ones, and those that say something else than the message is."""
    found: dict[str, str] = {}
    for name, values in {
        "ce-id": st.one_of(st.uuids().map(str), st.sampled_from(("1", "2", "x" * 300))),
        "ce-source": st.sampled_from(("shop", "trainbus/scheduler", "trainbus/worker", "")),
        "ce-type": st.one_of(st.just(event.type), st.sampled_from(("trainbus.nonsense.v9", *sorted(BY_TYPE)[:9]))),
        "ce-time": TIMES,
        "ce-specversion": st.sampled_from(("1.0", "0.3")),
        "ce-correlationid": TEXT.filter(str.isascii),
        "traceparent": st.sampled_from(("00-0-0-0", "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "-")),
        "content-type": st.sampled_from(("application/json", "application/cloudevents+json", "text/plain")),
        "Nats-Msg-Id": st.one_of(st.uuids().map(str), st.just("1")),
    }.items():
        if draw(st.integers(0, 3)) == 0:
            value = draw(values)
            if value.isprintable():
                found[name] = value
    return found


@st.composite
def damaged(draw: st.DrawFn, body: Any) -> Any:
    """The body with one thing wrong."""
    if not isinstance(body, dict) or not body:
        return draw(TEXT)
    name = draw(st.sampled_from(sorted(body)))
    match draw(st.integers(0, 3)):
        case 0:
            return {key: value for key, value in body.items() if key != name}
        case 1:
            return {**body, name: draw(st.one_of(st.none(), NUMBERS, TEXT, st.lists(NUMBERS, max_size=3)))}
        case 2:
            return {**body, draw(TEXT): draw(NUMBERS)}
        case _:
            return [body]


def value_of(schema: Schema, root: Schema, known: Known, depth: int, name: str = "") -> st.SearchStrategy[Any]:
    """Values that the schema lets in, more or less: limits are broken now and then, ids are mostly real."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if name in IDS:
        return st.one_of(st.sampled_from(getattr(known, IDS[name])), st.just("nobody"), TEXT)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of([_deferred(one, root, known, depth, name) for one in schema[word]])
    match schema.get("type"):
        case "object":
            return _object(schema, root, known, depth)
        case "array":
            items = schema.get("items", {})
            fixed = schema.get("prefixItems")
            if depth <= 0:
                return st.just([])
            if fixed:
                return st.tuples(*(value_of(one, root, known, depth - 1) for one in fixed)).map(list)
            return st.lists(value_of(items, root, known, depth - 1), max_size=3)
        case "string":
            return _string(schema)
        case "integer":
            return NUMBERS
        case "number":
            return st.one_of(FLOATS, NUMBERS)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.one_of(st.none(), NUMBERS, TEXT)


def _deferred(schema: Schema, root: Schema, known: Known, depth: int, name: str) -> st.SearchStrategy[Any]:
    # Schemas refer to themselves: each part is made when it is drawn.
    return st.deferred(lambda: value_of(schema, root, known, depth, name))


def _object(schema: Schema, root: Schema, known: Known, depth: int) -> st.SearchStrategy[Any]:
    properties = schema.get("properties")
    if properties is None:
        extra = schema.get("additionalProperties")
        values = value_of(extra, root, known, depth - 1) if isinstance(extra, dict) and depth > 0 else NUMBERS
        return st.dictionaries(TEXT, values, max_size=2)
    required = schema.get("required", ())

    def strategy(name: str) -> st.SearchStrategy[Any]:
        return st.deferred(lambda: value_of(properties[name], root, known, depth - 1, name))

    optional = {name: strategy(name) for name in properties if name not in required} if depth > 0 else {}
    return st.fixed_dictionaries({name: strategy(name) for name in required}, optional=optional)


def _string(schema: Schema) -> st.SearchStrategy[str]:
    if schema.get("format") == "date-time":
        return TIMES
    pattern = schema.get("pattern", "")
    fitting = {
        "s3://": st.sampled_from(("s3://models/nothing.json", "s3://lake/nothing/")),
        "{64}": st.just("a" * 64),
        "task": st.just("task:Task"),
    }
    for sign, values in fitting.items():
        if sign in pattern:
            return st.one_of(values, TEXT)
    return st.one_of(st.sampled_from(("a", "digits", "x-1")), TEXT)
