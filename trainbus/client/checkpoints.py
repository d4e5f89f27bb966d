"""A run's checkpoints: read from the log, and verified by the gateway, which is near the store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from contracts import streams, subjects
from contracts.best_checkpoint import RankingMetric, find_best, find_ranking_metric, ranking_metrics
from contracts.events import checkpoint
from contracts.events.model import ModelPromoted
from contracts.events.run import RunAccepted
from contracts.events.train import PinRequested, ScrubRequested
from contracts.manifest import blobs_of_files, files_of, run_of_manifest
from contracts.resumption import ResumptionPoint
from contracts.spec.run import RunSpec
from contracts.verification import CheckpointVerification
from trainbus.client.connection import Connection
from trainbus.client.errors import NotFoundError, TrainbusError, UsageError
from trainbus.client.run_list import find_run
from trainbus.client.runs import wait_for_event

FACTS = (
    checkpoint.CheckpointCommitted,
    checkpoint.CheckpointDeleted,
    checkpoint.CheckpointPinned,
    checkpoint.CheckpointRotten,
    checkpoint.CheckpointRepaired,
)
#: Blobs that are read at the same time.
PARALLEL = 4
#: Seconds for which the checkpoint service's answer to a request is awaited.
ANSWER_TIMEOUT_S = 10.0
PROMOTED = subjects.fact("model", subjects.WILDCARD, ModelPromoted.fact)
#: How MLflow names a version of a registered model.
MODEL_SCHEME = "models:/"
#: What may stand behind RUN@ in place of a step.
BEST, LAST = "best", "last"


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A run and which of its checkpoints: a step, ``best``, ``last``, or '' where the text names none."""

    run: str
    mark: str = ""

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Split RUN, RUN@STEP, RUN@best or RUN@last.

        Raises:
            UsageError: something else stands behind the ``@``.
        """
        run, at, mark = text.rpartition("@")
        if not at:
            return cls(text)
        if not run or not (mark in (BEST, LAST) or (mark.isascii() and mark.isdigit())):
            raise UsageError(f"{text!r}: give RUN@STEP, RUN@best or RUN@last, as in demo@200")
        return cls(run, mark)


@dataclass(slots=True)
class StoredCheckpoint:
    """A committed checkpoint that is not deleted."""

    commit: checkpoint.CheckpointCommitted
    pinned: bool = False
    #: Blobs that were found rotten and are not repaired yet.
    rotten: set[str] = field(default_factory=set)

    @property
    def uri(self) -> str:
        """The address of its manifest."""
        return self.commit.checkpoint.uri

    @property
    def step(self) -> int:
        return self.commit.checkpoint.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of its step."""
        return self.commit.metrics

    def as_resumption_point(self, *, is_completed: bool) -> ResumptionPoint:
        """Return what a new run goes on from. ``is_completed``: its own run has completed."""
        ref, commit = self.commit.checkpoint, self.commit
        return ResumptionPoint(commit.run_id, is_completed, ref.uri, ref.step, ref.epoch, commit.final)

    def to_plain(self) -> dict[str, Any]:
        """Return the checkpoint as JSON."""
        commit = self.commit
        return {
            **commit.checkpoint.model_dump(mode="json"),
            "generation": commit.generation,
            "size_bytes": commit.size_bytes,
            "exactness": commit.exactness,
            "state_digest": commit.state_digest,
            "manifest_sha256": commit.manifest_sha256,
            "metrics": commit.metrics,
            "final": commit.final,
            "pinned": self.pinned,
            "rotten": sorted(self.rotten),
        }


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint with its manifest, which is the one that was committed."""

    stored: StoredCheckpoint
    manifest_sha256: str
    files: tuple[checkpoint.CheckpointFile, ...]

    @property
    def stored_bytes(self) -> int:
        """The bytes in the store, with the bases of differences, each blob once."""
        return sum(blob.size_bytes for blob in blobs_of_files(self.files))


def fold_checkpoints(events: Iterable[Any]) -> dict[str, StoredCheckpoint]:
    """Return manifest address -> checkpoint, from facts in the order of the log."""
    found: dict[str, StoredCheckpoint] = {}
    for event in events:
        if isinstance(event, checkpoint.CheckpointCommitted):
            found[event.checkpoint.uri] = StoredCheckpoint(event)
            continue
        stored = found.get(event.uri)
        if stored is None:
            continue
        match event:
            case checkpoint.CheckpointDeleted():
                del found[event.uri]
            case checkpoint.CheckpointPinned():
                stored.pinned = event.pinned
            case checkpoint.CheckpointRotten():
                stored.rotten |= set(event.blobs)
            case checkpoint.CheckpointRepaired():
                for each in found.values():  # checkpoints share blobs
                    each.rotten.discard(event.blob)
    return found


async def read_checkpoints(connection: Connection, run_id: str = subjects.WILDCARD) -> dict[str, StoredCheckpoint]:
    """Return manifest address -> checkpoint of one run or of all."""
    filters = [subjects.fact("run", run_id, event.fact) for event in FACTS]
    return fold_checkpoints(each.event for each in await connection.read(*filters))


async def list_checkpoints(connection: Connection, run_id: str) -> list[StoredCheckpoint]:
    """Return a run's checkpoints in the order of their steps."""
    return sorted((await read_checkpoints(connection, run_id)).values(), key=lambda each: each.step)


