"""Runs of kind ``evaluate``: measure a checkpoint on a split, and keep the predictions."""

from __future__ import annotations

import json
from typing import Any

from contracts.ranks import Launch
from trainbus.data.dataset import Dataset
from trainbus.data.loader import MicroBatch
from trainbus.data.reader import DatasetError
from trainbus.task import Task, TaskError
from trainbus.trainer import checkpoint
from trainbus.trainer.validation import measure_split
from trainbus.trainer.world import World

PREDICTIONS = "predictions.json"


def evaluate(launch: Launch, task: Task, dataset: Dataset, world: World) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return (metrics, artifacts) of the checkpoint in ``resume_folder``; every rank calls it.

    The metrics are named ``<split>/<name>`` and are exact means over the split. For tasks with ``predict`` rank 0
    writes ``predictions.json``: the class predicted for each sample, and the confusion matrix (row: true class).
    """
    assert launch.spec.evaluate is not None
    split = launch.spec.evaluate.split
    reader = dataset.split(split)
    if len(reader) == 0:
        raise DatasetError(f"the {split} split has no samples to evaluate on")
    if launch.resume_folder is None:
        raise checkpoint.CheckpointError("there is no checkpoint to evaluate")
    model = task.model()
    checkpoint.load_model(launch.resume_folder, model, averaged=True)
    model.to(world.device)

    rows: list[tuple[str, int, int]] = []

    def record(item: MicroBatch, batch: Any) -> None:
        answer = task.predict(model, batch)
        if answer is None:
            return
        predicted, true = answer
        if predicted.shape != (item.samples,) or true.shape != (item.samples,):
            raise TaskError(
                f"{type(task).__name__}.predict() must return two tensors of shape [{item.samples}] "
                f"(predicted and true class), not {tuple(predicted.shape)} and {tuple(true.shape)}"
            )
        rows.extend(zip(item.keys, predicted.tolist(), true.tolist(), strict=True))

    # Evaluation measures the weights themselves: in fp32, also after training in another precision.
    found = measure_split(task, model, reader, world, "fp32", on_chunk=record)
    metrics = {f"{split}/{name}": value for name, value in found.items()}
    all_rows = [row for part in world.gather_objects(rows) for row in part]
    if not all_rows:
        return metrics, ()
    path = launch.folder / PREDICTIONS
    path.write_text(json.dumps(_predictions(all_rows, split, dataset)))
    return metrics, (PREDICTIONS,)


def _predictions(rows: list[tuple[str, int, int]], split: str, dataset: Dataset) -> dict[str, Any]:
    size = max(len(dataset.classes), 1 + max(max(predicted, true) for _, predicted, true in rows))
    classes = [*dataset.classes, *(str(number) for number in range(len(dataset.classes), size))]
    confusion = [[0] * size for _ in range(size)]
    for _, predicted, true in rows:
        confusion[true][predicted] += 1
    return {
        "version": 1,
        "dataset_id": dataset.dataset_id,
        "split": split,
        "classes": classes,
        "keys": [key for key, _, _ in rows],
        "labels": [true for _, _, true in rows],
        "predictions": [predicted for _, predicted, _ in rows],
        "confusion": confusion,
    }
