"""The committed OpenAPI document of the gateway is current, and what breaks its users is found."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.contracts.generate import CONTRACTS, http_breaks, openapi_text
from tests.contracts.http_compatibility import breaking_http_changes

DOCUMENT: dict[str, Any] = json.loads((CONTRACTS / "openapi.json").read_text())
LIST = DOCUMENT["paths"]["/training-runs"]["get"]


def test_the_gateway_is_compatible_with_the_committed_document() -> None:
    assert http_breaks() == []


def test_the_committed_document_is_current() -> None:
    assert (CONTRACTS / "openapi.json").read_text() == openapi_text(), "run: python -m tests.contracts.generate"


def remove_route(document: dict[str, Any]) -> None:
    del document["paths"]["/training-runs/{run}/why"]


def remove_parameter(document: dict[str, Any]) -> None:
    route = document["paths"]["/training-runs"]["get"]
    route["parameters"] = [each for each in route["parameters"] if each["name"] != "state"]


def require_parameter(document: dict[str, Any]) -> None:
    document["paths"]["/training-runs"]["get"]["parameters"].append(
        {"name": "team_id", "in": "query", "required": True, "schema": {"type": "string"}}
    )


def tighten_parameter(document: dict[str, Any]) -> None:
    (limit,) = (each for each in document["paths"]["/training-runs"]["get"]["parameters"] if each["name"] == "limit")
    limit["schema"]["maximum"] = 10


def remove_field(document: dict[str, Any]) -> None:
    del document["components"]["schemas"]["RunSummary"]["properties"]["state"]


def change_type(document: dict[str, Any]) -> None:
    document["components"]["schemas"]["RunSummary"]["properties"]["run_id"] = {"type": "integer"}


def make_optional(document: dict[str, Any]) -> None:
    document["components"]["schemas"]["RunSummary"]["required"].remove("run_id")


def remove_status(document: dict[str, Any]) -> None:
    del document["paths"]["/training-runs"]["get"]["responses"]["404"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (remove_route, "GET /training-runs/{run}/why: route removed"),
        (remove_parameter, "GET /training-runs: query parameter state: removed"),
        (require_parameter, "GET /training-runs: query parameter team_id: new parameter is required"),
        (tighten_parameter, "GET /training-runs: query parameter limit: the event: maximum tightened from 500 to 10"),
        (remove_field, "GET /training-runs: answer 200.runs[].state: field removed"),
        (change_type, "GET /training-runs: answer 200.runs[].run_id: may be integer, was string"),
        (make_optional, "GET /training-runs: answer 200.runs[].run_id: may be missing"),
        (remove_status, "GET /training-runs: answer 404: removed"),
    ],
)
def test_what_breaks_a_program_is_found(change: Callable[[dict[str, Any]], None], found: str) -> None:
    changed = copy.deepcopy(DOCUMENT)
    change(changed)
    assert found in breaking_http_changes(DOCUMENT, changed)


def test_what_is_added_breaks_nobody() -> None:
    changed = copy.deepcopy(DOCUMENT)
    changed["paths"]["/new"] = {"get": LIST}
    changed["components"]["schemas"]["RunSummary"]["properties"]["note"] = {"type": "string"}
    changed["paths"]["/training-runs"]["get"]["parameters"].append(
        {"name": "note", "in": "query", "schema": {"type": "string"}}
    )
    assert breaking_http_changes(DOCUMENT, changed) == []


def test_every_body_and_every_reference_is_described() -> None:
    document = DOCUMENT
    bodies = {
        f"{method} {path}": content["schema"]
        for path, route in document["paths"].items()
        for method, operation in route.items()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        if content["schema"].get("format") != "binary"
    }
    assert [name for name, schema in bodies.items() if "properties" not in schema and "$ref" not in schema] == []
    names = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names - document["components"]["schemas"].keys() == set()