async def find_checkpoint(connection: Connection, target: str) -> StoredCheckpoint:
    """Return the checkpoint that a text names.

    RUN and RUN@last mean the run's newest one, RUN@best the best by the metric of its request, RUN@STEP that of a step.
    models:/NAME@champion means a registered model's, and the s3:// address of a manifest that very one.

    Raises:
        UsageError: the text is none of these.
        NotFoundError: there is no such checkpoint, or it was deleted.
    """
    if target.startswith(MODEL_SCHEME):
        target = await _find_champion(connection, target)
    if target.startswith("s3://"):
        run_id = run_of_manifest(target)
        stored = (await read_checkpoints(connection, run_id)).get(target) if run_id is not None else None
        if stored is None:
            raise NotFoundError(f"{target} is no committed checkpoint, or was deleted: `trainbus checkpoints ls RUN`")
        return stored
    name = CheckpointName.parse(target)
    return await find_run_checkpoint(connection, await find_run(connection, name.run), name.mark)


async def find_run_checkpoint(connection: Connection, run_id: str, mark: str = LAST) -> StoredCheckpoint:
    """Return a run's checkpoint: of a step, ``best`` or ``last``.

    Raises:
        NotFoundError: there is none, or its checkpoints lack the metric by which one is the best.
    """
    known = await list_checkpoints(connection, run_id)
    if mark == BEST and known:
        spec = await read_spec(connection, run_id)
        if (best := find_best(spec, known)) is None:
            raise NotFoundError(_explain_unranked(run_id, spec, known))
        return best
    found = [each for each in known if mark in ("", LAST) or each.step == int(mark)]
    if not found:
        steps = ", ".join(str(each.step) for each in known)
        raise NotFoundError(f"run {run_id} has no such checkpoint; it has steps {steps or '(none)'}")
    return found[-1]


async def read_ranking(
    connection: Connection, run_id: str, known: list[StoredCheckpoint]
) -> tuple[RankingMetric | None, StoredCheckpoint | None]:
    """Return the metric by which a run's checkpoints are compared and the best of them; None where there is none."""
    spec = await read_spec(connection, run_id)
    return find_ranking_metric(spec, known), find_best(spec, known)


async def read_spec(connection: Connection, run_id: str) -> RunSpec | None:
    """Return what a run was accepted as; None before that."""
    accepted = await connection.read_last(streams.FACTS, subjects.fact("run", run_id, RunAccepted.fact))
    return None if accepted is None else accepted.event.spec


def _explain_unranked(run_id: str, spec: RunSpec | None, known: Iterable[StoredCheckpoint]) -> str:
    wanted = " or ".join(metric.name for metric in ranking_metrics(spec))
    present = ", ".join(sorted({name for each in known for name in each.metrics})) or "no metrics"
    return (
        f"run {run_id} has no best checkpoint: none was measured by {wanted or 'a metric'}; they have {present}. Name "
        f"one by its step (`trainbus checkpoints ls {run_id}`), or request the run with retention.metric and .mode"
    )


