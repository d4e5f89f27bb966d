"""The options of a submission. Imported for every help text, so it imports no contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from annotated_types import Ge, Le


class SubmitOptions(TypedDict, total=False):
    """How a run is submitted. None means not given; what is given overrides the request.

    The one place that lists these options: both clients take them, and ``trainbus submit`` makes its flags of them.
    """

    command: Annotated[
        str | Sequence[str] | None, "Run this in the project instead of a Task, for example 'python train.py'."
    ]
    request: Annotated[Path | Mapping[str, Any] | None, "Body of a train.requested (JSON); options override it."]
    name: Annotated[str | None, "Its name; default: the folder's."]
    slots: Annotated[int | str | None, "Slots it can use: 2, or 1..4."]
    epochs: Annotated[int | None, Ge(1), "Passes over the data; default: 1."]
    max_steps: Annotated[int | None, Ge(1), "Steps after which training ends."]
    logical_ranks: Annotated[
        int | None, Ge(1), "Exact mode: the same bits on any number of processes up to this; 12 divides well."
    ]
    data: Annotated[
        str | Mapping[str, str] | None,
        "s3://bucket/prefix or (embedded) a folder to ingest, or a dataset id; NAME=SOURCE, repeatable, for a command.",
    ]
    data_format: Annotated[
        str | None, "images, jsonl, csv, parquet, text, tokens, binary, webdataset or mds; default: by the files."
    ]
    label_field: Annotated[str | None, "The field or column that is the sample's label."]
    priority: Annotated[int | None, Ge(-1000), Le(1000), "Higher goes first."]
    model: Annotated[str | None, "The registered model that the result competes for."]
    evaluate: Annotated[
        str | None, "Measure the result on the test split and gate its promotion by this: test/accuracy, test/loss:min."
    ]
    evaluate_command: Annotated[
        str | Sequence[str] | None, "What measures a script's checkpoint, for example 'python evaluate.py'."
    ]
    evaluate_checkpoint: Annotated[
        str | None, "Which checkpoint is measured: best (default where one was validated) or final."
    ]
    evaluate_slots: Annotated[
        int | str | None, "Slots of the evaluation; default: 1, or training's for sharded models."
    ]
    retention_metric: Annotated[
        str | None,
        "The metric that makes a checkpoint the best: it is kept and is RUN@best. validation/accuracy, loss:min.",
    ]
    torch: Annotated[
        str | None,
        "node: run with the torch of the node, also if the project asks for another (default). project: its own.",
    ]
    experiment: Annotated[str | None, "The experiment in MLflow."]
    team: Annotated[str | None, "The team whose quota counts, for example research/vision."]
    env: Annotated[Mapping[str, str] | None, "KEY=VALUE in the environment of every rank; repeatable."]
    metric_patterns: Annotated[
        Mapping[str, str] | None,
        "NAME=REGEX: a metric of a command's output, its value in a group: 'loss=loss ([0-9.]+)'; repeatable.",
    ]
    init_from: Annotated[
        str | None,
        "Start with a checkpoint's weights, or a script's files: RUN, RUN@best, RUN@STEP, models:/NAME@champion, s3://.",
    ]
    init_exclude: Annotated[
        Sequence[str] | None, "Tensors to initialise afresh instead, for example 'head.*'; repeatable."
    ]
    params: Annotated[Mapping[str, Any] | None, "key=value for the Task; repeatable."]
    check: Annotated[bool | None, "Import the Task and decode a sample before the upload; default: yes."]
    event_id: Annotated[str | None, "Event id: the same id is the same run, however often sent."]
