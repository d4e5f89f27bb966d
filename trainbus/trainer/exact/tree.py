"""The order in which the leaves of a step are added up: a binary tree that depends only on their number.

A node is the half-open range of leaves under it. A node of n leaves splits after the largest power of two below n, so
that full subtrees lie on the left. A process owns contiguous leaves; it adds up the largest nodes that lie within them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def split(node: Node) -> int:
    """Return the first leaf of the right child of a node of two or more leaves."""
    first, end = node
    return first + (1 << ((end - first - 1).bit_length() - 1))


def divide_leaves(leaf_count: int, world_size: int) -> list[range]:
    """Return each process's leaves. Their numbers differ by one at most."""
    edges = [leaf_count * rank // world_size for rank in range(world_size + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def maximal_nodes(leaf_count: int, leaves: range) -> list[Node]:
    """Return the largest nodes of the tree that lie within ``leaves``, in order; together they are ``leaves``."""

    def under(node: Node) -> Iterator[Node]:
        first, end = node
        if leaves.start <= first and end <= leaves.stop:
            yield node
        elif first < leaves.stop and leaves.start < end:
            middle = split(node)
            yield from under((first, middle))
            yield from under((middle, end))

    return list(under((0, leaf_count)))


def reduce_tree(node: Node, sums: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """Return the sum over ``node`` from those of nodes that make it up: ``add(left, right)`` all the way up."""
    if node in sums:
        return sums[node]
    middle = split(node)
    return add(reduce_tree((node[0], middle), sums, add), reduce_tree((middle, node[1]), sums, add))


@dataclass(frozen=True, slots=True)
class LeafStep:
    """What a process does with the gradient of one of its leaves, given a stack of the sums that it has so far."""

    index: int
    #: How often the two sums on top of the stack are then added, the leaf's own counting as one.
    merges: int
    #: The maximal node that is complete with this leaf.
    completes: Node | None


def plan_leaves(leaf_count: int, leaves: range) -> list[LeafStep]:
    """Return the order of work that adds up a process's maximal nodes, along the tree, with the smallest stack."""
    ends = {node[1] - 1: node for node in maximal_nodes(leaf_count, leaves)}
    merges = dict.fromkeys(leaves, 0)

    def count(node: Node) -> None:
        if node[1] - node[0] > 1:
            merges[node[1] - 1] += 1
            middle = split(node)
            count((node[0], middle))
            count((middle, node[1]))

    for node in ends.values():
        count(node)
    return [LeafStep(leaf, merges[leaf], ends.get(leaf)) for leaf in leaves]


class TreePlan:
    """One rank's part in the tree: its leaves, in their order, and the nodes that each rank adds up by itself."""

    def __init__(self, leaf_count: int, world_size: int, rank: int) -> None:
        by_rank = divide_leaves(leaf_count, world_size)
        self.rank = rank
        self.root: Node = (0, leaf_count)
        self.leaves = by_rank[rank]
        self.steps = {leaf.index: leaf for leaf in plan_leaves(leaf_count, self.leaves)}
        self.nodes_by_rank = [maximal_nodes(leaf_count, leaves) for leaves in by_rank]

    @property
    def nodes(self) -> list[Node]:
        """The maximal nodes of this rank."""
        return self.nodes_by_rank[self.rank]


class SumStack(Generic[T]):
    """The sums that a process has so far, the deepest node last."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        """``add(left, right)`` may change ``left``, and returns the sum."""
        self._add = add
        self._sums: list[T] = []

    def push(self, leaf: LeafStep, value: T) -> T | None:
        """Add a leaf's value along the tree; return the sum of the maximal node that it completes, if any."""
        self._sums.append(value)
        for _ in range(leaf.merges):
            right = self._sums.pop()
            self._sums.append(self._add(self._sums.pop(), right))
        return self._sums.pop() if leaf.completes is not None else None

    def clear(self) -> None:
        self._sums.clear()
