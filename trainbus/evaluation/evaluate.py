"""Runs of kind ``evaluate``: measure a checkpoint on a split, and keep the predictions.

Each rank computes its part of the split. The predictions of all ranks are put together in the order of the split, so
that neither they nor what is computed from them depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor, nn

from contracts.metric_names import LATENCY_MS
from contracts.predictions import (
    ID,
    PREDICTIONS_FILE,
    PROBABILITIES,
    SCORE,
    TARGET,
    Predictions,
    PredictionsError,
    PredictionsInfo,
    PredictionsWriter,
)
from contracts.ranks import Launch
from trainbus.data.dataset import Dataset
from trainbus.data.reader import DatasetError, SplitReader
from trainbus.evaluation.kind_metrics import compute_kind_metrics, score_rows
from trainbus.evaluation.latency import measure_latency_ms
from trainbus.evaluation.prediction_columns import make_columns
from trainbus.task import Task, TaskError
from trainbus.trainer import checkpoint
from trainbus.trainer.checkpoint.ranges import find_ranges
from trainbus.trainer.checkpoint.task_artifacts import load_artifacts
from trainbus.trainer.deferred_model import build_deferred
from trainbus.trainer.validation import MeasuredChunk, measure_split
from trainbus.trainer.world import World

#: Strategies whose models need not fit on one device.
SHARDED = ("fsdp2", "deepspeed")
#: Bytes of another rank's rows that are sent at once.
PIECE_BYTES = 16 * 2**20


def evaluate(launch: Launch, task: Task, dataset: Dataset, world: World) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return (metrics, artifacts) of the checkpoint in ``resume_folder``; every rank calls it.

    The metrics are named ``<split>/<name>``: the exact means of ``task.metrics``, the metrics of ``task.kind``, those
    of ``task.summarize``, and ``latency_ms``, which alone differs from one evaluation to the next. For tasks with
    ``predict`` rank 0 writes ``predictions.parquet``.
    """
    target = launch.spec.evaluate
    assert target is not None
    reader = dataset.split(target.split)
    if len(reader) == 0:
        raise DatasetError(f"the {target.split} split has no samples to evaluate on")
    if launch.resume_folder is None:
        raise checkpoint.CheckpointError("there is no checkpoint to evaluate")
    model = _load_model(launch, launch.resume_folder, task, world)
    rows = RankRows(launch.folder, world)
    score = ScoredMetric(target.metric or "", target.mode or "max")

    def record(chunk: MeasuredChunk) -> None:
        # On every rank alike, also for a chunk that does not count: a sharded model communicates in each forward.
        returned = task.predict(model, chunk.batch)
        if returned is not None and chunk.counted:
            columns = make_columns(task, returned, chunk.samples.keys)
            rows.append(columns | score.of_chunk(columns, chunk))

    # Evaluation measures the weights themselves: in fp32, also after training in another precision.
    means = measure_split(task, model, reader, world, "fp32", on_chunk=record)
    path = launch.folder / PREDICTIONS_FILE
    info = PredictionsInfo(
        dataset_id=dataset.dataset_id,
        split=target.split,
        classes=task.classes,
        kind=task.kind or "",
        score_of=score.name,
    )
    try:
        written = rows.write_all(path, info)
        found = world.broadcast_object(_summarize(task, path, score) if written and world.is_first else {})
    except PredictionsError as error:
        raise TaskError(f"{type(task).__name__}.predict(): {error}") from error
    # The task's own name for a metric goes before the kind's, and before ours.
    named = {**found, **means}
    if LATENCY_MS not in named and (latency_ms := _measure_latency(launch, task, model, reader, world)) is not None:
        named[LATENCY_MS] = latency_ms
    metrics = {f"{target.split}/{name}": value for name, value in named.items()}
    return metrics, (PREDICTIONS_FILE,) if written else ()


def _measure_latency(launch: Launch, task: Task, model: nn.Module, reader: SplitReader, world: World) -> float | None:
    """Return rank 0's latency; None for a model in shards, which nothing serves as it lies here."""
    if _is_sharded(launch, world):
        return None
    own = measure_latency_ms(task, model, reader, world.device) if world.is_first else None
    latency_ms: float | None = world.broadcast_object(own)
    return latency_ms


def _is_sharded(launch: Launch, world: World) -> bool:
    training = launch.spec.training
    return world.size > 1 and training is not None and training.strategy in SHARDED


def _load_model(launch: Launch, folder: Path, task: Task, world: World) -> nn.Module:
    """Return the model with the checkpoint's weights on the device; in shards where it was trained in shards."""
    load_artifacts(task, folder)
    if _is_sharded(launch, world):
        from trainbus.trainer.strategies.fsdp2 import shard_model

        find_weights = partial(checkpoint.find_weights, folder, averaged=True, require=find_ranges(launch, world.rank))
        return shard_model(task, build_deferred(task.model), world, find_weights, reshard_after_forward=True)
    model = task.model()
    checkpoint.load_model(folder, model, averaged=True)
    return model.to(world.device)


