"""The scheduler's policy: which one is in force, what another one would change, and adopting it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from contracts.scheduling import Policy
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, TrainbusError
from trainbus.client.requests import publish_and_wait
from trainbus.client.runs import wait_for_event

#: Seconds for which the scheduler's simulation of a cycle is awaited.
DIFF_TIMEOUT_S = 45.0


@dataclass(frozen=True, slots=True)
class AdoptedPolicy:
    """The policy in force, and how it came to be: ``fact`` says by whom and why."""

    fact: PolicyAdopted
    adopted_at: datetime
    sequence: int

    @property
    def policy(self) -> Policy:
        return self.fact.policy


async def read_policy(connection: Connection, digest: str = "") -> AdoptedPolicy:
    """Return the policy in force, or the one that was adopted last whose digest starts like this.

    Raises:
        TrainbusError: none has been adopted.
        NotFoundError: none of this digest has been.
    """
    adoptions = await connection.read(PolicyAdopted.subject_filter())
    if not adoptions:
        raise TrainbusError("no scheduler has adopted a policy yet: start one (`trainbus up`)")
    found = [each for each in adoptions if each.event.digest.startswith(digest)]
    if not found:
        there = ", ".join(dict.fromkeys(f"{each.event.digest} ({each.event.policy.name})" for each in adoptions))
        raise NotFoundError(f"no policy {digest!r} was ever in force; there were {there}")
    return AdoptedPolicy(found[-1].event, found[-1].time, found[-1].sequence)


async def wait_for_policy(connection: Connection, timeout_s: float) -> AdoptedPolicy:
    """Return the policy in force; wait for a scheduler that has just started.

    Raises:
        TrainbusError: none has been adopted in time.
    """
    await wait_for_event(connection, 1, PolicyAdopted.subject_filter(), lambda fact: True, timeout_s)
    return await read_policy(connection)


async def diff_policy(connection: Connection, policy: Policy) -> dict[str, Any]:
    """Return which settings a policy changes, and what it changes in the next cycles, as the scheduler simulates it.

    Raises:
        UsageError: this version of the scheduler does not take the policy.
        TrainbusError: no scheduler answers.
    """
    body = {"policy": policy.model_dump(mode="json")}
    found = await connection.call("POST", "/policy/diff", json=body, timeout_s=DIFF_TIMEOUT_S)
    assert isinstance(found, dict)
    return found


async def apply_policy(
    connection: Connection, policy: Policy, reason: str, *, user: str | None = None, replaces: str | None = None
) -> PolicyAdopted:
    """Adopt a policy, in force from the next cycle on; ``replaces`` is the digest of the one that it was made from.

    Raises:
        TrainbusError: it is refused, since another policy is in force by now; or no scheduler answers.
    """
    request = AdoptPolicyRequested(policy=policy, replaces=replaces, reason=reason, user=user)
    fact = await publish_and_wait(connection, request, PolicyAdopted.subject_filter(), "scheduler")
    assert isinstance(fact, PolicyAdopted)
    return fact
