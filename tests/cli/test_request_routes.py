"""Each request that a client sends has a route of the gateway."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from contracts.base import Request
from contracts.events import REQUESTS
from contracts.events.train import DrainRequested, RestoreRequested
from tests.contracts.generate import CONTRACTS
from trainbus.client.request_routes import find_route

PATHS: dict[str, Any] = json.loads((CONTRACTS / "openapi.json").read_text())["paths"]
#: Values of the fields of all requests.
VALUES: dict[str, Any] = {
    "run_id": "r1", "study_id": "s1", "node_id": "n1", "model": "m", "step": 5, "alias": "staging", "pinned": False,
    "repair": False, "reason": "ours", "user": "ada",
}  # fmt: skip


def matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path) is not None


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.verb)
def test_a_request_has_a_route_that_takes_what_it_says(kind: type[Request]) -> None:
    given = {name: value for name, value in VALUES.items() if name in kind.model_fields}
    route = find_route(kind.model_construct(set(given), **given))
    found = [methods for template, methods in PATHS.items() if matches(template, route.path)]
    operations = [methods[route.method.lower()] for methods in found if route.method.lower() in methods]
    assert operations, f"{route.method} {route.path}"
    taken = {each["name"] for operation in operations for each in operation.get("parameters", [])}
    assert taken >= route.params.keys()
    assert any("requestBody" in operation for operation in operations) == (route.body is not None)
    in_address = {
        name for name in ("run_id", "study_id", "node_id", "model", "step") if str(given.get(name)) in route.path
    }
    sent = {*json.loads(route.body or "{}"), *route.params, *in_address}
    assert sent >= given.keys() - {"pinned"}, "nothing that was given is left out"


@pytest.mark.parametrize(
    "request_", [RestoreRequested(run_id="r1", epoch=3), DrainRequested(node_id="n1", scope="incarnation")]
)
def test_what_goes_only_by_the_bus_is_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="has no route over HTTP"):
        find_route(request_)
