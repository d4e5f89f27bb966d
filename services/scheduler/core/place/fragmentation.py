"""Placing by fragmentation gradient descent (FGD; Weng et al., USENIX ATC'23): each bundle goes where what is left of
the node loses least of its worth to the runs that may still come.

What is left of a node is fragmented, for one typical shape of run, as far as that shape cannot use it. The paper counts
what *one* more run of the shape could use: all accelerators that have enough left, if it fits at all. That overlooks
that 190 thousandths stay behind on every accelerator that takes 810, and that processors run out after the third run.
So here half of the measure is what *as many as fit* of the shape would use. On the published traces that places 0.8
(default), 0.6 (gpushare40) and -0.2 (multigpu20) points of all accelerators more than the first half alone, with a
known workload. Equal scores go to the node with the least left.

Where runs name models of accelerators, the measure has two changes. What a shape can use counts by how rare the models
are that it names (``rarity_of``): where a tenth of the accelerators will do for it, each is worth ten times as much.
Runs that can lie anywhere therefore leave rare models to the runs that name them. And the half for as many as fit is
left out: it keeps the nodes of a model for runs of one shape.

All of it is whole numbers, and nothing that is remembered changes a result: ``FragmentationScores`` may be
dropped at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from services.scheduler.core.place.remainder import Left, State
from services.scheduler.core.place.snapshot import NodeCapacity, NodeSlots
from services.scheduler.core.state.slot_spec import SLOT_MILLI, SlotSpec
from services.scheduler.core.state.suspects import note_suspect
from services.scheduler.core.state.workload import Shape, shape_of

#: What a node has left of something that is not counted there: more than all ranks of a run can request.
UNCOUNTED_REST = 1 << 200
#: Values that are remembered at most; beyond, all are forgotten.
MAX_CACHED_VALUES = 300_000

#: Rarity is counted in parts of this size, so that a node that comes or goes changes little.
RARITY_PARTS = 10

Typical = tuple[tuple[Shape, int], ...]
#: Models that a shape names -> how rare they are, in ``RARITY_PARTS``.
Rarity = Mapping[frozenset[str], int]


class Score(NamedTuple):
    """What a shape does to a state; the least is best."""

    increase: int
    #: The accelerator to share: one that has so much left; 0: there is nothing to choose.
    share_of: int


class Worth:
    """What states are worth to the typical shapes that may lie on one kind of node."""

    def __init__(self, typical: Typical, model: str, profile: str, rarity: Rarity | None = None) -> None:
        members: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.scale = 0
        self._counts_copies = not any(shape.models for shape, _ in typical)
        for shape, count in typical:
            weight = count * rarity.get(shape.models, RARITY_PARTS) if rarity else count
            # A shape that may not lie here finds no worth in it: all is fragmented to it.
            self.scale += 2 * weight
            if shape.profile == profile and (not shape.models or model in shape.models):
                needs = (shape.cpu_milli, shape.memory_bytes, weight)
                members.setdefault((shape.accelerators, shape.milli), []).append(needs)
        self._members = [(count, milli, sorted(needs)) for (count, milli), needs in sorted(members.items())]
        self._stocks: dict[Left, list[tuple[int, int, int, list[tuple[int, int, int]]]]] = {}
        self._values: dict[tuple[Left, int, int], int] = {}

    def fragmentation(self, left: Left, cpu_milli: int, memory_bytes: int) -> int:
        """Thousandths that cannot be used, expected over the workload, times ``scale``."""
        return sum(left) * self.scale - self.usable(left, cpu_milli, memory_bytes)

    def usable(self, left: Left, cpu_milli: int, memory_bytes: int) -> int:
        """Thousandths that can be used, by one more run and by as many as fit, times the weights."""
        key = (left, cpu_milli, memory_bytes)
        value = self._values.get(key)
        if value is None:
            if len(self._values) >= MAX_CACHED_VALUES:
                self._values.clear()
            value = self._values[key] = self._usable(left, cpu_milli, memory_bytes)
        return value

    def _usable(self, left: Left, cpu_milli: int, memory_bytes: int) -> int:
        value = 0
        for by_one, copies, milli, needs in self._stock(left):
            for cpu, memory, weight in needs:
                if cpu > cpu_milli:
                    break  # they ascend
                if memory > memory_bytes:
                    continue
                fitting = copies
                if cpu and cpu_milli < cpu * fitting:
                    fitting = cpu_milli // cpu
                if memory and memory_bytes < memory * fitting:
                    fitting = memory_bytes // memory
                value += weight * (by_one + (fitting * milli if self._counts_copies else by_one))
        return value

    def _stock(self, left: Left) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
        """For each kind of shape that the accelerators have room for: what one could use, how many there is room
        for, what each of them takes, and what they need besides."""
        stock = self._stocks.get(left)
        if stock is None:
            if len(self._stocks) >= MAX_CACHED_VALUES:
                self._stocks.clear()
            stock = self._stocks[left] = []
            for count, milli, needs in self._members:
                enough = [each for each in left if each >= milli]
                if len(enough) >= count:
                    copies = sum(each // milli for each in enough) if count == 1 else len(enough) // count
                    stock.append((sum(enough), copies, count * milli, needs))
        return stock


class FragmentationScores:
    """Scores of nodes for shapes, remembered until the node or the workload changes."""

    def __init__(self, typical: Typical = (), rarity: Rarity | None = None) -> None:
        self.typical, self.rarity = typical, rarity or {}
        self._states: dict[tuple[Left, int, int, str, str], State] = {}
        self._worth: dict[tuple[str, str], Worth] = {}
        self._scores: dict[Shape, dict[State, Score | None]] = {}
        self._scored = 0

    def worth(self, model: str, profile: str = "") -> Worth:
        """What states of such nodes are worth."""
        key = (model, profile)
        found = self._worth.get(key)
        if found is None:
            found = self._worth[key] = Worth(self.typical, model, profile, self.rarity)
        return found

    def state(
        self, left: Sequence[int], cpu_milli: int, memory_bytes: int, model: str = "", profile: str = ""
    ) -> State:
        """The one object for what is left."""
        key = (tuple(sorted(left, reverse=True)), cpu_milli, memory_bytes, model, profile)
        found = self._states.get(key)
        if found is None:
            if len(self._states) >= MAX_CACHED_VALUES:
                self._forget()
            found = self._states[key] = State(*key)
        return found

    def fragmentation(self, state: State) -> int:
        """Thousandths of the state that the workload cannot use, times the scale of its weights."""
        return self.worth(state.model, state.profile).fragmentation(state.left, state.cpu_milli, state.memory_bytes)

    def increase(self, state: State, shape: Shape) -> Score | None:
        """By how much fragmentation grows if the shape is placed, and where that is least; None: it does not fit."""
        scores = self._scores.setdefault(shape, {})
        if state in scores:
            return scores[state]
        if self._scored >= MAX_CACHED_VALUES:
            self._forget()
            scores = self._scores.setdefault(shape, {})
        self._scored += 1
        found = scores[state] = self._increase(state, shape)
        return found

    def _increase(self, state: State, shape: Shape) -> Score | None:
        cpu, memory = state.cpu_milli - shape.cpu_milli, state.memory_bytes - shape.memory_bytes
        if cpu < 0 or memory < 0 or (shape.models and state.model not in shape.models):
            return None
        worth = self.worth(state.model, state.profile)
        before = worth.usable(state.left, state.cpu_milli, state.memory_bytes)
        taken = shape.milli_total * worth.scale
        best: Score | None = None
        for share_of, after in _outcomes(state.left, shape):
            increase = before - worth.usable(after, cpu, memory) - taken
            if best is None or (increase, share_of) < best:
                best = Score(increase, share_of)
        return best

    def _forget(self) -> None:
        """Make room. States that are equal to later ones must not be met again, so all goes."""
        self._states.clear()
        self._scores.clear()
        self._scored = 0

    # -- nodes --------------------------------------------------------------------

    def choose(
        self, capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int, avoid: Collection[str] = ()
    ) -> list[NodeSlots]:
        """``count`` slots out of ``capacities``, which have them: on few nodes, each piece where it fragments least."""
        found: list[NodeSlots] = []
        while count > 0:
            size, fitting = _largest_piece(capacities, slot_spec, count)
            preferred = [capacity for capacity in fitting if capacity.node.node_id not in avoid] if avoid else fitting
            capacity, score = self.best(preferred or fitting, shape_of(slot_spec, size))
            found.append((capacity.node.node_id, _slots(capacity, slot_spec, size, score.share_of)))
            capacities = [each for each in capacities if each is not capacity] if size < count else capacities
            count -= size
        return found

    def best(self, capacities: list[NodeCapacity], shape: Shape) -> tuple[NodeCapacity, Score]:
        """The node on which the shape fragments least; of equal ones that with the least left.

        Raises:
            ValueError: it fits on none of them.
        """
        best: tuple[NodeCapacity, Score] | None = None
        least: tuple[int, int, str] = (0, 0, "")
        scores = self._scores.setdefault(shape, {})
        for capacity in capacities:
            state = capacity.state
            try:
                if state is None or capacity.node.profiles:
                    state = capacity.state = self._state_of(capacity, shape.profile)
            except Exception as error:
                note_suspect(error, node_id=capacity.node.node_id)
                raise
            try:
                score = scores[state]
            except KeyError:
                score = self.increase(state, shape)
                scores = self._scores.setdefault(shape, {})
            if score is None or (best is not None and score.increase > least[0]):
                continue
            rank = (score.increase, state.milli, capacity.node.node_id)
            if best is None or rank < least:
                best, least = (capacity, score), rank
        if best is None:
            raise ValueError(f"there is no room for {shape}")
        return best

    def _state_of(self, capacity: NodeCapacity, profile: str) -> State:
        """The state of the node, as a shape of that MIG profile sees it."""
        try:
            node, left = capacity.node, list(capacity.free_milli)
            if node.profiles:
                seen = [milli for milli, each in zip(left, node.profiles, strict=False) if each == profile]
            else:
                seen, profile = left, ""
            cpu_milli = capacity.cpu_milli if node.cpu_milli else UNCOUNTED_REST
            memory_bytes = capacity.memory_bytes if node.memory_bytes else UNCOUNTED_REST
            return self.state(seen, cpu_milli, memory_bytes, node.accelerator, profile)
        except Exception as error:
            note_suspect(error, node_id=capacity.node.node_id)
            raise


def rarity_of(typical: Typical, slots: Mapping[str, int]) -> Rarity:
    """Return how rare the models are that the shapes name; ``slots``: model -> the slots that the cluster has of it."""
    total, named = sum(slots.values()), {shape.models for shape, _ in typical if shape.models}
    return {
        models: total * RARITY_PARTS // there
        for models in named
        if (there := sum(slots.get(model, 0) for model in models))
    }


def _outcomes(left: Left, shape: Shape) -> list[tuple[int, Left]]:
    """What may be left after the shape is placed, by what was left of the accelerator that it shares."""
    milli, count = shape.milli, shape.accelerators
    if not count:
        return [(0, left)]
    fitting = sum(each >= milli for each in left)
    if fitting < count:
        return []
    if milli == SLOT_MILLI:
        return [(0, (*left[count:], *(0,) * count))]  # whole ones come first
    if count > 1:
        # Those with the least left, as ``Room.pick`` takes them.
        taken = [each - milli for each in left[fitting - count : fitting]]
        return [(0, _sorted(left[: fitting - count], left[fitting:], taken))]
    places = [place for place in range(fitting) if not place or left[place] != left[place - 1]]
    return [(left[place], _sorted(left[:place], left[place + 1 :], [left[place] - milli])) for place in places]


def _sorted(*parts: Sequence[int]) -> Left:
    return tuple(sorted((each for part in parts for each in part), reverse=True))


def _largest_piece(capacities: list[NodeCapacity], slot_spec: SlotSpec, count: int) -> tuple[int, list[NodeCapacity]]:
    """As many of the slots as some node has, and the nodes that have them: few nodes keep gradients off the network."""
    if count == slot_spec.bundle:
        return count, capacities
    fits = [(capacity.fits(slot_spec), capacity) for capacity in capacities]
    size = min(max(slots for slots, _ in fits), count)
    return size, [capacity for slots, capacity in fits if slots >= size]


def _slots(capacity: NodeCapacity, slot_spec: SlotSpec, count: int, share_of: int) -> tuple[int, ...]:
    """Return the slots of the node to take."""
    if not share_of:
        return capacity.pick(slot_spec, count)
    try:
        profiles = capacity.node.profiles
    except Exception as error:
        note_suspect(error, node_id=capacity.node.node_id)
        raise
    for slot, milli in enumerate(capacity.free_milli):
        if milli == share_of and (not profiles or profiles[slot] == slot_spec.profile):
            return (slot,)
    raise ValueError(f"node {capacity.node.node_id} has no accelerator with {share_of} thousandths left")
