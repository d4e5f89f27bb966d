"""A run's life as its facts add up.

``change_run`` is the one place that says what a fact changes about a run's state, generation and failures. The gateway,
the command line, tracking, evaluation and checkpoint are views: each keeps more about a run, and leaves out the facts
that do not count here.
The scheduler folds the same facts into an indexed cluster, which agrees (``tests/contracts/test_state.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from contracts.base import Fact
from contracts.events.checkpoint import CheckpointDeleted, CheckpointPinned, CheckpointRepaired, CheckpointRotten
from contracts.events.run import (
    GenerationFact,
    RunAccepted,
    RunCancelled,
    RunCancelling,
    RunCompleted,
    RunEvaluated,
    RunExited,
    RunFact,
    RunFailed,
    RunHeldUp,
    RunNotPromoted,
    RunPlaced,
    RunPrepared,
    RunPrepareFailed,
    RunPromoted,
    RunPromotionPending,
    RunQueued,
    RunRejected,
    RunReleased,
    RunReserved,
    RunStaging,
    RunStarted,
    RunStopping,
    RunTracked,
    RunWaiting,
)
from contracts.run_states import HOLDING_STATES, TERMINAL_STATES
from contracts.texts import held_up_text, staging_text

#: Facts about what a run left behind: they count in every state.
ABOUT_RESULTS = (
    RunTracked,
    RunEvaluated,
    RunPromotionPending,
    RunPromoted,
    RunNotPromoted,
    CheckpointDeleted,
    CheckpointPinned,
    CheckpointRotten,
    CheckpointRepaired,
)

#: Facts that count while the run holds slots.
OF_HOLDERS = (RunHeldUp, RunStarted, RunStopping, RunReleased, RunExited)

#: The fields that a fact changes, by name; None: the fact does not count.
Changes = dict[str, Any] | None


class RunLife(Protocol):
    """What every view of a run has."""

    @property
    def state(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def next_generation(self) -> int | None: ...
    @property
    def unfinished(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's life and nothing more."""

    state: str = "requested"
    generation: int = 0
    #: What its next placement will be, while it is queued; None: this view does not read ``queued``.
    next_generation: int | None = 0
    #: Nodes of its placement whose ranks have not ended well: while there are any, it cannot be completed.
    unfinished: tuple[str, ...] = ()
    #: Failures by the run's own fault.
    failures: int = 0
    #: Why it is where it is: a failure, a preemption, a rejection.
    reason: str | None = None


NEVER_QUEUED = RunState(next_generation=None)


class RunStates(dict[str, RunState]):
    """The lives of runs by their ids, for a view that reads ``placed``, ``exited`` and the ends, and not ``queued``."""

    def apply(self, fact: RunFact) -> bool:
        """Fold one fact. Return whether it counts."""
        run = self.get(fact.run_id, NEVER_QUEUED)
        if (changes := change_run(run, fact)) is None:
            return False
        self[fact.run_id] = replace(run, **changes) if changes else run
        return True


def reduce_run(run: RunState, fact: Fact) -> RunState:
    """Return the run after ``fact``; the very same object if nothing changes."""
    changes = change_run(run, fact)
    return replace(run, **changes) if changes else run


def change_run(run: RunLife, fact: Fact) -> Changes:
    """Return the fields of ``RunState`` that ``fact`` changes; None if it does not count.

    A fact of an old generation does not count, nor does one about the life of a run that is over.
    """
    if isinstance(fact, ABOUT_RESULTS):
        return {}
    if isinstance(fact, GenerationFact) and not isinstance(fact, RunPlaced):
        if fact.fact.startswith("checkpoint_"):
            return None if fact.generation < run.generation else {}
        if fact.generation != run.generation:
            return None
    if run.state in TERMINAL_STATES or (isinstance(fact, OF_HOLDERS) and run.state not in HOLDING_STATES):
        return None
    return _change_living(run, fact)


