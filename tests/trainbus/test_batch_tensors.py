"""Batches of every form go to the device as a whole, and keep their form."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import torch

from trainbus.data.batch_tensors import to_device

META = torch.device("meta")


class Pair(NamedTuple):
    value: Any
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping with attributes, as tokenizers return them."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


def test_nested_batches_keep_their_form() -> None:
    one = torch.ones(1)
    batch = {"pair": Pair(one, "a"), "list": [one, (one, 3)], "mapping": UserDict(x=one), "encoding": Encoding(x=one)}
    moved = to_device(batch, lambda tensor: tensor.to(META))
    assert (type(moved["pair"]), moved["pair"].name, moved["pair"].value.device) == (Pair, "a", META)
    assert (moved["list"][0].device, moved["list"][1][0].device, moved["list"][1][1]) == (META, META, 3)
    assert moved["mapping"]["x"].device == META
    assert (type(moved["encoding"]), moved["encoding"]["x"].device) == (Encoding, META)
    assert one.device.type == "cpu"
