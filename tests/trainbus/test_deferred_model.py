"""A model is built without memory for its large parameters, and they are those of the plain build to the bit."""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.trainbus import exact_gang
from trainbus.trainer import deferred_model
from trainbus.trainer.deferred_model import DeferredModel, build_deferred
from trainbus.trainer.world import seed_all

#: Small enough that small models have parameters on both sides of it.
MIN_BYTES = 256


def build_both(build: Callable[[], nn.Module], min_bytes: int = MIN_BYTES) -> tuple[DeferredModel, nn.Module]:
    """Build a model deferred and plainly, and compare all that is real, and where the generators end."""
    seed_all(3, "model")
    plain, ends = build(), generator_states()
    seed_all(3, "model")
    model = build_deferred(build, min_bytes=min_bytes)
    assert generator_states() == ends
    assert [name for name, _ in parameters_of(model.module)] == [name for name, _ in parameters_of(plain)]
    for (name, tensor), (other, expected) in zip(model.module.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other
        assert_same(tensor, expected)
    return model, plain


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


def generator_states() -> tuple[Any, ...]:
    _, keys, *position = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), keys.tobytes(), position, random.getstate()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compare bits, strides and all."""
    assert found.device == expected.device
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    bits, others = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    assert torch.equal(bits, others)


def assert_exact(build: Callable[[], nn.Module], min_bytes: int = MIN_BYTES) -> DeferredModel:
    """Check that each large parameter is deferred, and each one equal to the plain build's, in any order."""
    model, plain = build_both(build, min_bytes)
    assert model.fallback_reason == ""
    pairs = list(zip(parameters_of(model.module), parameters_of(plain), strict=True))
    for shuffled in (pairs, pairs[::-1]):
        state = torch.get_rng_state()
        for (name, parameter), (_, expected) in shuffled:
            assert model.is_deferred(parameter) == (expected.nbytes >= min_bytes), name
            assert parameter.is_meta == model.is_deferred(parameter)
            assert parameter.requires_grad == expected.requires_grad
            assert_same(model.materialize(parameter), expected)
        assert torch.equal(torch.get_rng_state(), state)
    return model


