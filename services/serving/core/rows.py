"""POST /predict: rows of JSON to samples, outputs to rows of JSON."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.model_process import BYTES, ELEMENT_BYTES, Sample, Tensor, unpack_bytes
from services.serving.core.problems import InputProblem, RequestRefused, suggest
from services.serving.core.signature import LABEL_FIELD, ROW_FIELD, Signature, TensorSpec

#: Where a list of rows may stand in the body.
ROW_KEYS = ("rows", "instances", "inputs")
_NUMPY_CODES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_FLOATS = frozenset({"FP16", "FP32", "FP64"})
_MAX_PROBLEMS = 20


def find_rows(body: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a body: ``{"rows": [...]}``, a list of rows, or one row.

    Raises:
        RequestRefused: there are none, or one is no object.
    """
    rows = body
    if isinstance(body, Mapping):
        key = next((key for key in ROW_KEYS if isinstance(body.get(key), list) and len(body) == 1), None)
        rows = body[key] if key is not None else [body]
    if not isinstance(rows, list):
        raise RequestRefused.of("", 'the body must be one row, a list of rows, or {"rows": [...]}')
    if not rows:
        raise RequestRefused.of("rows", "there are no rows: send at least one")
    wrong = [number for number, row in enumerate(rows) if not isinstance(row, Mapping)]
    if wrong:
        raise RequestRefused.of(f"rows.{wrong[0]}", "a row must be an object with one value a field")
    return rows


def rows_to_samples(rows: Sequence[Mapping[str, Any]], signature: Signature) -> list[dict[str, bytes]]:
    """Return each row as a sample that ``Task.decode`` takes.

    Raises:
        RequestRefused: a field is unknown or has a wrong type.
    """
    problems: list[InputProblem] = []
    samples = []
    for number, row in enumerate(rows):
        found = len(problems)
        is_table = signature.is_table
        if is_table is None:  # without samples of the dataset: texts are files if they are base64, columns otherwise
            is_table = not all(isinstance(value, str) and _decode_base64(value) is not None for value in row.values())
        for name, value in row.items():
            if name in signature.labels:
                continue
            spec = signature.find_input(name)
            if spec is None and signature.inputs:
                text = f"there is no field {name!r}: {suggest(name, signature.input_names)}"
                problems.append(InputProblem(f"rows.{number}.{name}", text))
            elif (spec is not None) and (text := _find_type_problem(spec, value, is_table=is_table)):
                problems.append(InputProblem(f"rows.{number}.{name}", text))
        if len(problems) >= _MAX_PROBLEMS:
            break
        if len(problems) == found:
            own = {name: value for name, value in row.items() if name not in signature.labels}
            samples.append(_to_sample(own, is_table=is_table))
    if problems:
        raise RequestRefused(problems)
    return samples


def samples_to_rows(samples: Sequence[Sample], signature: Signature) -> list[dict[str, Any]]:
    """Return each sample of a dataset as the row by which a client would ask about it."""
    if signature.is_table is False:
        return [
            {name: base64.b64encode(content).decode() for name, content in sample.items() if name != LABEL_FIELD}
            for sample in samples
        ]
    rows = [json.loads(sample[ROW_FIELD]) for sample in samples]
    names = set(signature.input_names)
    return [{name: value for name, value in row.items() if not names or name in names} for row in rows]


def _to_sample(row: Mapping[str, Any], *, is_table: bool) -> dict[str, bytes]:
    if is_table:
        return {ROW_FIELD: json.dumps(row).encode()}
    return {name: _decode_base64(value) or b"" for name, value in row.items()}


def _find_type_problem(spec: TensorSpec, value: Any, *, is_table: bool) -> str:
    """Return what is wrong with a value, '' if it is right."""
    if not is_table:
        if not isinstance(value, str):
            return f"must be a text: the bytes of the {spec.name} file in base64, not {_describe(value)}"
        return "" if _decode_base64(value) is not None else f"is not base64: send the bytes of the {spec.name} file so"
    if value is None:
        return ""
    if len(spec.shape) > 1:
        if not isinstance(value, list):
            return f"must be a list, not {_describe(value)}"
        if spec.shape[1] != len(value) and spec.shape[1] >= 0:
            return f"must have {spec.shape[1]} elements, not {len(value)}"
        inner = TensorSpec(spec.name, spec.datatype, spec.shape[1:])
        return next((text for each in value if (text := _find_type_problem(inner, each, is_table=True))), "")
    if spec.datatype == "BOOL":
        return "" if isinstance(value, bool) else f"must be true or false, not {_describe(value)}"
    if spec.datatype in ELEMENT_BYTES:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"must be a number, not {_describe(value)}"
        if spec.datatype not in _FLOATS and not float(value).is_integer():
            return f"must be a whole number, not {value}"
        return "" if math.isfinite(value) else "must be finite"
    return ""


def _describe(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return f"the number {value}"
    return "a list" if isinstance(value, list) else "an object"


def _decode_base64(text: str) -> bytes | None:
    """Return what a text in base64, or a data URL with it, holds; None if it is neither."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def to_values(tensor: Tensor) -> list[Any]:
    """Return a tensor as JSON: one value, or list of values, a row. Bytes that are no UTF-8 become base64."""
    if tensor.datatype == BYTES:
        flat = [_to_text(each) for each in unpack_bytes(tensor.data)]
        return _nest(flat, tensor.shape)
    import numpy as np

    array = np.frombuffer(tensor.data, _NUMPY_CODES[tensor.datatype]).reshape(tensor.shape)
    if tensor.datatype in _FLOATS and not np.isfinite(array).all():
        # JSON has no NaN.
        return _without_nan(array.tolist())  # type: ignore[no-any-return]
    return array.tolist()  # type: ignore[no-any-return]


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value if math.isfinite(value) else None


def _nest(flat: list[Any], shape: Sequence[int]) -> list[Any]:
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]
    return flat


def _to_text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return base64.b64encode(content).decode()


def outputs_to_rows(outputs: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return one object a row."""
    columns = {each.name: to_values(each) for each in outputs}
    count = outputs[0].rows if outputs else 0
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def numpy_code(datatype: str) -> str:
    """Return the numpy type code of a datatype, little-endian."""
    return _NUMPY_CODES[datatype]
