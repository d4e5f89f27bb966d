"""The signature of an MLflow model, as its MLmodel has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.model_process import BYTES, UNNAMED_INPUT
from services.serving.core.golden import PREDICTION
from services.serving.core.signature import ANY, Signature, TensorSpec

#: Types of columns in MLflow. Times are texts, bytes are base64, and structures are what JSON makes of them.
COLUMN_DATATYPES: Mapping[str, str] = {
    "boolean": "BOOL",
    "integer": "INT32",
    "long": "INT64",
    "float": "FP32",
    "double": "FP64",
}
#: Types of tensors, by numpy's names.
TENSOR_DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}


def parse_signature(signature: Mapping[str, Any] | None) -> Signature:
    """Return the signature of an MLmodel; without inputs where it has none, or one that cannot be read.

    ``signature``: ``inputs`` and ``outputs`` as JSON, as the MLmodel has them.
    """
    if not isinstance(signature, Mapping):
        return Signature(is_table=True)
    return Signature(
        _parse_specs(signature.get("inputs"), UNNAMED_INPUT),
        _parse_specs(signature.get("outputs"), PREDICTION),
        is_table=True,
    )


def _parse_specs(text: Any, unnamed: str) -> tuple[TensorSpec, ...]:
    try:
        specs = json.loads(text)
        named = [each for each in specs if isinstance(each, Mapping)]
        return tuple(_parse_spec(each, _name(each, number, len(named), unnamed)) for number, each in enumerate(named))
    except (TypeError, ValueError, KeyError):
        return ()


def _name(spec: Mapping[str, Any], number: int, count: int, unnamed: str) -> str:
    return str(spec.get("name") or (unnamed if count == 1 else f"{unnamed}-{number}"))


def _parse_spec(spec: Mapping[str, Any], name: str) -> TensorSpec:
    if spec["type"] == "tensor":
        tensor = spec["tensor-spec"]
        return TensorSpec(name, TENSOR_DATATYPES.get(tensor["dtype"], BYTES), (ANY, *map(int, tensor["shape"][1:])))
    inner: list[int] = []
    while spec["type"] == "array":
        inner.append(ANY)
        spec = spec["items"]
    return TensorSpec(name, COLUMN_DATATYPES.get(spec["type"], BYTES), (ANY, *inner))


def example_rows(content: Any) -> Sequence[Mapping[str, Any]]:
    """Return the rows of an input example that is a table; () for any other."""
    if not isinstance(content, Mapping) or not isinstance(content.get("columns"), list):
        return ()
    names = [str(name) for name in content["columns"]]
    rows = content.get("data")
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != len(names) for row in rows):
        return ()
    return [dict(zip(names, row, strict=True)) for row in rows]
