"""Fragmentation gradient descent as published (Weng et al., USENIX ATC'23), to be compared with the scheduler.

An implementation of its own: it imports nothing of the scheduler. It knows the whole workload from the start, as the
published one does, down to the rarest shape. A pod goes where the expected fragmentation grows least, and of equal
nodes to the fullest one: of all ways to break ties this one is the best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from contracts.events.node import NodeJoined
from trainbus.operate.simulation.traces import WHOLE_MILLI, Pod

#: Scores are whole numbers up to this one, as in the published code: nodes that are almost equal are equal.
MAX_SCORE = 100
Array = np.ndarray[Any, np.dtype[np.int64]]
#: What decides where a pod may go: processors, GPUs, thousandths of each, memory, models.
Request = tuple[int, int, int, int, tuple[str, ...]]


class PublishedFgd:
    """The nodes and what is left of them, and the typical pods."""

    def __init__(self, nodes: Sequence[NodeJoined], workload: Sequence[Pod]) -> None:
        most = max(node.slots for node in nodes)
        self.left: Array = np.array([[WHOLE_MILLI] * node.slots + [0] * (most - node.slots) for node in nodes])
        self.cpu: Array = np.array([round(node.cpus * 1000) for node in nodes])
        self.memory: Array = np.array([node.memory_bytes for node in nodes])
        self._slots: Array = np.array([node.slots for node in nodes])
        self.models = [node.accelerator for node in nodes]
        self._allowed: dict[tuple[str, ...], Array] = {}
        self._set_typical(workload)
        self._fragments = self._fragmentation(self.left, self.cpu, np.arange(len(nodes)))
        #: Request -> what it adds to each node's fragmentation, the GPU to share, and how many changes that knows of.
        self._scores: dict[Request, tuple[Array, Array, int]] = {}
        self._changed: list[int] = []

    def place(self, pod: Pod) -> bool:
        """Place the pod; False: it fits nowhere."""
        request = (pod.cpu_milli, pod.gpus, pod.gpu_milli, pod.memory_mib * 2**20, pod.models)
        increase, shared = self._scored(request)
        fitting = np.flatnonzero(increase < np.iinfo(np.int64).max)
        if not fitting.size:
            return False
        score = np.floor(MAX_SCORE / (1 + np.exp(increase[fitting] / self._weights.sum() / WHOLE_MILLI)))
        best = fitting[score == score.max()]
        node = int(best[np.argmin(self.left[best].sum(axis=1) / self._slots[best])])
        self.left[node] = self._taken(self.left[node : node + 1], pod.gpus, pod.gpu_milli, shared[node : node + 1])[0]
        self.cpu[node] -= pod.cpu_milli
        self.memory[node] -= request[3]
        self._changed.append(node)
        at = np.array([node])
        self._fragments[at] = self._fragmentation(self.left[at], self.cpu[at], at)
        return True

    def _set_typical(self, workload: Sequence[Pod]) -> None:
        counts = Counter((pod.cpu_milli, pod.gpus, pod.gpu_milli, pod.models) for pod in workload if pod.gpus)
        kept = sorted(counts.items())
        self._weights: Array = np.array([count for _, count in kept])
        self._cpus: Array = np.array([cpu for (cpu, *_), _ in kept])
        self._counts: Array = np.array([gpus for (_, gpus, *_), _ in kept])
        self._millis, self._milli_at = np.unique([milli for (_, _, milli, _), _ in kept], return_inverse=True)
        self._admits: Array = np.stack([self._on(models) for (*_, models), _ in kept], axis=1)

    def _on(self, models: tuple[str, ...]) -> Array:
        """Whether each node is of one of these models; without any, all are."""
        if models not in self._allowed:
            self._allowed[models] = np.array([not models or model in models for model in self.models])
        return self._allowed[models]

    def _fragmentation(self, left: Array, cpu: Array, at: Array) -> Array:
        """The thousandths of these states of the nodes ``at`` that typical pods cannot use, times their weights."""
        enough = left[:, :, None] >= self._millis
        count, total = enough.sum(axis=1)[:, self._milli_at], left.sum(axis=1)[:, None]
        usable = (left[:, :, None] * enough).sum(axis=1)[:, self._milli_at]
        can = (count >= self._counts) & (cpu[:, None] >= self._cpus) & self._admits[at]
        found: Array = (np.where(can, total - usable, total) * self._weights).sum(axis=1)
        return found

    def _taken(self, left: Array, gpus: int, milli: int, shared: Array) -> Array:
        """What is left of the nodes once the pod has these GPUs: the shared one, or the first whole ones."""
        after = left.copy()
        rows = np.arange(len(left))
        if gpus == 1 and milli < WHOLE_MILLI:
            after[rows, shared] -= milli
        elif gpus:
            enough = after >= milli
            after[enough & (np.cumsum(enough, axis=1) <= gpus)] -= milli
        return after

    def _scored(self, request: Request) -> tuple[Array, Array]:
        """What the pod adds to the fragmentation of each node (the largest number: it does not fit)."""
        if request in self._scores:
            increase, shared, known = self._scores[request]
            stale = np.array(sorted(set(self._changed[known:])), dtype=np.int64)
        else:
            increase = np.full(len(self.cpu), np.iinfo(np.int64).max)
            shared, stale = np.zeros(len(self.cpu), dtype=np.int64), np.arange(len(self.cpu))
        if stale.size:
            increase[stale], shared[stale] = self._increase(request, stale)
        self._scores[request] = increase, shared, len(self._changed)
        return increase, shared

    def _increase(self, request: Request, at: Array) -> tuple[Array, Array]:
        cpu_milli, gpus, milli, memory, models = request
        best = np.full(len(at), np.iinfo(np.int64).max)
        shared = np.zeros(len(at), dtype=np.int64)
        left = self.left[at]
        fits = (self.cpu[at] >= cpu_milli) & (self.memory[at] >= memory) & self._on(models)[at]
        fits &= (left >= milli).sum(axis=1) >= gpus
        is_share = gpus == 1 and milli < WHOLE_MILLI
        for slot in range(left.shape[1] if is_share else 1):
            rows = np.flatnonzero(fits & (left[:, slot] >= milli) if is_share else fits)
            if not rows.size:
                continue
            slots = np.full(len(rows), slot)
            after = self._taken(left[rows], gpus, milli, slots)
            grown = self._fragmentation(after, self.cpu[at[rows]] - cpu_milli, at[rows]) - self._fragments[at[rows]]
            better = grown < best[rows]
            best[rows[better]], shared[rows[better]] = grown[better], slot
        return best, shared
