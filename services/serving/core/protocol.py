"""The Open Inference Protocol, version 2: requests to samples, outputs to responses; JSON and the binary extension.

The inputs of a table are its columns, ``[n]`` or ``[n, 1]`` each. A file of a sample is a BYTES input; within JSON,
which holds no bytes, it is base64. With the binary extension a request is JSON of as many bytes as the header
``Inference-Header-Content-Length`` says, and the data of the tensors follows; a response likewise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from contracts.model_process import BYTES, ELEMENT_BYTES, Tensor, unpack_bytes
from services.serving.core.problems import InputProblem, RequestRefused, suggest
from services.serving.core.rows import numpy_code, rows_to_samples, to_values
from services.serving.core.signature import Signature

HEADER_LENGTH = "Inference-Header-Content-Length"
_NUMBERS = (int, float)
DATATYPES = (*ELEMENT_BYTES, BYTES)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request: its samples, and which outputs it asks for in which form."""

    samples: list[dict[str, bytes]]
    id: str = ""
    #: Names of the outputs; empty: all.
    outputs: tuple[str, ...] = ()
    #: Those of them that are sent as bytes behind the JSON.
    binary: frozenset[str] = frozenset()
    all_binary: bool = False

    def is_binary(self, name: str) -> bool:
        return name in self.binary or (self.all_binary and name not in self.outputs)


