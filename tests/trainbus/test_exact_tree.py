"""The order of the sum never depends on who adds what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainbus.trainer.exact.tree import SumStack, divide_leaves, maximal_nodes, plan_leaves, reduce_tree, split
from trainbus.trainer.training_state import divide_by_bytes


def written(left: str, right: str) -> str:
    return f"({left}+{right})"


def whole_tree(node: tuple[int, int]) -> str:
    if node[1] - node[0] == 1:
        return str(node[0])
    return written(whole_tree((node[0], split(node))), whole_tree((split(node), node[1])))


def test_every_world_size_computes_the_same_sum() -> None:
    for leaf_count in range(1, 33):
        expected = whole_tree((0, leaf_count))
        for world_size in range(1, leaf_count + 1):
            sums = {}
            for leaves in divide_leaves(leaf_count, world_size):
                stack = SumStack(written)
                for leaf in plan_leaves(leaf_count, leaves):
                    total = stack.push(leaf, str(leaf.index))
                    assert (total is None) == (leaf.completes is None)
                    if total is not None and leaf.completes is not None:
                        sums[leaf.completes] = total
                assert not stack._sums
            assert reduce_tree((0, leaf_count), sums, written) == expected


def test_sums_follow_the_documented_tree() -> None:
    assert whole_tree((0, 4)) == "((0+1)+(2+3))"
    assert whole_tree((0, 7)) == "(((0+1)+(2+3))+((4+5)+6))"


@given(st.integers(1, 300), st.data())
def test_leaves_are_divided_evenly_and_nodes_are_few(leaf_count: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, leaf_count))
    parts = divide_leaves(leaf_count, world_size)
    assert [leaf for part in parts for leaf in part] == list(range(leaf_count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        nodes = maximal_nodes(leaf_count, part)
        assert [leaf for node in nodes for leaf in range(*node)] == list(part)
        assert len(nodes) <= 2 * len(part).bit_length()


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 10**9), max_size=40), st.integers(1, 9))
def test_shares_are_disjoint_complete_and_even(sizes: dict[str, int], parts: int) -> None:
    found = divide_by_bytes(sizes, parts)
    assert sorted(name for part in found for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in found]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
