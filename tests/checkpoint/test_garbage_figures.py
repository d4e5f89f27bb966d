"""The load test of garbage collection, with a small store."""

from __future__ import annotations

from loadtest.garbage import find_growth, measure, table_rows


async def test_collections_delete_what_nothing_names_and_read_only_new_facts() -> None:
    figures = await measure(3000)
    # 2700 blobs in three manifests; the last of them is removed in the end.
    assert figures["facts"] == [3, 0, 1]
    assert figures["deleted"] == [300, 0, 700]
    assert len(table_rows([figures])) == 4


def test_growth_of_time_and_of_memory_is_found() -> None:
    stage = {"seconds": 1.0, "cpu_s": 2.0, "extra_mib": 50.0}
    small = {"blobs": 10, "stages": {"first": stage}}
    assert find_growth(small, {"blobs": 100, "stages": {"first": {**stage, "cpu_s": 29.0, "extra_mib": 140.0}}}) == []
    grown = find_growth(small, {"blobs": 100, "stages": {"first": {**stage, "cpu_s": 31.0, "extra_mib": 150.0}}})
    assert len(grown) == 2