class Layer(nn.Module):
    """A weight of 24 x 16 that a function fills."""

    def __init__(self, fill: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.before = nn.Linear(16, 24)
        self.weight = nn.Parameter(torch.zeros(24, 16))
        with torch.no_grad():
            fill(self.weight)
        self.after = nn.Linear(16, 24)


def copy_rows(weight: Tensor) -> None:
    row = torch.arange(16.0)
    for number in range(4):
        weight[number].copy_(row)
        row += 1  # what was copied must not change with it


def fill_by_value(weight: Tensor) -> None:
    weight.normal_()
    weight.div_(weight.norm())
    if weight.sum() > weight[0, 0].item():
        weight.neg_()


def fill_through_data(weight: nn.Parameter) -> None:
    weight.data.uniform_(-1, 1)
    weight.data = weight.data * 3
    weight.data[:, 3].zero_()


def fill_where_random(weight: Tensor) -> None:
    weight.fill_(1.0)
    weight[torch.rand(24, 16) < 0.5] = torch.pi
    weight.masked_fill_(torch.rand_like(weight) < 0.2, -1.0)


FILLS: dict[str, Callable[[nn.Parameter], object]] = {
    "uniform": lambda w: nn.init.uniform_(w, -0.3, 0.2),
    "normal": lambda w: nn.init.normal_(w, 0.1, 0.02),
    "strided normal": lambda w: w[:, ::2].normal_(),
    "transposed normal": lambda w: w.t().normal_(),
    "few numbers": lambda w: [w[0, :5].normal_(), w[1, :15].normal_(), w[2].normal_()],
    "constant": lambda w: nn.init.constant_(w, 0.7),
    "eye": nn.init.eye_,
    "dirac": lambda w: nn.init.dirac_(w.view(24, 4, 4)),
    "xavier uniform": nn.init.xavier_uniform_,
    "xavier normal": lambda w: nn.init.xavier_normal_(w, gain=2.0),
    "kaiming normal": lambda w: nn.init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
    "truncated normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "orthogonal": nn.init.orthogonal_,
    "orthogonal of the transpose": lambda w: nn.init.orthogonal_(w.t(), gain=0.5),
    "sparse": lambda w: nn.init.sparse_(w, 0.3),
    "bernoulli": lambda w: w.bernoulli_(0.3),
    "bernoulli of a tensor": lambda w: w.bernoulli_(torch.rand(24, 16)),
    "dropout": lambda w: w.copy_(nn.functional.dropout(torch.ones_like(w), 0.4)),
    "randn times a factor": lambda w: w.copy_(torch.randn(24, 16) * 0.02),
    "randn of a small one": lambda w: w.copy_(torch.randn(16)),
    "randint": lambda w: w.copy_(torch.randint(0, 9, (24, 16))),
    "randperm": lambda w: w.copy_(torch.randperm(24 * 16).view(24, 16)),
    "multinomial": lambda w: w[0, 0].copy_(torch.multinomial(torch.rand(400), 3)[0]),
    "linspace": lambda w: w.copy_(torch.linspace(0, 1, 24 * 16).view(24, 16)),
    "a zeroed row": lambda w: [w.normal_(), w[3].zero_()],
    "assigned slices": lambda w: [w.zero_(), w[2:9, 4:].fill_(2.0), w[:, 0].copy_(torch.ones(24))],
    "chunks": lambda w: [part.normal_(0, 1 + n) for n, part in enumerate(w.chunk(3))],
    "rows": copy_rows,
    "values": fill_by_value,
    "data": fill_through_data,
    "masks": fill_where_random,
    "halves": lambda w: w.copy_(torch.randn(24, 16).half().to(torch.bfloat16)),
    "to the host": lambda w: w.to("cpu").normal_(),
    "device of the weight": lambda w: w.copy_(torch.ones(24, 16, device=w.device).cumsum(0)),
    "type of the weight": lambda w: w.copy_(torch.randn(24, 16, dtype=torch.float64).to(w)),
    "another's shape": lambda w: w.copy_(torch.randn_like(w) + w.new_full((24, 16), 3.0)),
    "a matrix product": lambda w: w.copy_(torch.randn(24, 20) @ torch.randn(20, 16)),
    "a sorted one": lambda w: w.copy_(torch.randn(24, 16).sort(0).values),
    "concatenated": lambda w: w.copy_(torch.cat([torch.randn(4, 16), torch.zeros(20, 16)])),
    "foreach": lambda w: torch._foreach_mul_([w.fill_(1.0)[0], w[1]], [2.0, 3.0]),
    "out": lambda w: torch.mul(torch.randn(24, 16), 2.0, out=w),
    "a list": lambda w: w.copy_(torch.tensor(w.fill_(2.0)[0].tolist()) + 1),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_initialisers_draw_the_same_numbers(fill: Callable[[nn.Parameter], object]) -> None:
    assert_exact(lambda: Layer(fill))


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(30, 16, padding_idx=2), "head": nn.Linear(16, 30, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


def with_other_default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(200))
    finally:
        torch.set_default_dtype(torch.float32)


def applied() -> nn.Module:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    return nn.Sequential(nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 16)).apply(init)


def with_rotary_buffer() -> nn.Module:
    model = nn.Linear(16, 24)
    angles = torch.outer(torch.arange(64.0), torch.arange(16.0))
    model.register_buffer("angles", torch.cat([angles.cos(), angles.sin()], 1), persistent=False)
    model.register_buffer("mask", torch.ones(32, 32).tril())
    return model


def with_loaded_state() -> nn.Module:
    teacher, student = nn.Linear(16, 24), nn.Linear(16, 24)
    student.load_state_dict(teacher.state_dict())
    return nn.ModuleList([teacher, student])


MODELS: dict[str, Callable[[], nn.Module]] = {
    **exact_gang.MODELS,
    "transformer": lambda: nn.Transformer(16, 2, 1, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 16, 2, bidirectional=True),
    "tied": tied,
    "copied": lambda: nn.ModuleList([copy.deepcopy(layer) for layer in [nn.Linear(16, 24)] * 2]),
    "half": lambda: nn.Linear(16, 24).half(),
    "converted": lambda: nn.Linear(16, 24).to(torch.float64).to("cpu"),
    "bfloat16": with_other_default_dtype,
    "applied": applied,
    "buffers": with_rotary_buffer,
    "copied buffers": lambda: copy.deepcopy(with_rotary_buffer()),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(16, 24)),
    "a loaded state": with_loaded_state,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_of_the_plain_build(name: str) -> None:
    assert_exact(MODELS[name])


def test_tied_parameters_stay_tied() -> None:
    model = assert_exact(tied)
    assert model.module["head"].weight is model.module["embedding"].weight


class Holder(nn.Module):
    """Keeps large tensors in places that no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 16))
        self.tables = [torch.randn(24, 16)]
        self.row = self.tables[0][3]
        self.initial = self.weight.detach()
        table = torch.randn(24, 16)
        self.read = lambda: table
        self.cast = nn.Parameter(torch.ones(4, 16).half())
        self.cast.tag = "small"
        self.listed = [self.cast]


def test_tensors_that_are_no_parameters_get_memory() -> None:
    model, plain = build_both(Holder)
    found = model.module
    assert_same(found.tables[0], plain.tables[0])
    assert_same(found.read(), plain.read())
    assert_same(found.initial, plain.initial)
    assert_same(found.cast, plain.cast)
    assert found.listed[0] is found.cast
    assert found.cast.tag == "small"
    found.tables[0][3].fill_(5.0)
    assert found.row.tolist() == [5.0] * 16


def test_a_part_of_a_storage_is_copied_out_of_it() -> None:
    model = build_deferred(lambda: nn.ParameterList([nn.Parameter(torch.ones(100, 100)[50:])]), min_bytes=MIN_BYTES)
    [parameter] = model.module.parameters()
    assert model.materialize(parameter).untyped_storage().nbytes() == 4 * 5000


# --- fallback -----------------------------------------------------------------------------------


class OwnParameter(nn.Parameter):
    pass


def catch_error(weight: nn.Parameter) -> None:
    try:
        weight.numpy()
    except RuntimeError:
        weight.zero_()  # as in the plain build, where the parameter requires a gradient


def branch(weight: Tensor) -> None:
    """Take exponential time to replay."""
    found = torch.ones(24, 16)
    for _ in range(30):
        found = found * 2 + found
    weight.copy_(found)


def nest(weight: Tensor) -> None:
    found = torch.ones(24, 16)
    for _ in range(100):
        found = found * 2
    weight.copy_(found)


def own_generator(weight: Tensor) -> None:
    weight.normal_(generator=torch.Generator().manual_seed(1))


def from_numpy(weight: Tensor) -> None:
    weight.copy_(torch.from_numpy(np.random.rand(24, 16)))


def share_memory(weight: nn.Parameter) -> None:
    weight.data.numpy()[:] = random.random()


def other_memory(weight: nn.Parameter) -> None:
    weight.data.resize_(24, 18).normal_()


FALLBACKS: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "generator": (own_generator, "aten.normal_.default draws from a generator of its own"),
    "large operand": (from_numpy, "a tensor of 3072 bytes from elsewhere is an operand"),
    "numpy": (share_memory, "the model uses numpy() of a large tensor"),
    "pickle": (pickle.dumps, "of a large tensor"),
    "resize": (other_memory, "aten.resize_.default gives a large tensor other memory"),
    "meta": (lambda w: w.to("meta"), "a large tensor moves to the meta device"),
    "sparse": (lambda w: w.copy_(w.fill_(2.0).to_sparse().to_dense()), "sparse"),
    "complex": (lambda w: w.copy_(torch.randn(24, 16, dtype=torch.cfloat).conj().imag), "conjugate"),
    "exponential": (branch, "a tensor is computed in"),
    "nested": (nest, "a tensor is computed in"),
    "caught": (catch_error, "the model uses numpy() of a large tensor"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_cannot_be_deferred_is_built_plainly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(deferred_model, "print", lambda text, flush: lines.append(text), raising=False)
    fill, reason = FALLBACKS[name]
    model, plain = build_both(lambda: Layer(fill))
    assert model.deferred == {}
    for (_, parameter), (_, expected) in zip(parameters_of(model.module), parameters_of(plain), strict=True):
        assert not model.is_deferred(parameter)
        assert_same(model.materialize(parameter), expected)
    [line] = lines
    assert reason in line
    assert reason in model.fallback_reason


def test_a_parameter_class_of_its_own_is_built_plainly() -> None:
    model, _ = build_both(lambda: nn.ParameterList([OwnParameter(torch.randn(24, 16))]))
    assert model.fallback_reason == "a parameter is a OwnParameter"
    assert type(model.module[0]) is OwnParameter


def test_a_parameter_that_is_left_on_the_meta_device_stays_there() -> None:
    model, _ = build_both(lambda: nn.ModuleList([nn.Linear(16, 24), nn.Linear(2, 2, device="meta")]))
    assert model.fallback_reason == "a parameter or buffer is on the meta device"
    assert [each.is_meta for each in model.module.parameters()] == [False, False, True, True]


def test_an_error_of_the_build_is_the_users() -> None:
    calls: list[int] = []

    def build() -> nn.Module:
        calls.append(len(calls))
        nn.Linear(16, 24)
        raise KeyError(f"call {calls[-1]}")

    with pytest.raises(KeyError, match="call 1"):
        build_deferred(build, min_bytes=MIN_BYTES)


# --- memory -------------------------------------------------------------------------------------

LAYER_BYTES, LAYERS = 40 * 2**20, 8


def build_large() -> nn.Module:
    width = LAYER_BYTES // 4 // 1024
    return nn.Sequential(*(nn.Linear(1024, width, bias=False) for _ in range(LAYERS)))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy()).hexdigest()


def limit_memory(extra_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, resource.RLIM_INFINITY))


def build_in_limits(is_deferred: bool, answers: Any) -> None:
    torch.set_num_threads(1)
    limit_memory(3 * LAYER_BYTES)
    try:
        if not is_deferred:
            build_large()
            answers.put(["built"])
        else:
            model = build_deferred(build_large)
            answers.put([digest(model.materialize(each)) for each in model.module.parameters()])
    except RuntimeError as error:
        answers.put([str(error)])


def run_in_limits(is_deferred: bool) -> list[Any]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=build_in_limits, args=(is_deferred, answers))
    process.start()
    found: list[Any] = answers.get()
    process.join()
    return found


def test_a_model_is_built_in_less_memory_than_it_takes() -> None:
    torch.manual_seed(4)
    expected = [digest(each.detach()) for each in build_large().parameters()]
    torch.manual_seed(4)
    [error] = run_in_limits(is_deferred=False)
    assert "can't allocate memory" in error
    assert run_in_limits(is_deferred=True) == expected
