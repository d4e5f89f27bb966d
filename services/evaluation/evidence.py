"""What the gates judge by: predictions, manifests and facts, read from the store and the log."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import dataclass, field, replace

import structlog

from contracts import subjects
from contracts.base import Fact
from contracts.events.checkpoint import CheckpointCommitted, CheckpointFile
from contracts.events.run import RunExited, RunReleased
from contracts.manifest import files_of
from contracts.metric_names import LATENCY_MS
from contracts.predictions import Predictions, PredictionsError
from contracts.state.placements import PLACEMENT_FACTS
from services.evaluation.core.bootstrap import seed_for
from services.evaluation.core.comparison import PredictionComparison, compare_predictions
from services.evaluation.core.decide import JudgeCandidate, find_predictions
from services.evaluation.core.footprint import Footprint, slot_hours
from services.evaluation.core.gate import Evidence, metric_value
from services.evaluation.core.report import confusion_of_json
from services.evaluation.core.state import Candidate, Outcome, State
from services.kit.bus import Bus
from services.kit.store.errors import ObjectNotFound
from services.kit.store.objects import ObjectStore

log = structlog.get_logger(__name__)

#: Predictions larger than this are not read into memory.
MAX_PREDICTIONS_BYTES = 256 * 2**20
#: What evaluations wrote before there was ``predictions.parquet``.
OLD_PREDICTIONS = "predictions.json"
#: The weights that are evaluated, of a checkpoint of the Trainer: with a moving average there are two.
AVERAGED, PLAIN = (re.compile(rf"(?:.*/)?{kind}-\d+\.safetensors") for kind in ("ema", "model"))


@dataclass(frozen=True, slots=True)
class Findings:
    """The evidence, and what a report shows besides."""

    evidence: Evidence
    candidate: Footprint = field(default_factory=Footprint)
    champion: Footprint = field(default_factory=Footprint)
    committed: CheckpointCommitted | None = None


class EvidenceReader:
    """Reads what is known of a candidate and of the champion that it would replace."""

    def __init__(self, bus: Bus, objects: ObjectStore) -> None:
        self._bus, self._objects = bus, objects

    async def read_people(self, state: State, step: JudgeCandidate, candidate: Candidate) -> Evidence:
        """Return what people have done about the candidate: approved it, trained it again."""
        settings = state.settings_of(candidate.spec.model or "")
        evidence = Evidence(step.outcome.metrics, approval=settings.approvals.get(candidate.run_id))
        if step.criteria.gates.reproduced:
            reproduced = await self._find_reproduction(state, candidate, step.checkpoint_uri)
            evidence = replace(evidence, reproduced=reproduced)
        return evidence

    async def read_all(self, state: State, step: JudgeCandidate, candidate: Candidate) -> Findings:
        """Return everything that the gates and the report need."""
        people = await self.read_people(state, step, candidate)
        own = await self._footprint(candidate.run_id, step.checkpoint_uri, step.outcome)
        other = Footprint()
        if step.champion is not None:
            fact = step.champion.fact
            other = await self._footprint(fact.run_id, fact.checkpoint_uri, step.champion_outcome or Outcome())
        committed = await self._find_commit(candidate.run_id, step.checkpoint_uri)
        evidence = replace(
            people,
            champion=step.champion_metrics,
            champion_run_id=step.champion.fact.run_id if step.champion else "",
            predictions=await self._compare(step, candidate),
            size_bytes=own.size_bytes,
            exactness=committed.exactness if committed else None,
        )
        return Findings(evidence, own, other, committed)

    async def _compare(self, step: JudgeCandidate, candidate: Candidate) -> PredictionComparison | None:
        """Compare the predictions of both, where the candidate's evaluation kept any."""
        evaluation, champion = step.criteria.evaluation, step.champion
        try:
            own = await self._read_predictions(step.outcome)
        except PredictionsError as error:
            log.warning("predictions cannot be read", run_id=candidate.run_id, error=str(error))
            return None
        if own is None:
            return await self._read_old_predictions(step.outcome)
        other, problem = None, ""
        if champion is not None:
            problem = f"the champion {champion.fact.run_id} has no predictions on this dataset"
            try:
                other = await self._read_predictions(step.champion_outcome or Outcome())
            except PredictionsError as error:
                problem = f"the champion's predictions cannot be read: {error}"
        seed = seed_for(candidate.run_id, champion.fact.run_id if champion else "")
        value = metric_value(step.outcome.metrics, evaluation.metric)
        try:
            return await asyncio.to_thread(
                compare_predictions,
                own,
                other,
                value,
                evaluation.mode,
                step.criteria.gates.confidence,
                seed,
                problem,
            )
        except PredictionsError as error:
            log.warning("predictions cannot be compared", run_id=candidate.run_id, error=str(error))
            return None

    async def _read_predictions(self, outcome: Outcome) -> Predictions | None:
        """Return an evaluation's predictions; None if it kept none.

        Raises:
            PredictionsError: they are gone, too large, or not what the evaluation wrote.
        """
        found = find_predictions(outcome)
        if found is None:
            return None
        try:
            if (size := (await self._objects.head(found.uri)).size_bytes) > MAX_PREDICTIONS_BYTES:
                raise PredictionsError(f"{found.uri} has {size:,} bytes, more than {MAX_PREDICTIONS_BYTES:,}")
            content = await self._objects.get(found.uri)
        except ObjectNotFound as error:
            raise PredictionsError(f"{found.uri} is no longer in the store") from error
        if hashlib.sha256(content).hexdigest() != found.sha256:
            raise PredictionsError(f"{found.uri} is not what the evaluation wrote: its SHA-256 is another")
        return await asyncio.to_thread(Predictions, content)

    async def _read_old_predictions(self, outcome: Outcome) -> PredictionComparison | None:
        found = next((each for each in outcome.artifacts if each.name.rsplit("/", 1)[-1] == OLD_PREDICTIONS), None)
        if found is None:
            return None
        try:
            if (await self._objects.head(found.uri)).size_bytes <= MAX_PREDICTIONS_BYTES // 4:
                content = await self._objects.get(found.uri)
                return await asyncio.to_thread(confusion_of_json, content)
        except ObjectNotFound:
            log.info("predictions left out of the report: missing", uri=found.uri)
        return None

    async def _find_commit(self, run_id: str, uri: str) -> CheckpointCommitted | None:
        """Return the fact that committed a checkpoint."""
        history = await self._bus.read_history(subjects.fact("run", run_id, CheckpointCommitted.fact))
        found = (received.event for received in history if isinstance(received.event, CheckpointCommitted))
        return next((fact for fact in found if fact.checkpoint.uri == uri), None)

    async def _footprint(self, run_id: str, checkpoint_uri: str, outcome: Outcome) -> Footprint:
        """Return what a model takes: latency, bytes, and the slot-hours of its training."""
        read: tuple[type[Fact], ...] = (*PLACEMENT_FACTS, RunReleased, RunExited)
        history = await self._bus.read_history(*(subjects.fact("run", run_id, fact.fact) for fact in read))
        facts = [(each.event, each.envelope.time) for each in history]
        return Footprint(
            latency_ms=metric_value(outcome.metrics, LATENCY_MS),
            size_bytes=await self._measure_weights(checkpoint_uri),
            slot_hours=slot_hours(facts),
        )

    async def _measure_weights(self, checkpoint_uri: str) -> int | None:
        try:
            return weight_bytes(files_of(await self._objects.get(checkpoint_uri)))
        except (ObjectNotFound, ValueError, json.JSONDecodeError):
            return None

    async def _find_reproduction(self, state: State, candidate: Candidate, uri: str) -> bool | None:
        """Return whether a second training reached the state of the candidate's checkpoint; None: none has yet."""
        own = await self._find_commit(candidate.run_id, uri)
        if own is None or own.state_digest is None:
            return None
        reached: list[bool] = []
        for run_id in state.reproductions.get(candidate.run_id, ()):
            for each in await self._bus.read_history(subjects.fact("run", run_id, CheckpointCommitted.fact)):
                commit = each.event
                if commit.checkpoint.step == own.checkpoint.step and commit.state_digest is not None:
                    reached.append(commit.state_digest == own.state_digest)
        return None if not reached else all(reached)


def weight_bytes(files: tuple[CheckpointFile, ...]) -> int:
    """Return the bytes of the weights that are evaluated; of a script's checkpoint, of all its files."""
    for pattern in (AVERAGED, PLAIN):
        if found := [file.size_bytes for file in files if pattern.fullmatch(file.path)]:
            return sum(found)
    return sum(file.size_bytes for file in files)
