"""Saved tensors are read whole or by rows, each alone; a file that is not sound is refused before anything is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.trainbus.live_bytes import LiveBytes
from trainbus.trainer.checkpoint import CheckpointError, find_weights, open_tensors
from trainbus.trainer.checkpoint.digest import DTYPES
from trainbus.trainer.checkpoint.tensor_file import open_tensor_file
from trainbus.trainer.checkpoint.weights import BATCH_BYTES, load_weights
from trainbus.trainer.optimizer_state import StateMismatch
from trainbus.trainer.readable_tensor import make_readable

SHAPES = {"matrix": (7, 3), "row": (1, 5), "vector": (9,), "scalar": (), "no rows": (0, 5), "no columns": (4, 0)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(bits(ours), bits(theirs))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (size_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_rows_of_every_type_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    """From a file and from memory: what is read is a new tensor with the saved bits."""
    torch.manual_seed(0)
    saved = {name: random_tensor(shape, dtype) for name, shape in SHAPES.items()}
    # Another type before and after them, so that they begin at odd places.
    save_file({"byte": torch.ones(3, dtype=torch.uint8), **saved}, tmp_path / "x.safetensors")
    for found in (open_tensor_file(tmp_path / "x.safetensors"), make_readable(saved)):
        for name, tensor in saved.items():
            assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
            assert_same(found[name].read(), tensor)
            rows = tensor.shape[0] if tensor.shape else 0
            for start in range(rows + 1 if tensor.shape else 0):
                for stop in range(start, rows + 1):
                    assert_same(found[name].read_rows(start, stop), tensor[start:stop])
            found[name].read().reshape(-1).view(torch.uint8).zero_()
            assert_same(found[name].read(), tensor)


def test_only_the_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(100, 8), "b": torch.ones(100, 8)}, tmp_path / "model-0.safetensors")
    read: list[tuple[int, int]] = []
    plain = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        # As the kernel may: fewer bytes than were asked for.
        size_bytes = plain(fd, [buffers[0][:1000]], offset)
        read.append((offset, size_bytes))
        return size_bytes

    monkeypatch.setattr(os, "preadv", counted)
    found = open_tensors(tmp_path, "model")
    assert not read
    assert torch.equal(found["b"].read_rows(30, 71), torch.ones(41, 8))
    assert sum(size_bytes for _, size_bytes in read) == 41 * 32
    offsets, sizes = zip(*read, strict=True)
    assert list(offsets) == [offsets[0] + sum(sizes[:number]) for number in range(len(sizes))]


def change_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        changed = json.dumps(header).encode()
        return len(changed).to_bytes(8, "little") + changed + content[8 + length :]

    return apply


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "torn in the header": lambda content: content[:20],
    "torn in a tensor": lambda content: content[:-1],
    "longer than its header says": lambda content: content + b"x",
    "a header that is no JSON": lambda content: content[:8] + b"x" + content[9:],
    "a header longer than the file": lambda content: (2**40).to_bytes(8, "little") + content[8:],
    "a gap": change_header(lambda header: header["b"].update(data_offsets=[49, 97])),
    "an overlap": change_header(lambda header: header["b"].update(data_offsets=[0, 48])),
    "a shape of another size": change_header(lambda header: header["a"].update(shape=[5, 3])),
    "a negative shape": change_header(lambda header: header["a"].update(shape=[-4, -3])),
    "an enormous shape": change_header(lambda header: header["a"].update(shape=[2**62, 2**62])),
    "no offsets": change_header(lambda header: header["a"].pop("data_offsets")),
    "an unknown type": change_header(lambda header: header["a"].update(dtype="F31")),
    "a type that checkpoints lack": change_header(lambda header: header["a"].update(dtype="F8_E8M0", shape=[48])),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model-0.safetensors"
    save_file({"a": torch.ones(4, 3), "b": torch.ones(4, 3)}, path)
    path.write_bytes(CORRUPT[case](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors of the checkpoint"):
        open_tensors(tmp_path, "model")


def test_a_file_that_vanishes_or_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model-0.safetensors"
    save_file({"a": torch.ones(4, 3)}, path)
    tensor = open_tensors(tmp_path, "model")["a"]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors .* is shorter"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model-0\.safetensors .* cannot be read"):
        tensor.read_rows(0, 1)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"a": torch.ones(1)}, tmp_path / f"model-{rank}.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in model-1\.safetensors of the checkpoint and in another file"):
        open_tensors(tmp_path, "model")


def test_nothing_is_read_before_everything_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    save_file(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4)).state_dict(), tmp_path / "model-0.safetensors")
    monkeypatch.setattr(os, "preadv", None)
    with pytest.raises(StateMismatch, match=r"'1.weight' is \(4, 3\)"):
        find_weights(tmp_path, model)


def test_loading_a_model_takes_memory_for_few_of_its_tensors(tmp_path: Path) -> None:
    """Of eight tensors, each as large as what is read at once, two are in memory at a time."""
    rows = BATCH_BYTES // 4096

    def build() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.full((rows, 1024), float(number))) for number in range(8)])

    save_file(build().state_dict(), tmp_path / "model-0.safetensors")
    model = build()
    for parameter in model.parameters():
        parameter.data.zero_()
    with LiveBytes() as live:
        load_weights(find_weights(tmp_path, model), model)
    assert [float(parameter.mean()) for parameter in model.parameters()] == list(range(8))
    assert BATCH_BYTES <= live.peak_bytes <= 2 * BATCH_BYTES
