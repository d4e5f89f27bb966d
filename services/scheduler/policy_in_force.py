"""The policy in force is the log's. What a process was started with is only the first one: nobody had chosen yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from contracts.events.capacity import PolicyAdopted
from contracts.scheduling import Policy
from services.scheduler import policies
from services.scheduler.core.state.cluster import Cluster


class PolicyInForce:
    """Finds the policy to decide by, and what the leader has to adopt for that."""

    def __init__(self, given: Policy | None = None, changes: Sequence[str] = ()) -> None:
        """``changes`` (``preemption.resume_cost_s=1``) are made to the default policy; a given one has them already.

        Raises:
            policies.PolicyError: a change is not valid.
        """
        self._given, self._changes = given, tuple(changes)
        default = policies.with_settings(policies.DEFAULT, () if given is not None else changes)
        self._first = (
            PolicyAdopted(digest=given.digest, policy=given, origin="setting")
            if given is not None
            else PolicyAdopted(digest=default.digest, policy=default, origin="default", settings=self._changes)
        )
        #: The adoption that was looked at last, and what followed from it.
        self._seen: PolicyAdopted | None = None
        self._next = self._first

    def choose(self, cluster: Cluster) -> Policy:
        """Return the policy in force; before there is one, the one that this process would adopt."""
        return cluster.policy or self._first.policy

    def next_adoption(self, cluster: Cluster, instance: str) -> PolicyAdopted | None:
        """Return what a leader publishes before it decides; None if the policy in force stays."""
        made = self._find_next(cluster.adopted)
        if cluster.adopted is not None and cluster.adopted.digest == made.digest:
            return None
        return made.model_copy(update={"instance": instance, "after_sequence": cluster.policy_sequence})

    def describe_unused(self, cluster: Cluster) -> str:
        """Return which of the settings of this process have no effect, and how to change the policy; '' if none."""
        in_force = self._find_next(cluster.adopted).policy
        if self._given is not None:
            unused = f"TRAINBUS_POLICY: {self._given.name}, {self._given.digest}"
            is_used = self._given.digest == in_force.digest
        else:
            unused, is_used = ", ".join(self._changes), True
            with suppress(policies.PolicyError):
                is_used = policies.change(in_force, self._changes).digest == in_force.digest
        if is_used:
            return ""
        return (
            f"the policy that this process was started with ({unused}) has no effect: the log's is in force "
            f"({in_force.name}, {in_force.digest}); change it with `trainbus policy apply FILE`"
        )

    def _find_next(self, adopted: PolicyAdopted | None) -> PolicyAdopted:
        if adopted is not self._seen:
            self._seen, self._next = adopted, self._follow(adopted)
        return self._next

    def _follow(self, adopted: PolicyAdopted | None) -> PolicyAdopted:
        """Return the adoption that this one leads to: itself, unless nobody has chosen its policy."""
        if adopted is None or (is_default(adopted) and not adopted.settings):
            return self._first
        if is_default(adopted):
            # The default of this version, with what the first process was set to.
            with suppress(policies.PolicyError):
                policy = policies.with_settings(policies.DEFAULT, adopted.settings)
                return adopted.model_copy(update={"digest": policy.digest, "policy": policy})
        # Another version may read other defaults into a policy of an old log: then the digest is another.
        return adopted.model_copy(update={"digest": adopted.policy.digest})


def is_default(adopted: PolicyAdopted) -> bool:
    """Whether nobody has chosen this policy: it is the default one of any version, which a newer version may change."""
    if adopted.origin is not None:
        return adopted.origin == "default"
    policy, default = adopted.policy, policies.load(policies.DEFAULT)
    chosen = ("admit", "maintenance", "pools")
    return policy.name == default.name and all(getattr(policy, part) == getattr(default, part) for part in chosen)
