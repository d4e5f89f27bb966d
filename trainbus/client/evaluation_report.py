"""The report of a run's evaluation: found by the log, read from the gateway, every hash verified."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from contracts import streams, subjects
from contracts.events.run import Artifact, RunEvaluated, RunNotPromoted, RunPromoted, RunPromotionPending
from contracts.texts import describe
from trainbus.client.address import StackAddress
from trainbus.client.connection import Connection, check_answer
from trainbus.client.errors import NotFoundError, TrainbusError
from trainbus.client.gateway import open_gateway

RESULTS = (RunPromotionPending, RunNotPromoted, RunPromoted)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """A run's report, and what became of the run since."""

    run_id: str
    evaluated: RunEvaluated
    #: ``report.json``; None for evaluations of a version that wrote none.
    content: dict[str, Any] | None
    #: The last fact about the run's promotion, in words; '' if there is none yet.
    result: str
    files: dict[str, Artifact]


async def read_report(connection: Connection, address: StackAddress, run_id: str) -> EvaluationReport:
    """Return the report of a run.

    Raises:
        NotFoundError: the run is not evaluated, or its report is gone from the store.
        TrainbusError: the report is not what the evaluation wrote.
    """
    stored = await connection.read_last(streams.FACTS, subjects.fact("run", run_id, RunEvaluated.fact))
    results = await connection.read(*(subjects.fact("run", run_id, event.fact) for event in RESULTS))
    result = describe(results[-1].event) if results else ""
    if stored is None:
        raise NotFoundError(
            f"run {run_id} has no report: {result or 'it is not evaluated'} (a run with `evaluation` and `model` is "
            f"evaluated once it has completed; `trainbus why {run_id}` says where it is)"
        )
    files = {each.name: each for each in stored.event.report}
    content = None
    if "report.json" in files:
        content = json.loads(await read_file(address, run_id, files["report.json"]))
    return EvaluationReport(run_id, stored.event, content, result, files)


async def read_file(address: StackAddress, run_id: str, file: Artifact) -> bytes:
    """Return a file of a run's report.

    Raises:
        NotFoundError: it is no longer in the store.
        TrainbusError: its hash is another.
    """
    async with open_gateway(address) as http:
        answer = await http.get(f"/training-runs/{run_id}/report/{quote(file.name)}")
    check_answer(answer)
    if hashlib.sha256(answer.content).hexdigest() != file.sha256:
        raise TrainbusError(f"{file.uri} is not the report that was written: its SHA-256 is another")
    return answer.content
