"""What is staged of a run and not settled yet, so that a part is found without reading a whole history again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts import subjects, topology
from contracts.events.checkpoint import CheckpointCommitted, CheckpointRefused, CheckpointStaged
from services.kit.bus import Bus, Message
from services.kit.concurrency import gather_limited

#: Runs whose steps are remembered. Those of another one are read again, once.
MAX_RUNS = 1000
#: Parts that are read from the log at a time.
PARALLEL_READS = 16

#: The generation and the step.
StepKey = tuple[int, int]


@dataclass(slots=True)
class StagedSteps:
    """The open steps of one run: a fold over its facts, in any order and as often as one likes."""

    position: int = 0
    #: Of each step that is neither committed nor refused: sequence -> the part, without its files.
    parts: dict[StepKey, dict[int, CheckpointStaged]] = field(default_factory=dict)
    settled: set[StepKey] = field(default_factory=set)
    #: The step whose part was staged last, settled or not.
    newest: StepKey = (0, 0)

    def apply(self, message: Message[Any]) -> None:
        match message.event:
            case CheckpointStaged(generation=generation, step=step) as part:
                if message.sequence > self.position:
                    self.newest = (generation, step)
                if (generation, step) not in self.settled:
                    parts = self.parts.setdefault((generation, step), {})
                    # The files are most of a fact. They are read again once the step is complete.
                    parts[message.sequence] = part.model_copy(update={"files": ()})
            case CheckpointCommitted(generation=generation, checkpoint=checkpoint):
                self._settle((generation, checkpoint.step))
            case CheckpointRefused(generation=generation, step=step):
                self._settle((generation, step))
        self.position = max(self.position, message.sequence)

    def of_generation(self, generation: int) -> dict[int, dict[int, CheckpointStaged]]:
        """Return step -> its parts, of the steps of one generation that are open; forget those of older ones."""
        for key in [key for key in self.parts if key[0] < generation]:
            del self.parts[key]
        return {step: dict(parts) for (each, step), parts in self.parts.items() if each == generation}

    def _settle(self, key: StepKey) -> None:
        self.settled.add(key)
        self.parts.pop(key, None)


class StagedStepsReader:
    """Reads what is new of a run's checkpoints each time, and each fact once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._runs: OrderedDict[str, StagedSteps] = OrderedDict()

    async def read(self, run_id: str) -> StagedSteps:
        """Return the open steps of a run as they are in the log now."""
        steps = self._runs.setdefault(run_id, StagedSteps())
        self._runs.move_to_end(run_id)
        while len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        kinds = (CheckpointStaged, CheckpointCommitted, CheckpointRefused)
        filters = tuple(subjects.fact("run", run_id, kind.fact) for kind in kinds)
        start = steps.position + 1
        followed = self._bus.follow(topology.FACTS.name, filters, start, until_caught_up=True, include_undecodable=True)
        async for batch in followed:
            for message in batch:
                steps.apply(message)
        return steps

    async def read_parts(self, sequences: Sequence[int]) -> list[CheckpointStaged]:
        """Return the parts at these places of the log, as they were staged."""
        work = (self._bus.get_message(sequence) for sequence in sequences)
        found = await gather_limited(work, limit=PARALLEL_READS)
        return [message.event for message in found if message is not None]