def placement_problem(placed: RunPlaced, queued_generation: int | None) -> str:
    """Return why nobody may act on a placement; '' if it is one that the scheduler can have made.

    Whoever acts on a placement asks this first: who can publish on the bus can publish anything.

    Args:
        queued_generation: the generation for which the run was queued before; None: it was not.
    """
    if queued_generation != placed.generation:
        waits = f"waits for generation {queued_generation}" if queued_generation else "was not queued"
        return f"generation {placed.generation} was placed, and the run {waits}"
    ranks = [rank for member in placed.members for rank in member.ranks]
    nodes = [member.node_id for member in placed.members]
    # The number of ranks first: anybody can name a world of any size.
    if len(ranks) != placed.world_size or sorted(ranks) != list(range(len(ranks))) or len(set(nodes)) != len(nodes):
        return f"its members do not have the ranks 0 to {placed.world_size - 1}, each once"
    return ""


def _change_living(run: RunLife, fact: Fact) -> Changes:
    match fact:
        case RunAccepted():
            accepted = "preparing" if fact.spec.needs_data else "accepted"
            return {"state": accepted} if run.state == "requested" else None
        case RunRejected():
            return {"state": "rejected", "reason": fact.reason} if run.state == "requested" else None
        case RunPrepared():
            return {"state": "accepted"} if run.state == "preparing" else {}
        case RunPrepareFailed():
            return {"reason": fact.reason}
        case RunStaging():
            # Later than it was queued, it is a former leader's.
            waits = run.state in ("accepted", "preparing") and not run.generation
            return {"state": "preparing", "reason": staging_text(fact.dataset, fact.node_ids)} if waits else None
        case RunQueued():
            return _queue(run, fact)
        case RunPlaced():
            awaited = run.generation + 1 if run.next_generation is None else run.next_generation
            if fact.generation <= run.generation or placement_problem(fact, awaited):
                return None
            placed = {"generation": fact.generation, "unfinished": tuple(each.node_id for each in fact.members)}
            return placed | _unless_cancelling(run, state="placed", reason=None)
        case RunWaiting() | RunReserved():
            return {} if fact.next_generation > run.generation else None
        case RunHeldUp():
            return _unless_cancelling(run, reason=held_up_text(fact)) if run.state == "placed" else {}
        case RunStarted():
            return {"state": "running", "reason": None} if run.state == "placed" else {}
        case RunStopping():
            # The first one stands.
            return None if run.state == "stopping" else _unless_cancelling(run, state="stopping", reason=fact.message)
        case RunExited(outcome="succeeded"):
            return {"unfinished": tuple(node_id for node_id in run.unfinished if node_id != fact.node_id)}
        case RunExited(reason=reason) if reason:
            return _unless_cancelling(run, reason=reason)
        case RunCancelling():
            return {"state": "cancelling", "reason": fact.reason} if run.state != "cancelling" else None
        case RunCompleted():
            counts = fact.generation == run.generation > 0 and not run.unfinished
            return {"state": "completed", "reason": None} if counts else None
        case RunFailed():
            # Generation 0: it failed before it was placed.
            counts = fact.generation == 0 or fact.generation >= run.generation
            return {"state": "failed", "reason": fact.reason} if counts else None
        case RunCancelled():
            return {"state": "cancelled", "reason": fact.reason}
    return {}


def _queue(run: RunLife, fact: RunQueued) -> Changes:
    known = run.state == "queued" and fact.next_generation == run.next_generation
    if known or fact.next_generation != run.generation + 1:
        return None
    reason = None if fact.reason == "new" else fact.reason
    counted = {"next_generation": fact.next_generation, "failures": fact.failures}
    return counted | _unless_cancelling(run, state="queued", reason=reason)


def _unless_cancelling(run: RunLife, **changes: Any) -> dict[str, Any]:
    """Return the changes; none of them for a run that is being cancelled, which nothing but its end changes."""
    return {} if run.state == "cancelling" else changes
