"""The scheduler's policy over HTTP: the one in force, what another one would change, and the request to adopt it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request

from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from services.gateway import queries, views
from services.gateway.bodies import body_of, read_json_body
from services.gateway.commands import Commands
from services.gateway.parameters import Key
from services.kit.bus import Bus

BODY = body_of(AdoptPolicyRequested)


def policy_routes(bus: Bus, commands: Commands) -> APIRouter:
    """Return the routes of ``/policy``."""
    router = APIRouter()

    @router.get("/policy", response_model=views.AdoptedPolicy)
    async def get_policy() -> views.AdoptedPolicy:
        """Return the policy in force, since when, by whom and why."""
        adoptions = await bus.read_history(PolicyAdopted.subject_filter())
        if not adoptions:
            raise queries.NotFound("no scheduler has adopted a policy yet")
        last = adoptions[-1]
        fact: PolicyAdopted = last.event
        told = fact.model_dump(include={"digest", "origin", "settings", "user", "reason", "policy"})
        at = last.stored_at or last.envelope.time
        return views.AdoptedPolicy(name=fact.policy.name, adopted_at=at, adopted_by=fact.instance, **told)

    @router.post("/policy/diff", openapi_extra=BODY)
    async def diff_policy(request: Request) -> dict[str, Any]:
        """Return which settings a policy changes, and what about the runs of now. The body is that of PUT."""
        event, _ = commands.parse(AdoptPolicyRequested, await read_json_body(request), "")
        found = await commands.diff_policy(event.policy)
        if found is None:
            raise HTTPException(503, "no scheduler of this version answers: try again")
        if "error" in found:
            raise HTTPException(422, found["error"])
        return found

    @router.put("/policy", status_code=202, response_model=views.AcceptedPolicyRequest, openapi_extra=BODY)
    async def put_policy(request: Request, key: Key = None) -> views.AcceptedPolicyRequest:
        """Adopt a policy from the next scheduling cycle on. The body has the fields of `adopt_policy.requested`.

        It is in force once `GET /policy` shows its digest; `request.<id>.refused` says why it is not.
        """
        event, envelope = commands.parse(AdoptPolicyRequested, await read_json_body(request), key or "")
        return await commands.publish(views.AcceptedPolicyRequest, event, envelope, digest=event.policy.digest)

    return router
