"""What a model takes and gives: its inputs as of the samples it was evaluated on, its outputs as of its answers.

A dataset of rows (jsonl, csv, Parquet) has one input a column; any other has one input a file of the sample (``png``).
An MLflow model has the inputs of its own signature.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contracts.model_process import BYTES, Sample, Tensor

#: The file of a sample that holds a row, and the one that holds the label: an answer does not depend on it.
ROW_FIELD, LABEL_FIELD = "json", "cls"
#: A dimension of any size.
ANY = -1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of a tensor; the first dimension is the rows."""

    name: str
    datatype: str
    shape: tuple[int, ...] = (ANY,)

    def to_plain(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    #: Whether the inputs are the columns of a row; None: unknown, because no sample is there.
    is_table: bool | None = None
    #: Columns that say what is true: what a request has there is ignored.
    labels: tuple[str, ...] = ()
    #: A row as the dataset has it, for documentation.
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.inputs)

    def find_input(self, name: str) -> TensorSpec | None:
        return next((each for each in self.inputs if each.name == name), None)


def infer_inputs(samples: Sequence[Sample]) -> Signature:
    """Return the signature that these samples show; the outputs are not known yet."""
    if not samples:
        return Signature()
    rows = [row for sample in samples if (row := _read_row(sample)) is not None]
    if len(rows) == len(samples) and all(set(sample) <= {ROW_FIELD, LABEL_FIELD} for sample in samples):
        names = dict.fromkeys(name for row in rows for name in row)
        inputs = tuple(_column(name, [row[name] for row in rows if row.get(name) is not None]) for name in names)
        return Signature(inputs, is_table=True, example=rows[0])
    names = dict.fromkeys(name for sample in samples for name in sample if name != LABEL_FIELD)
    return Signature(tuple(TensorSpec(name, BYTES) for name in names), is_table=False)


def without_labels(signature: Signature, labels: Sequence[str]) -> Signature:
    """Return the signature of a model that is not given these columns."""
    inputs = tuple(each for each in signature.inputs if each.name not in labels)
    example = {name: value for name, value in signature.example.items() if name not in labels}
    return replace(signature, inputs=inputs, example=example, labels=tuple(labels))


def takes_samples(signature: Signature, samples: Sequence[Sample]) -> bool:
    """Return whether these samples are rows that have the inputs of a signature, if it has any."""
    rows = [_read_row(sample) for sample in samples]
    return all(row is not None and row.keys() >= set(signature.input_names) for row in rows)


def infer_outputs(outputs: Iterable[Tensor]) -> tuple[TensorSpec, ...]:
    """Return the specs of the outputs of an answer."""
    return tuple(TensorSpec(each.name, each.datatype, (ANY, *each.shape[1:])) for each in outputs)


def _read_row(sample: Sample) -> dict[str, Any] | None:
    try:
        row = json.loads(sample[ROW_FIELD])
    except (KeyError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def _column(name: str, values: Sequence[Any]) -> TensorSpec:
    inner: list[int] = []
    flat = list(values)
    while flat and all(isinstance(each, list) and each for each in flat):
        sizes = {len(each) for each in flat}
        inner.append(sizes.pop() if len(sizes) == 1 else ANY)
        flat = [element for each in flat for element in each]
    kinds = {type(each) for each in flat}
    if kinds == {bool}:
        datatype = "BOOL"
    elif kinds == {int}:
        datatype = "INT64"
    elif kinds and kinds <= {int, float}:
        datatype = "FP64"
    else:
        datatype = BYTES
    return TensorSpec(name, datatype, (ANY, *inner))


#: JSON Schema of one element by datatype.
ELEMENT_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "BOOL": {"type": "boolean"},
    "BYTES": {"type": "string"},
    "FP16": {"type": "number"},
    "FP32": {"type": "number"},
    "FP64": {"type": "number"},
}


def element_schema(spec: TensorSpec) -> dict[str, Any]:
    """Return the JSON Schema of one row of a tensor."""
    schema: dict[str, Any] = dict(ELEMENT_SCHEMAS.get(spec.datatype, {"type": "integer"}))
    for size in reversed(spec.shape[1:]):
        bounds = {"minItems": size, "maxItems": size} if size != ANY else {}
        schema = {"type": "array", "items": schema, **bounds}
    return schema


def row_schema(signature: Signature) -> dict[str, Any]:
    """Return the JSON Schema of a row of POST /predict."""
    properties: dict[str, Any] = {}
    for spec in signature.inputs:
        schema = element_schema(spec)
        if signature.is_table is False:
            schema = {
                "type": "string",
                "contentEncoding": "base64",
                "description": f"The bytes of the {spec.name} file",
            }
        properties[spec.name] = schema
    closed = {"additionalProperties": False} if signature.inputs else {}
    example = {"example": dict(signature.example)} if signature.example else {}
    return {"type": "object", "properties": properties, **closed, **example}


def answer_schema(signature: Signature) -> dict[str, Any]:
    """Return the JSON Schema of one prediction of POST /predict."""
    return {"type": "object", "properties": {each.name: element_schema(each) for each in signature.outputs}}
