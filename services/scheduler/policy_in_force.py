"""The policy that this instance decides by: the one that it was given, else the one that the log says is in force."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from contracts.scheduling import Policy
from services.scheduler import policies
from services.scheduler.core.state.cluster import Cluster

log = structlog.get_logger(__name__)


class PolicyInForce:
    """Finds the policy again when the log has another one. A restart without a policy keeps quotas and pools."""

    def __init__(self, given: Policy | None = None, changes: Sequence[str] = ()) -> None:
        """``changes`` (``reclaim.resume_cost_s=1``) are made to the default policy; a given one has them already.

        Raises:
            policies.PolicyError: a change is not valid.
        """
        self._is_given = given is not None
        self._default = given or policies.with_settings(policies.DEFAULT, changes)
        self._ignored = changes
        #: The policy of the log that was looked at last, and what was chosen then.
        self._adopted: Policy | None = None
        self._chosen = self._default

    def choose(self, cluster: Cluster) -> Policy:
        """Return the policy for a cluster that is folded up to now."""
        adopted = cluster.policy
        if self._is_given or adopted is self._adopted:
            return self._chosen
        self._adopted = adopted
        if adopted is None or is_default(adopted):
            self._chosen = self._default
        else:
            self._chosen = adopted
            ignored = ", ".join(self._ignored)
            log.info("keeping the policy in force", policy=adopted.name, digest=adopted.digest, ignored=ignored)
        return self._chosen


def is_default(policy: Policy) -> bool:
    """Whether nobody has chosen this policy: the default one of any version, which a newer version may change."""
    default = policies.load(policies.DEFAULT)
    chosen = ("admit", "maintenance", "pools")
    return policy.name == default.name and all(getattr(policy, part) == getattr(default, part) for part in chosen)