def _summarize(task: Task, path: Path, score: ScoredMetric) -> dict[str, float]:
    """Return what is computed from all predictions at once; and write the scores that need all of them."""
    predictions = Predictions(path)
    # Text for metadata need not be in memory for this, unless the task reads it.
    has_own = type(task).summarize is not Task.summarize
    names = [
        name for name in predictions.columns if has_own or name not in predictions.slice_columns or name == "query"
    ]
    names += [name for name in ("tokens", "correct") if name in predictions.columns and name not in names]
    columns = {name: _to_numpy(predictions.table([name])[name]) for name in names if has_own or name != ID}
    kind = task.kind or ""
    if not score.name and (found := score_rows(kind, columns, score.metric)) is not None:
        _write_scores(path, *found)
    elif not score.name and kind == "classification":
        _write_scores(path, "accuracy", None)
    metrics = compute_kind_metrics(kind, columns)
    own = task.summarize(columns) if has_own else {}
    if not all(isinstance(value, int | float | np.floating | np.integer) for value in own.values()):
        raise TaskError(f"{type(task).__name__}.summarize() must return numbers by name, not {own!r}")
    return metrics | {name: float(value) for name, value in own.items()}


def _to_numpy(column: Any) -> Any:
    if column.num_chunks == 0 or not pa.types.is_list(column.type):
        return column.to_numpy()
    flat = np.concatenate([each.values.to_numpy(zero_copy_only=False) for each in column.chunks])
    if flat.size % len(column):
        raise PredictionsError(f"column {PROBABILITIES!r} must have as many values in each row")
    return flat.reshape(len(column), -1)


def _write_scores(path: Path, name: str, scores: Any) -> None:
    """Write the file anew with these scores, or with those that it has, and what they are of."""
    source = Predictions(path)
    start = 0
    with PredictionsWriter(path, source.info.model_copy(update={"score_of": name})) as writer:
        for batch in source.batches():
            table = pa.Table.from_batches([batch])
            if scores is not None:
                part = pa.array(scores[start : start + len(batch)], pa.float64())
                table = table.set_column(table.column_names.index(SCORE), SCORE, part)
            writer.write({column: table[column] for column in table.column_names})
            start += len(batch)


class ScoredMetric:
    """The metric that scores are of, where the task measures it for each sample."""

    def __init__(self, metric: str, mode: str) -> None:
        self.metric, self._sign = metric, 1.0 if mode == "max" else -1.0
        #: '' until a chunk has it.
        self.name = ""

    def of_chunk(self, columns: dict[str, Any], chunk: MeasuredChunk) -> dict[str, Any]:
        """Return the scores of a chunk's samples; nothing where they follow from its predictions."""
        bare = self.metric.rpartition("/")[2]
        value = chunk.metrics.get(bare)
        if SCORE in columns:
            self.name = SCORE
            return {}
        if not isinstance(value, Tensor) or value.shape != (chunk.samples.samples,):
            # Rows without target and prediction get their scores when all are there.
            return {} if TARGET in columns else {SCORE: np.zeros(len(columns[ID]))}
        self.name = bare
        return {SCORE: self._sign * value.detach().double().cpu().numpy()}


class RankRows:
    """The rows that this rank predicts, on disk until all ranks' are put together."""

    def __init__(self, folder: Path, world: World) -> None:
        self._world = world
        self._path = folder / f".predictions-{world.rank}.arrow"
        self._received = folder / ".predictions-received.arrow"
        self._writer: Any = None

    def append(self, columns: dict[str, Any]) -> None:
        """Add the rows of a chunk."""
        try:
            batch = pa.RecordBatch.from_pydict({name: _to_arrow(values) for name, values in columns.items()})
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise PredictionsError(str(error)) from error
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self._path), batch.schema)
        try:
            self._writer.write_batch(batch)
        except pa.ArrowException as error:
            raise PredictionsError(f"every batch must give the same columns and types: {error}") from error

    def write_all(self, path: Path, info: PredictionsInfo) -> bool:
        """Write all ranks' rows in the order of the ranks; every rank calls it. Return whether there are any."""
        if self._writer is not None:
            self._writer.close()
        try:
            # Rank 0 has the first samples, so it has rows where any rank has.
            has_rows: bool = self._world.broadcast_object(self._writer is not None)
            if has_rows:
                with self._world.confirmed():
                    self._write(path, info)
        finally:
            self._path.unlink(missing_ok=True)
            if self._world.is_first:
                self._received.unlink(missing_ok=True)
        return has_rows

    def _write(self, path: Path, info: PredictionsInfo) -> None:
        if not self._world.is_first:
            pieces = _read_pieces(self._path) if self._writer is not None else iter(())
            self._world.send_bytes(pieces)
            return
        with PredictionsWriter(path, info) as writer:
            _copy_rows(self._path, writer)
            for rank in range(1, self._world.size):
                with self._received.open("wb") as file:
                    for piece in self._world.receive_bytes(rank):
                        file.write(piece)
                if self._received.stat().st_size:
                    _copy_rows(self._received, writer)


def _to_arrow(values: Any) -> Any:
    if not (isinstance(values, np.ndarray) and values.ndim == 2):
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def _copy_rows(source: Path, writer: PredictionsWriter) -> None:
    with pa.ipc.open_file(str(source)) as file:
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            writer.write({name: batch.column(name) for name in batch.schema.names})


def _read_pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        read: Callable[[], bytes] = lambda: file.read(PIECE_BYTES)  # noqa: E731
        yield from iter(read, b"")
