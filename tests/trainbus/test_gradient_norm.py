"""The norm of a gradient that is divided among ranks: the same bits however it is divided, in few kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainbus.trainer.exact import norm
from trainbus.trainer.exact.norm import BLOCK, global_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("elements", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 17])
@pytest.mark.parametrize("slab", [BLOCK, 3 * BLOCK, 2**24])
def test_the_slab_of_a_kernel_changes_no_bit(monkeypatch: pytest.MonkeyPatch, slab: int, elements: int) -> None:
    torch.manual_seed(elements)
    gradient = torch.randn(elements) * torch.logspace(-20, 3, elements)
    expected = global_norm([gradient], CPU, reduce=False)
    monkeypatch.setattr(norm, "CPU_SLAB", slab)
    assert torch.equal(global_norm([gradient], CPU, reduce=False), expected)
    assert torch.equal(global_norm(list(gradient.split(97)), CPU, reduce=False), expected)
    torch.testing.assert_close(expected, gradient.double().norm(), rtol=1e-9, atol=0)


class CallCount(TorchDispatchMode):
    """Counts the calls that launch a kernel, or would."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_large_slab_takes_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.randn(64 * BLOCK)
    monkeypatch.setattr(norm, "CPU_SLAB", norm.DEVICE_SLAB)
    with CallCount() as calls:
        global_norm([gradient], CPU, reduce=False)
    assert calls.count < 64
