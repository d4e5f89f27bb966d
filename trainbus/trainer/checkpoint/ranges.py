"""Has the node's agent fetch the ranges of a checkpoint that this rank reads, where the node lays it out in parts."""

from __future__ import annotations

from pathlib import Path

from contracts.ranks import Launch, RangeReplyLine, RangeRequestLine
from trainbus.agent_link.requests import PATIENCE_S, request_until_answered
from trainbus.trainer.checkpoint.files import CheckpointError
from trainbus.trainer.checkpoint.tensor_file import RequireRange


class CheckpointRanges:
    """One rank's requests; called with a file and its range before each read."""

    def __init__(self, launch: Launch, rank: int, *, patience_s: float = PATIENCE_S) -> None:
        assert launch.resume_folder is not None
        self._agent, self._folder, self._generation = launch.socket, launch.resume_folder, launch.generation
        self._rank, self._patience_s = rank, patience_s

    def __call__(self, path: Path, start: int, stop: int) -> None:
        """Return when the bytes from ``start`` to ``stop`` are in the file.

        Raises:
            CheckpointError: they cannot be fetched, or there is no agent.
        """
        file = path.relative_to(self._folder).as_posix()
        line = RangeRequestLine(rank=self._rank, generation=self._generation, file=file, start=start, stop=stop)
        if problem := request_until_answered(self._agent, line, RangeReplyLine, file, patience_s=self._patience_s):
            raise CheckpointError(problem)


def find_ranges(launch: Launch, rank: int) -> RequireRange | None:
    """Return what is to be called before a range of the checkpoint is read; None: all of it is here."""
    return CheckpointRanges(launch, rank) if launch.resume_is_partial else None
