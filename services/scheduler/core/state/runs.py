"""All runs by their ids. A run that is over takes a few hundred bytes, and is unpacked on access.

A scheduler remembers every run for ever: a restore may ask for any of them. But nothing is decided about a run that is
over, so it need not lie there as a hundred Python objects.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, overload

from pydantic import ConfigDict, TypeAdapter

from services.scheduler.core.state.run import Run

#: Zlib starts from this text: what most packed runs have in common, the most frequent last.
COMMON = (
    b'"dataset":{"dataset_id":"","manifest_uri":"s3://datasets/","train_samples":"checkpoints":{"s3://models/default/'
    b'checkpoints/epoch_1/step_00000.g1.json":{"generation":1,"ref":{"uri":"s3://models/","step":,"epoch":1,'
    b'"samples_consumed":,"manifest_sha256":"metrics":{"validation/loss":"newest":"committed_at":"final":"failures":'
    b'"failed":"cancel_reason":"cancelled by request","outcome":"served_slot_s":"run_s":"failures_seen":'
    b'"task":"module:Task","code":{"uri":"s3://code/","sha256":"training":{"epochs":,"global_batch":,"seed":'
    b'"waiting_code":"slots","waiting_code":"priority","waiting_generation":1,"traceparent":"00-'
    b'"spec":{"name":"","user":"","team":"","priority":"slots":{"min":1,"max":1},"command":["'
    b'{"run_id":"r","submitted":,"submitted_at":"2026-01-01T00:00:00.Z","correlation_id":"","phase":"completed",'
    b'"generation":1,"queued_at":"2026-placed_at":"2026-ended_at":"2026-"last_sequence":,"last_event_id":"run/r/completed"'
)
LEVEL = 1


class Runs(dict[str, Run]):
    """Run by id. Iterating goes over those that are not over; asking for one, or whether it is there, over all."""

    def __init__(self, runs: Iterable[tuple[str, Run]] = (), packed: Iterable[tuple[str, bytes]] = ()) -> None:
        super().__init__(runs)
        #: Those that are over, see ``pack``.
        self.packed: dict[str, bytes] = dict(packed)

    @property
    def total(self) -> int:
        """How many there are, those that are over included."""
        return len(self) + len(self.packed)

    def ids(self) -> Iterator[str]:
        """The ids of all of them."""
        yield from self.packed
        yield from self

    def archive(self, run: Run) -> None:
        """Pack the run as it is now. A caller that unpacks and changes it must archive it again."""
        self.packed[run.run_id] = pack(run)
        self.pop(run.run_id, None)

    def restore_live(self, run: Run) -> None:
        """The run, which was unpacked, lives again: what it says is kept as it changes."""
        if self.packed.pop(run.run_id, None) is not None:
            self[run.run_id] = run

    def __missing__(self, run_id: str) -> Run:
        return unpack(self.packed[run_id])

    @overload
    def get(self, run_id: str, default: None = None, /) -> Run | None: ...
    @overload
    def get(self, run_id: str, default: Any, /) -> Any: ...
    def get(self, run_id: str, default: Any = None, /) -> Any:
        found = super().get(run_id)
        if found is None and run_id in self.packed:
            return unpack(self.packed[run_id])
        return default if found is None else found

    def __contains__(self, run_id: object) -> bool:
        return super().__contains__(run_id) or run_id in self.packed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and super().__eq__(other) and self.packed == other.packed

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # it changes


def pack(run: Run) -> bytes:
    """The run in few bytes; the same bytes for the same run."""
    run.request = None
    packer = zlib.compressobj(LEVEL, zdict=COMMON)
    return packer.compress(_adapter().dump_json([run], exclude_defaults=True)) + packer.flush()


def unpack(packed: bytes) -> Run:
    """What ``pack`` packed."""
    (run,) = _adapter().validate_json(zlib.decompressobj(zdict=COMMON).decompress(packed))
    return run


def dump(runs: Iterable[Run]) -> bytes:
    """Runs as JSON, for a snapshot."""
    listed = list(runs)
    for run in listed:
        run.request = None
    return _adapter().dump_json(listed, exclude_defaults=True)


def load(content: bytes) -> list[Run]:
    """What ``dump`` gave."""
    return _adapter().validate_json(content)


@cache
def _adapter() -> TypeAdapter[list[Run]]:
    return TypeAdapter(list[Run], config=ConfigDict(ser_json_inf_nan="strings"))
