"""The Open Inference Protocol: with the clients that people have, and request by request."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.model_process import Tensor, pack_bytes
from loadtest.served_models import draw_rows, label
from services.serving.core.problems import RequestRefused
from services.serving.core.protocol import encode_response, parse_infer
from services.serving.core.signature import Signature, TensorSpec, infer_inputs
from tests.serving.conftest import House

TABLE = Signature((TensorSpec("age", "FP64"), TensorSpec("city", "BYTES")), (TensorSpec("p", "INT64"),), is_table=True)
ROWS = draw_rows(3, seed=5)
LABELS = [label(row) for row in ROWS]
PICTURES = Signature((TensorSpec("png", "BYTES"),), is_table=False)


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def rows_of(samples: list[dict[str, bytes]]) -> list[Any]:
    return [json.loads(sample["json"]) for sample in samples]


def test_columns_become_rows() -> None:
    request = parse_infer(
        body(tensor("age", "FP32", [1.5, 2.0], [2, 1]), tensor("city", "BYTES", ["Oslo", "Rome"])), None, TABLE
    )
    assert rows_of(request.samples) == [{"age": 1.5, "city": "Oslo"}, {"age": 2.0, "city": "Rome"}]


def test_binary_tensors_follow_the_json() -> None:
    data = np.array([1.5, 2.0], "<f8").tobytes()
    names = pack_bytes([b"Oslo", b"Rome"])
    header = json.dumps(
        {
            "inputs": [
                {"name": "age", "datatype": "FP64", "shape": [2], "parameters": {"binary_data_size": len(data)}},
                {"name": "city", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(names)}},
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    request = parse_infer(header + data + names, str(len(header)), TABLE)
    assert rows_of(request.samples)[1] == {"age": 2.0, "city": "Rome"}
    content, size = encode_response("m", 3, request, [Tensor("p", "INT64", (1,), (7).to_bytes(8, "little"))])
    assert content[size:] == (7).to_bytes(8, "little")
    assert json.loads(content[:size])["outputs"][0]["parameters"] == {"binary_data_size": 8}


def test_a_file_is_base64_in_json_and_bytes_behind_it() -> None:
    assert parse_infer(body(tensor("png", "BYTES", ["aGk="])), None, PICTURES).samples == [{"png": b"hi"}]
    data = pack_bytes([b"hi"])
    each = {"name": "png", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [each]}).encode()
    assert parse_infer(header + data, str(len(header)), PICTURES).samples == [{"png": b"hi"}]


@pytest.mark.parametrize(
    ("content", "field", "text"),
    [
        (b"{", "", "no JSON"),
        (b"[" * 100_000, "", "no JSON"),
        (b"{}", "inputs", "at least one tensor"),
        (body(tensor("agee", "FP32", [1.0])), "inputs.agee.name", "did you mean 'age'?"),
        (body(tensor("age", "FP31", [1.0])), "inputs.age.datatype", "must be one of"),
        (body(tensor("age", "BYTES", ["x"])), "inputs.age.datatype", "the model takes FP64"),
        (body(tensor("age", "FP32", [1.0], [2])), "inputs.age.data", "has 1 elements, and the shape [2] has 2"),
        (body(tensor("age", "FP32", ["x"])), "inputs.age.data.0", "must be numbers"),
        (body(tensor("age", "FP32", [1.0]), tensor("city", "BYTES", ["a", "b"])), "inputs", "equally many rows"),
        (body(tensor("age", "FP32", [1.0]), outputs=[{"name": "q"}]), "outputs.0.name", "the model gives 'p'"),
    ],
)
def test_bad_requests_are_explained(content: bytes, field: str, text: str) -> None:
    with pytest.raises(RequestRefused) as raised:
        parse_infer(content, None, TABLE)
    assert raised.value.problems[0].field == field
    assert text in raised.value.problems[0].text


@pytest.mark.parametrize("length", ["", "-1", "3", "²", "9" * 5000])
def test_a_length_that_is_none_is_refused(length: str) -> None:
    with pytest.raises(RequestRefused, match="at most 2"):
        parse_infer(b"{}", length, TABLE)


def test_the_inputs_of_samples() -> None:
    rows = [{"n": 1, "x": 0.5, "s": "a", "b": True, "v": [1, 2]}, {"n": 2, "x": 1, "s": None, "b": False, "v": [3, 4]}]
    found = infer_inputs([{"json": json.dumps(row).encode(), "cls": b"1"} for row in rows])
    assert {each.name: (each.datatype, each.shape) for each in found.inputs} == {
        "n": ("INT64", (-1,)),
        "x": ("FP64", (-1,)),
        "s": ("BYTES", (-1,)),
        "b": ("BOOL", (-1,)),
        "v": ("INT64", (-1, 2)),
    }
    assert infer_inputs([{"png": b"", "cls": b"1"}]).input_names == ("png",)


#: Each prints what the client says of the model "sums", and what it answers to its arguments: a port and rows.
TRITON_CLIENT = """
import json, sys
import numpy as np
import tritonclient.http as http