def parse_infer(body: bytes, header_length: str | None, signature: Signature) -> InferRequest:
    """Return a request.

    Raises:
        RequestRefused: it is no request of the protocol, or its inputs do not fit the model.
    """
    header, binary = _split_body(body, header_length)
    try:
        content = from_json(header)
    except ValueError as error:
        raise RequestRefused.of("", f"the body is no JSON: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("inputs"), list) or not content["inputs"]:
        raise RequestRefused.of("inputs", "must be a list of at least one tensor: name, shape, datatype, data")
    columns, start = {}, 0
    for number, each in enumerate(content["inputs"]):
        name, values, start = _parse_input(number, each, binary, start, signature)
        columns[name] = values
    if start != len(binary):
        raise RequestRefused.of("", f"{len(binary) - start} bytes follow the last input: check binary_data_size")
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        each_size = ", ".join(f"{name!r} has {size}" for name, size in sizes.items())
        raise RequestRefused.of("inputs", f"all inputs must have equally many rows: {each_size}")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not rows:
        raise RequestRefused.of("inputs", "there are no rows: the first dimension is 0")
    samples = _to_samples(rows, signature)
    return _with_outputs(content, samples, signature)


def _split_body(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    if header_length is None:
        return body, b""
    if not header_length.isdecimal() or len(header_length) > 18 or int(header_length) > len(body):
        raise RequestRefused.of(HEADER_LENGTH, f"must be the bytes of the JSON, at most {len(body)}")
    return body[: int(header_length)], body[int(header_length) :]


def _parse_input(
    number: int, tensor: Any, binary: bytes, start: int, signature: Signature
) -> tuple[str, list[Any], int]:
    """Return an input's name, its value for each row, and where its bytes end."""
    if not isinstance(tensor, Mapping) or not isinstance(tensor.get("name"), str):
        raise RequestRefused.of(f"inputs.{number}", "must be an object with a name")
    name = tensor["name"]
    field = f"inputs.{name}"
    if signature.inputs and signature.find_input(name) is None:
        text = f"there is no input {name!r}: {suggest(name, signature.input_names)}"
        raise RequestRefused.of(f"{field}.name", text)
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if not isinstance(shape, list) or not shape or any(type(size) is not int or size < 0 for size in shape):
        raise RequestRefused.of(f"{field}.shape", "must be a list of sizes, the first of which is the number of rows")
    if datatype not in DATATYPES:
        raise RequestRefused.of(f"{field}.datatype", f"must be one of {', '.join(DATATYPES)}, not {datatype!r}")
    _check_datatype(field, name, datatype, signature)
    parameters = tensor.get("parameters") if isinstance(tensor.get("parameters"), Mapping) else {}
    size = parameters.get("binary_data_size") if parameters else None
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(binary) - start:
            text = f"is {size!r}, and {len(binary) - start} bytes are left of the body"
            raise RequestRefused.of(f"{field}.parameters.binary_data_size", text)
        flat = _read_binary(field, datatype, binary[start : start + size], math.prod(shape))
        return name, _reshape(flat, shape), start + size
    if "data" not in tensor:
        raise RequestRefused.of(f"{field}.data", "is missing, and there is no binary_data_size either")
    flat = _flatten(tensor["data"])
    if len(flat) != math.prod(shape):
        text = f"has {len(flat)} elements, and the shape {shape} has {math.prod(shape)}"
        raise RequestRefused.of(f"{field}.data", text)
    _check_elements(field, datatype, flat)
    return name, _reshape(flat, shape), start


def _check_datatype(field: str, name: str, datatype: str, signature: Signature) -> None:
    spec = signature.find_input(name)
    if spec is None or (spec.datatype == BYTES) == (datatype == BYTES):
        return
    raise RequestRefused.of(f"{field}.datatype", f"is {datatype}, and the model takes {spec.datatype}")


def _check_elements(field: str, datatype: str, flat: Sequence[Any]) -> None:
    kinds, what = {BYTES: ((str,), "texts"), "BOOL": ((bool,), "true or false")}.get(datatype, (_NUMBERS, "numbers"))
    wrong = next((number for number, each in enumerate(flat) if type(each) not in kinds), None)
    if wrong is not None:
        raise RequestRefused.of(f"{field}.data.{wrong}", f"{flat[wrong]!r}: elements of {datatype} must be {what}")


def _read_binary(field: str, datatype: str, data: bytes, count: int) -> list[Any]:
    if datatype == BYTES:
        try:
            flat: list[Any] = unpack_bytes(data)
        except ValueError as error:
            raise RequestRefused.of(f"{field}.parameters.binary_data_size", str(error)) from error
    else:
        import numpy as np

        if len(data) != count * ELEMENT_BYTES[datatype]:
            text = f"is {len(data)}, and {count} elements of {datatype} have {count * ELEMENT_BYTES[datatype]}"
            raise RequestRefused.of(f"{field}.parameters.binary_data_size", text)
        flat = np.frombuffer(data, numpy_code(datatype)).tolist()
    if len(flat) != count:
        raise RequestRefused.of(f"{field}.shape", f"has {count} elements, and the data has {len(flat)}")
    return flat


def _flatten(data: Any) -> list[Any]:
    flat = data if isinstance(data, list) else [data]
    while any(isinstance(each, list) for each in flat):
        flat = [element for each in flat for element in (each if isinstance(each, list) else [each])]
    return flat


def _reshape(flat: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return one value a row; a row of one element is that element."""
    inner = list(shape[1:])
    while inner and inner[-1] == 1:
        inner.pop()
    for size in reversed(inner):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)] if size else [[]] * shape[0]
    return flat


def _to_samples(rows: list[dict[str, Any]], signature: Signature) -> list[dict[str, bytes]]:
    files_of_bytes = any(isinstance(value, bytes) for value in rows[0].values())
    if signature.is_table is False or (signature.is_table is None and files_of_bytes):
        samples = []
        for number, row in enumerate(rows):
            if all(isinstance(value, bytes) for value in row.values()):
                samples.append(dict(row))
            else:
                samples += _decode_files(number, row, signature)
        return samples
    decoded = []
    for number, row in enumerate(rows):
        try:
            decoded.append({key: value.decode() if isinstance(value, bytes) else value for key, value in row.items()})
        except UnicodeDecodeError as error:
            raise RequestRefused.of("inputs", f"row {number} has a text that is no UTF-8") from error
    return _rename(rows_to_samples, decoded, signature)


def _decode_files(number: int, row: dict[str, Any], signature: Signature) -> list[dict[str, bytes]]:
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    if len(texts) != len([value for value in row.values() if not isinstance(value, bytes)]):
        raise RequestRefused.of("inputs", f"row {number}: a file must be one element of BYTES")
    found = _rename(rows_to_samples, [texts], signature)[0]
    return [{**found, **{name: value for name, value in row.items() if isinstance(value, bytes)}}]


def _rename(convert: Any, rows: list[dict[str, Any]], signature: Signature) -> list[dict[str, bytes]]:
    """Convert rows; name the fields of a problem as the protocol does: ``inputs.age.data.3``."""
    try:
        return convert(rows, signature)  # type: ignore[no-any-return]
    except RequestRefused as refusal:
        problems = []
        for each in refusal.problems:
            _, number, name = [*each.field.split(".", 2), "", ""][:3]
            problems.append(InputProblem(f"inputs.{name}.data.{number}" if name else "inputs", each.text))
        raise RequestRefused(problems) from refusal


def _with_outputs(content: Mapping[str, Any], samples: list[dict[str, bytes]], signature: Signature) -> InferRequest:
    wanted = content.get("outputs") or []
    parameters = content.get("parameters") or {}
    if not isinstance(wanted, list) or not isinstance(parameters, Mapping):
        raise RequestRefused.of("outputs", "must be a list of outputs by name")
    known = [each.name for each in signature.outputs]
    names, binary = [], []
    for number, each in enumerate(wanted):
        name = each.get("name") if isinstance(each, Mapping) else None
        if not isinstance(name, str) or (known and name not in known):
            text = f"there is no output {name!r}: the model gives {', '.join(map(repr, known))}"
            raise RequestRefused.of(f"outputs.{number}.name", text)
        names.append(name)
        if (each.get("parameters") or {}).get("binary_data"):
            binary.append(name)
    request_id = content.get("id") or ""
    return InferRequest(
        samples, str(request_id), tuple(names), frozenset(binary), bool(parameters.get("binary_data_output"))
    )


def encode_response(
    model: str, version: int, request: InferRequest, outputs: Sequence[Tensor]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the bytes of its JSON where data follows it."""
    chosen = [each for each in outputs if not request.outputs or each.name in request.outputs]
    tensors: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for each in chosen:
        tensor: dict[str, Any] = {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
        if request.is_binary(each.name):
            tensor["parameters"] = {"binary_data_size": len(each.data)}
            binary.append(each.data)
        else:
            tensor["data"] = _flatten(to_values(each))
        tensors.append(tensor)
    content: dict[str, Any] = {"model_name": model, "model_version": str(version), "outputs": tensors}
    if request.id:
        content["id"] = request.id
    header = json.dumps(content, separators=(",", ":")).encode()
    return (header + b"".join(binary), len(header)) if binary else (header, None)


def describe_model(model: str, versions: Sequence[int], signature: Signature) -> dict[str, Any]:
    """Return the metadata of a model."""
    return {
        "name": model,
        "versions": [str(each) for each in versions],
        "platform": "trainbus",
        "inputs": [each.to_plain() for each in signature.inputs],
        "outputs": [each.to_plain() for each in signature.outputs],
    }
