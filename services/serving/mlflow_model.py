"""What an MLflow model's own files say of it: its signature, and the input example that was saved with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from contracts.model_process import Sample
from services.kit.kept_model import MLMODEL
from services.serving.core.mlflow_signature import example_rows, parse_signature
from services.serving.core.signature import ROW_FIELD, Signature, infer_inputs

#: Rows of an input example that are used.
MAX_EXAMPLE_ROWS = 32


def read_mlflow_model(folder: Path) -> tuple[Signature, list[Sample]]:
    """Return the signature of an MLflow model and its input example, as samples; [] where it has none that is a table.

    Without a signature the inputs are the columns of the example; without either they are not known.
    """
    description = _read_yaml(folder / MLMODEL)
    signature = parse_signature(description.get("signature"))
    samples = _read_example(folder, description.get("saved_input_example_info"))
    if not samples:
        return signature, []
    inferred = infer_inputs(samples)
    return replace(signature, inputs=signature.inputs or inferred.inputs, example=inferred.example), samples


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _read_example(folder: Path, info: Any) -> list[Sample]:
    if not isinstance(info, Mapping) or not isinstance(info.get("artifact_path"), str):
        return []
    try:
        content = json.loads((folder / info["artifact_path"]).read_bytes())
    except (OSError, ValueError):
        return []
    return [{ROW_FIELD: json.dumps(row).encode()} for row in example_rows(content)[:MAX_EXAMPLE_ROWS]]