async def _find_champion(connection: Connection, target: str) -> str:
    """Return the manifest's address of a registered model's champion."""
    model, _, alias = target.removeprefix(MODEL_SCHEME).partition("@")
    if alias != "champion":
        raise UsageError(f"{target!r}: give models:/NAME@champion, the one alias that trainbus sets")
    champions = {each.event.model: each.event.checkpoint_uri for each in await connection.read(PROMOTED)}
    if model not in champions:
        raise NotFoundError(f"there is no champion of {model!r}; there are {', '.join(sorted(champions)) or 'none'}")
    return str(champions[model])


def parse_manifest(stored: StoredCheckpoint, content: bytes) -> LoadedCheckpoint:
    """Return a checkpoint with the files that its manifest names.

    Raises:
        TrainbusError: it is not the manifest that was committed.
    """
    sha256 = hashlib.sha256(content).hexdigest()
    expected = stored.commit.manifest_sha256
    if expected not in (None, sha256):
        raise TrainbusError(
            f"{stored.uri} is not the manifest that was committed (SHA-256 {sha256}, not {expected}): "
            f"`trainbus checkpoints verify {stored.commit.run_id} --repair` writes that one again"
        )
    try:
        return LoadedCheckpoint(stored, sha256, files_of(content))
    except ValueError as error:
        raise TrainbusError(f"{stored.uri} is {error}") from error


async def verify_checkpoints(
    connection: Connection, name: str | None, advance: Callable[[int, int], None]
) -> CheckpointVerification:
    """Have the gateway read checkpoints back: of a run, the one that RUN@STEP, RUN@best or RUN@last names, or all.

    ``advance`` gets (bytes read, all bytes).
    """
    if name is None:
        return CheckpointVerification(**await connection.await_result("/checkpoints/verify", advance))
    parsed = CheckpointName.parse(name)
    run_id = await find_run(connection, parsed.run)
    params = {"mark": parsed.mark} if parsed.mark else {}
    return CheckpointVerification(
        **await connection.await_result(f"/training-runs/{run_id}/checkpoints/verify", advance, params=params)
    )


async def request_repair(
    connection: Connection,
    runs: Iterable[str],
    missing: set[str],
    timeout_s: float,
    on_repaired: Callable[[checkpoint.CheckpointRepaired], None],
) -> None:
    """Request a scrub of the runs and wait until every blob in ``missing`` is repaired.

    Raises:
        TrainbusError: some are not repaired in time.
    """
    start = await connection.last_sequence(streams.FACTS) + 1
    for run_id in sorted(runs):
        await connection.publish_request(ScrubRequested(run_id=run_id, repair=True))
    repaired = subjects.fact("run", subjects.WILDCARD, checkpoint.CheckpointRepaired.fact)

    def completes(fact: checkpoint.CheckpointRepaired) -> bool:
        missing.discard(fact.blob)
        on_repaired(fact)
        return not missing

    if await wait_for_event(connection, start, repaired, completes, timeout_s) is None:
        raise TrainbusError(
            f"{len(missing)} are still rotten after {timeout_s:.0f} s: no node that is up has another copy, or the "
            "checkpoint service does not run; restore from another checkpoint (`trainbus checkpoints ls RUN`)"
        )


async def pin_checkpoint(
    connection: Connection, target: str, *, pinned: bool, reason: str
) -> checkpoint.CheckpointPinned:
    """Pin or unpin RUN@STEP, RUN@best or RUN@last and return the fact that says so.

    Raises:
        NotFoundError: there is no such checkpoint.
        TrainbusError: the checkpoint service does not answer.
    """
    if not CheckpointName.parse(target).mark:
        raise UsageError(f"{target!r}: give RUN@STEP, RUN@best or RUN@last, as in demo@200")
    stored = await find_checkpoint(connection, target)
    run_id, step = stored.commit.run_id, stored.step
    start = await connection.last_sequence(streams.FACTS) + 1
    request = PinRequested(run_id=run_id, step=step, pinned=pinned, reason=reason)
    request_id = (await connection.publish_request(request)).event_id
    subject = subjects.fact("run", run_id, checkpoint.CheckpointPinned.fact)
    fact = await wait_for_event(
        connection, start, subject, lambda each: each.request_id == request_id, ANSWER_TIMEOUT_S
    )
    if fact is None:
        done = "pinned" if pinned else "unpinned"
        raise TrainbusError(
            f"requested, but not {done} yet: the checkpoint service does not answer (`trainbus doctor`)"
        )
    return cast(checkpoint.CheckpointPinned, fact)
