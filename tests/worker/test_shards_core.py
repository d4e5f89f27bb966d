"""Which shard is needed when, and which one goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.shards import NOMINAL_PER_S, Plan, Present, earliest, victims

HERE = {name: Present(10, used_s) for used_s, name in enumerate("abcdef")}


def test_needs_behind_are_over_and_those_under_way_are_due_now() -> None:
    plan = Plan(at=100, per_s=10.0, needs=((1, 0, 99), (2, 50, 150), (3, 100, 100), (4, 300, 400), (1, 500, 600)))
    assert list(plan.dues()) == [(2, 0.0), (3, 0.0), (4, 20.0), (1, 40.0)]
    assert dict(Plan(at=0, per_s=0.0, needs=((7, 1000, 2000),)).dues()) == {7: 1000 / NOMINAL_PER_S}


def test_the_first_need_of_all_counts() -> None:
    assert earliest([("a", 5.0), ("b", 1.0), ("a", 2.0)]) == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize(
    ("dues", "spared", "over_bytes", "due_s", "ahead_s", "gone"),
    [
        ({}, "", 0, 0.0, 60.0, ""),
        ({}, "", 15, 0.0, 60.0, "ab"),  # unannounced: oldest use first
        ({"a": 5.0}, "b", 10, 0.0, 60.0, "c"),  # announced and spared stay
        ({name: float(n) for n, name in enumerate("abcdef")}, "", 20, 2.0, 60.0, "fe"),  # what is needed last goes
        ({name: float(n) for n, name in enumerate("abcdef")}, "", 50, 2.0, 60.0, "fed"),  # nothing needed sooner goes
        (dict.fromkeys("abcde", 500.0), "", 20, 100.0, 60.0, "f"),  # too early to give up what is needed
        (dict.fromkeys("abcde", 500.0), "", 20, 50.0, 60.0, "fa"),
        (dict.fromkeys("abcdef", 0.0), "", 20, -1.0, 60.0, "ab"),  # a rank waits: even what is under way
    ],
)
def test_what_goes(
    dues: dict[str, float], spared: str, over_bytes: int, due_s: float, ahead_s: float, gone: str
) -> None:
    assert victims(HERE, dues, set(spared), over_bytes, due_s, ahead_s) == list(gone)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100)),
    st.sets(st.sampled_from("abcdef")),
    st.integers(-10, 100),
    st.floats(-1, 100),
)
def test_never_more_than_needed_and_never_for_something_later(
    dues: dict[str, float], spared: set[str], over_bytes: int, due_s: float
) -> None:
    gone = victims(HERE, dues, spared, over_bytes, due_s)
    assert not spared & set(gone)
    assert all(dues.get(name, float("inf")) > due_s for name in gone)
    assert 10 * len(gone) < max(over_bytes, 0) + 10