port, rows = sys.argv[1], json.loads(sys.argv[2])
client = http.InferenceServerClient(f"127.0.0.1:{port}")
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("sums", "1")
found = {"inputs": [each["name"] for each in client.get_model_metadata("sums")["inputs"]], "predictions": []}
for is_binary in (True, False):
    inputs = []
    for name in "abcd":
        each = http.InferInput(name, [len(rows)], "FP64")
        each.set_data_from_numpy(np.array([row[name] for row in rows]), binary_data=is_binary)
        inputs.append(each)
    result = client.infer("sums", inputs, request_id="r7")
    assert result.get_response()["id"] == "r7"
    found["predictions"].append(result.as_numpy("prediction").tolist())
print(json.dumps(found))
"""
KSERVE_CLIENT = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

port, rows = sys.argv[1], json.loads(sys.argv[2])
url = f"http://127.0.0.1:{port}"


async def main():
    client, first = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceRESTClient()
    assert await client.is_server_live(url) and await client.is_server_ready(url)
    assert await client.is_model_ready(url, "sums") and await first.is_model_ready(url, "sums")
    found = {"predictions": []}
    for is_binary in (True, False):
        inputs = []
        for name in "abcd":
            each = InferInput(name, [len(rows)], "FP64")
            each.set_data_from_numpy(np.array([row[name] for row in rows]), binary_data=is_binary)
            inputs.append(each)
        request = InferRequest("sums", inputs, request_id="r7", parameters={"binary_data_output": is_binary})
        headers = {}
        result = await client.infer(url, request, model_name="sums", response_headers=headers)
        assert (result.id, headers["trainbus-version"]) == ("r7", "1")  # the client reads no version of a body
        (output,) = [each for each in result.outputs if each.name == "prediction"]
        found["predictions"].append(output.as_numpy().tolist())
    instances = await first.infer(url, {"instances": rows}, model_name="sums")
    found["predictions"].append([each["prediction"] for each in instances["predictions"]])
    print(json.dumps(found))


asyncio.run(main())
"""


async def ask_with(client: str, house: House) -> dict[str, Any]:
    """Return what a script with a client of other people has found."""
    python = Path(sys.prefix) / "inference" / "bin" / "python"
    assert python.exists(), "the clients of KServe and Triton are not installed: make inference"
    await house.deploy("good")
    command = [str(python), "-c", client, str(house.service.serving_port), json.dumps(ROWS)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.needs("inference")
async def test_tritons_client_works(house: House) -> None:
    found = await ask_with(TRITON_CLIENT, house)
    assert found["inputs"] == ["a", "b", "c", "d"]
    assert found["predictions"] == [LABELS] * 2


@pytest.mark.needs("inference")
async def test_kserves_client_works(house: House) -> None:
    found = await ask_with(KSERVE_CLIENT, house)
    assert found["predictions"] == [LABELS] * 3
