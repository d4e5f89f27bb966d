"""No shortcut changes a decision, and none may be taken with a feature that rules it out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.policy_features import BY_POLICY, SHORTCUTS, Feature, PolicyFeatures, Shortcut
from tests.scheduler.policy_cases import FIND, compare_case, is_caught, policy_with, read_seeds
from tests.scheduler.world import START

SEEDS = read_seeds()
#: Entries without which no case was found in which decisions differ: another one covers them, or they are careful.
UNSEEN = {
    # Who preempts by share also preempts by another key than priority.
    (Shortcut.NO_VICTIMS, Feature.FAIR_SHARE),
    (Shortcut.PRIORITY_ALONE, Feature.FAIR_SHARE),
    (Shortcut.LEADING_KEYS, Feature.FAIR_SHARE),
    # What they change by the clock alone is seldom what a search that failed depends on.
    (Shortcut.SEARCH_MEMORY, Feature.QUOTAS),
    (Shortcut.SEARCH_MEMORY, Feature.FAIR_SHARE),
    (Shortcut.SEARCH_MEMORY, Feature.RESERVATIONS),
    (Shortcut.SEARCH_MEMORY, Feature.MAINTENANCE),
    # Beside reservations no misfit is noted.
    (Shortcut.MISFITS, Feature.RESERVATIONS),
    (Shortcut.PASSED_OVER, Feature.RESERVATIONS),
    # What was noted before a run that has no nodes for maintenance is noted by ``MISFITS``, which it rules out too.
    (Shortcut.PASSED_OVER, Feature.MAINTENANCE),
    # Nodes that are closed stay so until the end of the cycle.
    (Shortcut.FUTURE_MISFITS, Feature.STRICT_ORDER),
}
PAIRS = [(shortcut, feature) for shortcut in Shortcut for feature in Feature if feature not in SHORTCUTS[shortcut]]


@pytest.mark.parametrize(("shortcut", "feature"), PAIRS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_shortcut_changes_no_decision(shortcut: Shortcut, feature: Feature, seed: int) -> None:
    compare_case(shortcut, feature, seed)


@pytest.mark.parametrize(("shortcut", "feature"), SEEDS)
def test_an_entry_of_the_table_is_needed(shortcut: Shortcut, feature: Feature) -> None:
    """The decisions of the case differ without the entry, and are equal with it."""
    compare_case(shortcut, feature, SEEDS[shortcut, feature])
    assert is_caught(shortcut, feature, SEEDS[shortcut, feature]), f"another case is needed: run `{FIND}`"


def test_each_entry_of_the_table_has_a_case() -> None:
    entries = {(shortcut, feature) for shortcut, row in SHORTCUTS.items() for feature in row}
    assert entries == SEEDS.keys() | UNSEEN, f"run `{FIND}`"
    assert all(why for row in SHORTCUTS.values() for why in row.values())


def test_each_feature_is_on_under_the_policy_that_asks_for_it() -> None:
    for feature in BY_POLICY:
        policy = policy_with([feature], random.Random(1))
        assert PolicyFeatures.of(policy, START).has(feature), feature
    nothing = PolicyFeatures.of(policy_with([], random.Random(1)), START)
    assert all(map(nothing.allows, Shortcut))
