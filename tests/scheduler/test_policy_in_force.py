"""Which policy is in force: pure, over any sequence of starts, takeovers and requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.earlier_events import PolicyAdoptedV1, read_data
from contracts.envelope import Envelope
from contracts.events.capacity import PolicyAdopted
from contracts.events.train import AdoptPolicyRequested
from contracts.scheduling import Policy
from services.kit.bus import Message, PoisonMessage
from services.scheduler import policies
from services.scheduler.core.fold import apply
from services.scheduler.core.state.cluster import Cluster
from services.scheduler.policy_in_force import PolicyInForce
from services.scheduler.policy_requests import answer_adopt_policy
from tests.contracts.earlier_facts import as_version_1

NOW = datetime(2026, 11, 27, tzinfo=UTC)
TEAM = Policy.model_validate({"name": "team", "admit": {"quotas": [{"team": "research", "slots": 1}]}})
RESUME = "preemption.resume_cost_s"
#: What processes are started with: a policy, changes of the default, or neither.
STARTS: tuple[tuple[Policy | None, tuple[str, ...]], ...] = (
    *((policies.load(name), ()) for name in ("default", "fifo", "fair-share")),
    (TEAM, ()),
    (None, ()),
    (None, (f"{RESUME}=1.0",)),
    (None, (f"{RESUME}=4.0",)),
)


@dataclass
class Log:
    """The adoptions of a log, and the cluster folded from them."""

    cluster: Cluster = field(default_factory=Cluster)
    facts: list[PolicyAdopted] = field(default_factory=list)

    def publish(self, fact: PolicyAdopted) -> None:
        self.facts.append(fact)
        apply(self.cluster, fact, len(self.facts), NOW)

    def lead(self, policy: Policy | None = None, changes: Sequence[str] = ()) -> PolicyInForce:
        """Let a process take over, and return what it decides by."""
        made = PolicyInForce(policy, changes)
        if (adoption := made.next_adoption(self.cluster, "s")) is not None:
            self.publish(adoption)
        assert made.next_adoption(self.cluster, "s") is None
        return made

    def request(self, policy: Policy, replaces: str | None) -> None:
        envelope = Envelope(id="1", source="test", type="", time=NOW)
        received = Message(AdoptPolicyRequested(policy=policy, replaces=replaces), envelope, "")
        self.publish(answer_adopt_policy(received, self.cluster.adopted))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("lead"), st.sampled_from(STARTS)),
        st.tuples(st.just("request"), st.tuples(st.sampled_from(STARTS), st.booleans())),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(steps)
def test_the_policy_in_force_is_the_last_one_that_was_adopted(history: list[tuple[str, Any]]) -> None:
    log, is_chosen = Log(), False
    for what, how in history:
        before = list(log.facts)
        if what == "lead":
            leader = log.lead(*how)
            assert leader.choose(log.cluster) == log.facts[-1].policy
            # Without a request a policy is adopted only where nobody has chosen one.
            assert not (is_chosen and log.facts != before)
            is_chosen |= log.facts[-1].origin != "default" or bool(log.facts[-1].settings)
        else:
            (policy, changes), is_fresh = how
            wanted = policy or policies.with_settings(policies.DEFAULT, changes)
            replaced = log.facts[-1].digest if is_fresh and log.facts else None if is_fresh else "0" * 16
            with suppress(PoisonMessage):
                log.request(wanted, replaced)
            # What does not know the policy in force changes nothing.
            assert (log.facts != before) == is_fresh
            is_chosen |= is_fresh
        assert log.cluster.policy == (log.facts[-1].policy if log.facts else None)
    assert [fact.digest for fact in log.facts] == [fact.policy.digest for fact in log.facts]


def test_a_newer_version_changes_the_default_that_nobody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what the first process was set to, and is not what another one is set to."""
    default, changed = policies.load(policies.DEFAULT), policies.with_settings(policies.DEFAULT, [f"{RESUME}=1.0"])
    plain, set_to, requested = Log(), Log(), Log()
    plain.lead()
    set_to.lead(None, [f"{RESUME}=1.0"])
    requested.lead()
    requested.request(default, None)
    newer = policies.change(default, ["place.by=spread"])
    original = policies.with_settings
    monkeypatch.setattr(
        policies, "with_settings", lambda name, s: policies.change(newer, s) if name == "default" else original(name, s)
    )
    assert plain.lead().choose(plain.cluster) == newer
    found = set_to.lead(None, [f"{RESUME}=4.0"])
    assert found.choose(set_to.cluster) == changed.model_copy(update={"place": newer.place})
    assert f"{RESUME}=4.0" in found.describe_unused(set_to.cluster)
    assert not set_to.lead(None, [f"{RESUME}=1.0"]).describe_unused(set_to.cluster)
    assert requested.lead().choose(requested.cluster) == default


def test_the_policy_of_an_old_log_stays_unless_it_is_the_default() -> None:
    for policy, stays in ((TEAM, True), (policies.load("default"), False)):
        log = Log()
        log.publish(PolicyAdopted(digest=policy.digest, policy=policy))
        log.lead(policies.load("fifo"))
        assert (log.cluster.policy == policy) is stays
        log.lead(policies.load("fgd"))
        assert (log.cluster.policy == policy) is stays


def test_a_policy_that_this_version_reads_otherwise_is_adopted_as_it_is_read() -> None:
    """Decisions name the policy by a digest that a fact of the log holds."""
    log = Log()
    log.publish(PolicyAdopted(digest="0" * 16, policy=TEAM, origin="request", user="ada", reason="more nodes"))
    log.lead(policies.load("fifo"))
    assert [fact.digest for fact in log.facts] == ["0" * 16, TEAM.digest]
    assert (log.facts[-1].user, log.facts[-1].reason) == ("ada", "more nodes")
    assert log.facts[-1].after_sequence == 1


@pytest.mark.parametrize(("policy", "changes"), STARTS)
def test_the_policy_of_a_log_of_version_1_is_in_force(policy: Policy | None, changes: tuple[str, ...]) -> None:
    """No scheduler adopts it anew: it has the same digest as then."""
    then, log = Log(), Log()
    then.lead(policy, changes)
    data = as_version_1(then.facts[0]).model_dump(mode="json")
    data["settings"] = [each.replace("preemption.", "reclaim.") for each in data["settings"]]
    adopted = read_data(PolicyAdoptedV1.type, data)
    assert isinstance(adopted, PolicyAdopted)
    log.publish(adopted)
    leader = log.lead(policy, changes)
    assert log.facts == [adopted] == then.facts
    assert leader.choose(log.cluster).digest == adopted.digest
    assert not leader.describe_unused(log.cluster)


def test_a_process_says_which_of_its_settings_have_no_effect() -> None:
    log = Log()
    assert not log.lead(TEAM).describe_unused(log.cluster)
    unused = log.lead(policies.load("fifo")).describe_unused(log.cluster)
    assert "TRAINBUS_POLICY: fifo" in unused
    assert f"team, {TEAM.digest}" in unused
    assert not log.lead().describe_unused(log.cluster)
    assert not log.lead(None, [f"{RESUME}=60"]).describe_unused(log.cluster)
    assert f"({RESUME}=4)" in log.lead(None, [f"{RESUME}=4"]).describe_unused(log.cluster)


def test_a_fact_holds_the_whole_policy() -> None:
    """A version with other defaults must not read another policy out of it."""
    for event in (PolicyAdopted(digest=TEAM.digest, policy=TEAM), AdoptPolicyRequested(policy=TEAM)):
        assert event.model_dump(mode="json", exclude_defaults=True)["policy"] == TEAM.model_dump(mode="json")
